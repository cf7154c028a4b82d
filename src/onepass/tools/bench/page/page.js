// Every change of a control sets `state` and draws all again.

// Titles and the environment

function drawTitle(chosen) {
  const parts = ["suite", "function", "direction", "dtype"].map((name) => {
    const values = unique(chosen.map((line) => line[name]));
    return values.length === 1 ? values[0] : `${values.length} ${name}s`;
  });
  $("title").textContent = chosen.length ? parts.join(", ") : "No case fits";
  const about = unique(chosen.map((line) => line.about)).filter(Boolean);
  const of = unique(chosen.map((line) => line.file)).map((name) => files.get(name).environment);
  const devices = unique(of.map((e) => e.device)).join(", ");
  const versions = unique(of.map((e) => `torch ${e.torch}`)).join(", ");
  const dates = unique(of.map((e) => String(e.date).slice(0, 10))).join(", ");
  const texts = [devices, about.length === 1 ? about[0] : "", versions, dates];
  const kinds = unique(chosen.map((line) => kindText(line, chosen)));
  if (state.axis === "x" && kinds.length > 1) {
    texts.push(kinds.map((kind) => `${DASHES[dashOf(kind, kinds)]}: ${kind}`).join(", "));
  }
  if (state.base) {
    const e = files.get(state.base).environment;
    texts.push(`before: ${state.base}, ${e.device}, ${String(e.date).slice(0, 10)}`);
  }
  $("about").textContent = texts.filter(Boolean).join(" · ");
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function drawEnvironments() {
  const shown = data.files.filter((file) => state.file === ALL || [state.file, state.base].includes(file.name));
  const parts = shown.map((file) => {
    const terms = Object.entries(file.environment).flatMap(([key, v]) => [
      element("dt", key), element("dd", typeof v === "object" ? JSON.stringify(v) : String(v)),
    ]);
    const reasons = file.problems.map((text) => element("li", text));
    const missing = reasons.length ? [element("p", "Why times are missing:"), element("ul", ...reasons)] : [];
    const own = element("details", element("summary", file.name), element("dl", ...terms), ...missing);
    own.open = shown.length === 1;
    return own;
  });
  $("environments").replaceChildren($("environments").querySelector("h2"), ...parts);
}

// All of it

function draw() {
  const chosen = filter();
  chooseBase();
  chooseMetric(chosen);
  const axisLabel = chooseAxis(chosen);
  const order = ["onepass", ...Object.keys(data.providers).filter((name) => name !== "onepass"), "copy"];
  const all = order.filter((name) => chosen.some((line) => name in line.cells));
  const off = state.off.split(",");
  const tells = (name) => chosen.some((line) => value(line, name) !== null || line.cells[name]?.note);
  const names = all.filter((name) => !off.includes(name) && tells(name));
  drawTitle(chosen);
  drawProviders(chosen, all, off);
  drawChart(chosen, names, axisLabel);
  drawMap(chosen, names);
  drawTable(chosen, names);
  drawEnvironments();
  const differing = Object.entries(state).filter(([name, v]) => v !== (initial[name] ?? null));
  history.replaceState(null, "", `#${new URLSearchParams(differing)}`);
}

// The address holds what is selected, so that a link can
function readAddress() {
  Object.assign(state, initial, Object.fromEntries(FILTERS.map((name) => [name, undefined])));
  for (const [name, v] of new URLSearchParams(location.hash.slice(1))) if (name in state) state[name] = v;
  $("text").value = state.text;
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
}

for (const id of [...FILTERS, "metric", "axis", "base", "heat"]) {
  $(id).addEventListener("change", () => {
    state[id] = $(id).value;
    if (FILTERS.includes(id)) state.axis = "";
    if (id === "base") state.metric = state.base ? "change" : "fraction";
    draw();
  });
}
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("text").addEventListener("input", () => {
  state.text = $("text").value;
  draw();
});
$("providers").addEventListener("click", (event) => {
  const name = event.target.closest("button")?.dataset.provider;
  if (!name) return;
  const off = state.off.split(",").filter(Boolean);
  state.off = (off.includes(name) ? off.filter((of) => of !== name) : [...off, name]).join(",");
  draw();
  $("providers").querySelector(`[data-provider="${CSS.escape(name)}"]`).focus();
});
$("cases").addEventListener("click", (event) => {
  const id = event.target.closest("button")?.dataset.sort;
  if (!id) return;
  state.down = state.sort === id && !state.down ? "1" : "";
  state.sort = id;
  draw();
});
$("more").addEventListener("click", () => {
  everyRow = true;
  draw();
});
$("theme").addEventListener("click", () => {
  setTheme(!isDark());
  draw();
});
narrow.addEventListener("change", draw);
addEventListener("hashchange", () => {
  readAddress();
  draw();
});
const preference = matchMedia("(prefers-color-scheme: dark)");
preference.addEventListener("change", () => {
  setTheme(preference.matches);
  draw();
});

setTheme(preference.matches);
readAddress();
draw();
