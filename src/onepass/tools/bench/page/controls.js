// What the controls offer, and what they select. Each offers what those before it leave.

function choose(id, options, chosen) {
  const select = $(id);
  select.replaceChildren(...options.map(([of, label]) => new Option(label, of, false, of === chosen)));
  select.closest("label").hidden = options.length < 2;
}

// The lines that the filters leave
function filter() {
  let chosen = lines;
  for (const name of FILTERS) {
    const values = unique(chosen.map((line) => line[name]));
    const all = values.length > 1;
    if (!values.includes(state[name]) && !(state[name] === ALL && all)) {
      state[name] = all && name !== "file" && chosen.every((line) => line.drawn) ? ALL : values[0];
    }
    choose(name, [...values.map((v) => [v, v]), ...(all ? [[ALL, `all ${values.length}`]] : [])], state[name]);
    if (state[name] !== ALL) chosen = chosen.filter((line) => line[name] === state[name]);
  }
  const text = state.text.toLowerCase();
  return chosen.filter((line) => `${line.case} ${line.shape} ${line.dtype} ${line.suite}`.toLowerCase().includes(text));
}

function chooseBase() {
  const own = state.file === ALL ? [] : [...lineMaps.get(state.file).keys()];
  const others = data.files.filter((f) => f.name !== state.file && own.some((key) => lineMaps.get(f.name).has(key)));
  if (!others.some((f) => f.name === state.base)) state.base = "";
  choose("base", [["", "no other file"], ...others.map((f) => [f.name, f.name])], state.base);
}

function chooseMetric(chosen) {
  const measured = (metric) => chosen.some((line) => Object.values(line.cells).some((cell) => cell[metric] !== null));
  const usable = Object.keys(METRICS).filter((metric) =>
    metric === "change" ? state.base : ["graph", "call"].includes(metric) ? measured(metric) : true,
  );
  if (!usable.includes(state.metric)) state.metric = "fraction";
  choose("metric", usable.map((metric) => [metric, METRICS[metric].label]), state.metric);
}

// The first axis is the one that fits what is selected
function chooseAxis(chosen) {
  const sweep = chosen.length && chosen[0].axis && !several(chosen, "axis");
  const cases = chosen.length <= MOST_CASES ? ["case"] : [];
  const suites = several(chosen, "suite") ? ["suite"] : [];
  const drawn = chosen.every((line) => line.drawn);
  const points = [...suites, "n", ...cases];
  const found = sweep ? ["x", ...points] : drawn ? points : [...cases, ...suites, "n"];
  const label = (axis) => (axis === "x" ? chosen[0].axis : AXES[axis]);
  const shown = [...found, "m", "bytes"].filter((axis) => axis !== "n" || !sweep || label("n") !== label("x"));
  if (!shown.includes(state.axis)) state.axis = shown[0];
  choose("axis", shown.map((axis) => [axis, label(axis)]), state.axis);
  return label(state.axis);
}
