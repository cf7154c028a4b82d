"use strict";
// The lines of the results files, as html_report.py wrote them, what is selected of them, and their numbers.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 860px)");

const METRICS = {
  fraction: { label: "fraction of the limit", limit: 1, text: (v) => v.toFixed(2) },
  gbps: { label: "GB/s, read + written", text: (v) => v.toFixed(v < 100 ? 1 : 0) },
  us: { label: "time, us", log: true, text: time },
  graph: { label: "time in a CUDA graph, us", log: true, text: time },
  call: { label: "time of a call, host included, us", log: true, text: time },
  change: { label: "time over the time before", limit: 1, text: (v) => v.toFixed(2) },
};
const AXES = {
  n: "N, the length of a row", m: "M, the number of rows", bytes: "bytes moved", case: "case", suite: "suite",
};
const FILTERS = ["file", "suite", "function", "direction", "dtype"];
const ALL = "";
const MOST_CASES = 150; // more do not fit on an axis
const FIRST_ROWS = 100; // of the table, until a click shows all

// Each marker in a box of 12 by 12, for the list of providers; the names are Plotly's
const GLYPHS = {
  circle: "M11 6A5 5 0 1 1 1 6A5 5 0 1 1 11 6Z",
  square: "M1.5 1.5H10.5V10.5H1.5Z",
  diamond: "M6 0L12 6L6 12L0 6Z",
  "diamond-tall": "M6 0L10 6L6 12L2 6Z",
  pentagon: "M6 0.5L11.5 4.5L9.4 11H2.6L0.5 4.5Z",
  star: "M6 0L7.6 4H12L8.5 6.8L9.7 11.2L6 8.6L2.3 11.2L3.5 6.8L0 4H4.4Z",
  "triangle-up": "M6 1L11.5 11H0.5Z",
  "triangle-down": "M0.5 1H11.5L6 11Z",
  "triangle-left": "M1 6L11 0.5V11.5Z",
  "triangle-right": "M1 0.5L11 6L1 11.5Z",
  cross: "M4 0.5H8V4H11.5V8H8V11.5H4V8H0.5V4H4Z",
  x: "M3 0.5L6 3.5L9 0.5L11.5 3L8.5 6L11.5 9L9 11.5L6 8.5L3 11.5L0.5 9L3.5 6L0.5 3Z",
  hexagon: "M3 0.8H9L12 6L9 11.2H3L0 6Z",
  hexagon2: "M6 0L11.2 3V9L6 12L0.8 9V3Z",
  octagon: "M3.7 0.5H8.3L11.5 3.7V8.3L8.3 11.5H3.7L0.5 8.3V3.7Z",
  line: "M0 5H4.5V7H0ZM7.5 5H12V7H7.5Z",
};

const lines = data.files.flatMap((file) =>
  file.lines.map(([group, name, shape, m, n, x, bytes, cells]) => {
    const line = { file: file.name, ...file.groups[group], case: name, shape, m, n, x, bytes, cells: {} };
    line.key = [line.suite, name, shape, line.function, line.direction, line.dtype, line.threads, line.world].join("|");
    for (const [provider, [us, p20, p80, fraction, graph, call, note]] of Object.entries(cells)) {
      line.cells[provider] = { us, p20, p80, fraction, graph, call, note };
    }
    return line;
  }),
);
const files = new Map(data.files.map((file) => [file.name, file]));
const lineMaps = new Map(
  data.files.map(({ name }) => [name, new Map(lines.filter((l) => l.file === name).map((l) => [l.key, l]))]),
);

const initial = { metric: "fraction", axis: "", base: "", text: "", heat: "onepass", off: "", sort: "", down: "" };
const state = { ...initial };
let everyRow = false;

// Numbers and words

function time(us) {
  return us < 9.995 ? us.toFixed(2) : us < 99.95 ? us.toFixed(1) : us.toFixed(0);
}

function power(n) {
  const units = ["", "K", "M", "G", "T"];
  let i = 0;
  while (n >= 1024 && n % 1024 === 0) [n, i] = [n / 1024, i + 1];
  return `${n}${units[i]}`;
}

const unique = (values) => [...new Set(values)];
const geomean = (values) => Math.exp(values.reduce((sum, v) => sum + Math.log(v), 0) / values.length);
const providerLabel = (name) => (name === "copy" ? "the limit" : data.providers[name][0]);

// Whether lines differ in a field; remembered, because each line's texts ask
const differing = new WeakMap();
function several(of, name) {
  if (!differing.has(of)) differing.set(of, {});
  return (differing.get(of)[name] ??= unique(of.map((line) => line[name])).length > 1);
}

// A provider's value on a line, null without one that may be trusted
function value(line, name, metric = state.metric) {
  const cell = line.cells[name];
  if (!cell || cell.note) return null;
  if (metric === "gbps") return line.bytes / cell.us / 1000;
  if (metric === "change") {
    const before = lineMaps.get(state.base)?.get(line.key)?.cells[name];
    return before && !before.note ? cell.us / before.us : null;
  }
  return cell[metric];
}

// How many times as fast as a provider onepass is
function speedup(line, name) {
  const [us, ours] = [value(line, name, "us"), value(line, "onepass", "us")];
  return us && ours ? us / ours : null;
}

// What a fraction is of
function limitText(chosen) {
  const kinds = unique(chosen.map((line) => line.limit));
  return kinds.length > 1 ? "the limit" : kinds[0] === "copy" ? "a copy" : "an addition";
}
