// The list of providers

function drawProviders(chosen, all, off) {
  const rows = all.map((name) => {
    const numbers = (metric) => chosen.map((line) => value(line, name, metric)).filter((v) => v !== null);
    const fractions = numbers("fraction");
    const compared = name === "onepass" || name === "copy" ? [] : chosen;
    const ratios = compared.map((line) => speedup(line, name)).filter((v) => v !== null);
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.provider = name;
    button.setAttribute("aria-pressed", String(!off.includes(name)));
    const glyph = name === "copy" ? "line" : data.providers[name][2];
    const path = `<path d="${GLYPHS[glyph]}" fill="${colour(name)}"/>`;
    button.innerHTML = `<svg width="12" height="12" aria-hidden="true">${path}</svg>`;
    button.append(providerLabel(name));
    const means = name === "copy" || !fractions.length ? null : [geomean(fractions), Math.min(...fractions)];
    const cells = means ? means.map((v) => v.toFixed(2)) : ["", ""];
    return [button, ...cells, ratios.length ? `${geomean(ratios).toFixed(2)}x` : ""];
  });
  fill($("providers").tBodies[0], rows);
}

function fill(body, rows) {
  body.replaceChildren(
    ...rows.map((cells) => {
      const row = document.createElement("tr");
      for (const cell of cells) {
        const { text = cell, kind = "", title = "" } = cell instanceof Object && !(cell instanceof Node) ? cell : {};
        const td = row.insertCell();
        td.append(text);
        td.className = kind;
        td.title = title;
      }
      return row;
    }),
  );
}

// The table of cases

function columns(chosen, names) {
  const words = (id, label, get) => {
    const show = (line) => ({ text: get(line), kind: "text", title: get(line) });
    return { id, label, kind: "text", get, show };
  };
  const number = (id, label, get, text) => {
    const show = (line) => (get(line) === null ? "" : text(get(line)));
    return { id, label, get, show };
  };
  const found = [words("case", "case", (line) => line.case)];
  if (!chosen.every(namesShape)) found.push(words("shape", "shape", (line) => line.shape));
  for (const name of ["dtype", "suite", "file"].filter((of) => several(chosen, of))) {
    found.push(words(name, name, (line) => line[name]));
  }
  const sizes = [number("m", "M", (line) => line.m, String), number("n", "N", (line) => line.n, String)];
  if (!narrow.matches) found.push(...sizes);
  for (const name of names) {
    const metric = name === "copy" && state.metric === "fraction" ? "gbps" : state.metric;
    const label = `${providerLabel(name)}${metric === state.metric ? "" : ", GB/s"}`;
    const get = (line) => value(line, name, metric);
    found.push({ id: `of ${name}`, label, get, show: (line) => cellText(line, name, metric) });
  }
  if (names.includes("torch") && names.includes("onepass")) {
    found.push(number("times", "times torch", (line) => speedup(line, "torch"), (v) => v.toFixed(2)));
  }
  if (narrow.matches) found.push(...sizes);
  return found;
}

function cellText(line, name, metric) {
  const cell = line.cells[name];
  if (!cell) return "";
  if (cell.note && (cell.note !== "disturbed" || cell.us === null)) return { text: cell.note, kind: "none" };
  if (cell.note) return { text: `${time(cell.us)} us?`, kind: "none", title: "disturbed: not to be trusted" };
  const rivals = Object.keys(line.cells).filter((of) => of !== "copy");
  const times = rivals.map((of) => value(line, of, "us")).filter((v) => v !== null);
  const best = name !== "copy" && cell.us === Math.min(...times) && state.metric !== "change";
  const of = value(line, name, metric);
  if (of === null) return "";
  return { text: METRICS[metric].text(of), kind: best ? "best" : "", title: numbersText(line, name) };
}

function drawTable(chosen, names) {
  const shown = columns(chosen, names);
  const sorting = shown.find((column) => column.id === state.sort);
  const rows = [...chosen];
  if (sorting) {
    const sign = state.down ? -1 : 1;
    rows.sort((a, b) => {
      const [left, right] = [sorting.get(a), sorting.get(b)];
      if (left === null || right === null) return (left === null) - (right === null); // what is missing comes last
      return sign * (sorting.kind ? left.localeCompare(right, "en", { numeric: true }) : left - right);
    });
  }
  const head = document.createElement("tr");
  for (const column of shown) {
    const th = document.createElement("th");
    const button = document.createElement("button");
    th.className = column.kind || "";
    th.scope = "col";
    if (column === sorting) th.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    button.type = "button";
    button.dataset.sort = column.id;
    button.append(column.label);
    th.append(button);
    head.append(th);
  }
  $("cases").tHead.replaceChildren(head);
  const count = everyRow ? rows.length : Math.min(rows.length, FIRST_ROWS);
  fill($("cases").tBodies[0], rows.slice(0, count).map((line) => shown.map((column) => column.show(line))));
  $("count").textContent = `${rows.length} case${rows.length === 1 ? "" : "s"}, ${METRICS[state.metric].label}`;
  $("more").hidden = count === rows.length;
  $("more").textContent = `Show all ${rows.length} cases`;
}
