// The charts, which Plotly draws.

// Colours

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";

function luminance(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The provider's colour, on dark ground so much lighter that it is seen
function colour(name) {
  if (name === "copy") return css("--ink");
  let rgb = [1, 3, 5].map((at) => parseInt(data.providers[name][1].slice(at, at + 2), 16));
  while (isDark() && luminance(rgb) < 0.2) rgb = rgb.map((c) => c + (255 - c) * 0.1);
  return `rgb(${rgb.map(Math.round).join(",")})`;
}

// Charts

function layout(own) {
  const axis = {
    gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true,
    ticks: "", tickangle: 0, exponentformat: "none",
    spikethickness: 1, spikedash: "dot", spikecolor: css("--muted"),
  };
  const { xaxis, yaxis, ...rest } = own;
  return {
    autosize: true,
    font: { family: "system-ui, Segoe UI, sans-serif", size: 12, color: css("--ink") },
    paper_bgcolor: css("--card"),
    plot_bgcolor: css("--card"),
    showlegend: false,
    separators: ".",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, showspikes: false, ...yaxis },
    ...rest,
  };
}

// The buttons are named, because some of Plotly's send data away.
const config = {
  responsive: true,
  displaylogo: false,
  showTips: false,
  doubleClick: "reset",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

// Powers of two, while at least two octaves are seen; Plotly's own ticks below
function octaves(low, high) {
  const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
  if (!(last - first >= 2)) return { tickvals: null, ticktext: null, tickmode: "auto" };
  const step = Math.ceil((last - first + 1) / (narrow.matches ? 6 : 12));
  const powers = [];
  for (let i = first; i <= last; i += step) powers.push(2 ** i);
  return { tickmode: "array", tickvals: powers, ticktext: powers.map(power) };
}

// At most two lines of a label beside an axis
function wrapped(text) {
  const width = narrow.matches ? 20 : 44;
  const parts = [""];
  for (const word of text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").split(" ")) {
    if (parts.at(-1) && `${parts.at(-1)} ${word}`.length > width) parts.push(word);
    else parts.push(`${parts.pop()} ${word}`.trim());
  }
  return (parts.length > 2 ? [parts[0], `${parts[1]} …`] : parts).join("<br>");
}

const namesShape = (line) => line.case.includes(line.shape.split(" ")[0]);

function caseText(line, chosen) {
  const name = namesShape(line) ? line.case : `${line.case}, ${line.shape}`;
  const more = ["dtype", "file"].filter((of) => several(chosen, of)).map((of) => line[of]);
  return [name, ...more].join(", ");
}

function numbersText(line, name, short = false) {
  const cell = line.cells[name];
  if (short && narrow.matches) return METRICS[state.metric].text(value(line, name));
  const spread = cell.p20 && cell.p80 && !short ? ` (${time(cell.p20)} to ${time(cell.p80)})` : "";
  const parts = [`${time(cell.us)} us${spread}`, `${value(line, name, "gbps").toFixed(0)} GB/s`];
  if (name !== "copy" && cell.fraction !== null) parts.unshift(`${cell.fraction.toFixed(2)} of the limit`);
  const change = state.base && value(line, name, "change");
  if (change) parts.push(`${change.toFixed(2)} of the time before`);
  return parts.join(", ");
}

const DASHES = { solid: "solid", dot: "dotted", dashdot: "dash-dotted", longdash: "long-dashed" };

// In what the lines of one provider differ, where a chart has several
function kindText(line, chosen) {
  return FILTERS.filter((name) => several(chosen, name)).map((name) => line[name]).join(" ");
}

function dashOf(kind, kinds) {
  const dashes = Object.keys(DASHES);
  return dashes[kinds.indexOf(kind) % dashes.length];
}

function drawChart(chosen, names, axisLabel) {
  const metric = METRICS[state.metric];
  const across = state.axis === "case" || state.axis === "suite"; // categories down the side, the metric to the right
  const joined = state.axis === "x";
  const text = (line) => (state.axis === "case" ? caseText(line, chosen) : state.axis === "suite" ? line.suite : "");
  const categories = across ? unique(chosen.map(text)) : [];
  const place = new Map(categories.map((category, i) => [category, i]));
  const shown = names.filter((name) => name !== "copy" || !metric.limit);
  const every = unique(chosen.map((line) => kindText(line, chosen)));

  const traces = [];
  for (const [i, name] of [...shown.entries()].reverse()) { // the first is drawn last, on top
    const kinds = new Map();
    for (const line of chosen) {
      if (value(line, name) === null) continue;
      const kind = joined ? kindText(line, chosen) : "";
      if (!kinds.has(kind)) kinds.set(kind, []);
      kinds.get(kind).push(line);
    }
    for (const [kind, of] of kinds) {
      if (joined) of.sort((a, b) => a.x - b.x);
      const shift = state.axis === "suite" ? ((i + 0.5) / shown.length - 0.5) * 0.7 : 0;
      const at = of.map((line) => (across ? place.get(text(line)) + shift : line[state.axis]));
      const values = of.map((line) => value(line, name));
      const copy = name === "copy";
      const many = joined ? of.length > 40 : chosen.length > 200;
      const symbol = copy ? (across ? "line-ns-open" : "line-ew-open") : data.providers[name][2];
      traces.push({
        type: "scatter",
        name: kind ? `${providerLabel(name)}, ${kind}` : providerLabel(name),
        cliponaxis: false, // a marker at 0 is whole
        legendrank: 1000 + i, // the order of the hover label
        mode: joined ? (copy ? "lines" : "lines+markers") : "markers",
        x: across ? values : at,
        y: across ? at : values,
        text: of.map((line) => (joined ? "" : `${caseText(line, chosen)}<br>`) + numbersText(line, name, joined)),
        hovertemplate: joined ? "%{text}" : "%{text}<extra>%{fullData.name}</extra>",
        line: { color: colour(name), width: name === "onepass" ? 3 : 1.8, dash: copy ? "dash" : dashOf(kind, every) },
        marker: {
          color: colour(name),
          symbol,
          size: copy ? 12 : many ? 5 : joined ? 7 : 10,
          opacity: chosen.length > 60 && !joined ? 0.75 : 1,
          line: { width: copy ? 2 : joined || many ? 0 : 1, color: copy ? colour(name) : css("--card") },
        },
      });
    }
  }

  const xs = chosen.map((line) => line[state.axis]).filter(Boolean);
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  const metricAxis = { title: { text: metric.label }, type: metric.log ? "log" : "linear" };
  metricAxis.rangemode = state.metric === "change" ? "normal" : "tozero";
  const lengthAxis = { title: { text: axisLabel }, type: "log", ...octaves(low, high) };
  lengthAxis.range = [Math.log10(low) - 0.05, Math.log10(high) + 0.05];
  const caseAxis = {
    tickmode: "array",
    tickvals: categories.map((_, i) => i),
    ticktext: categories.map(wrapped),
    ticklabelstandoff: 6,
    tickfont: { size: narrow.matches ? 10 : 12 },
    range: [categories.length - 0.5, -0.5],
  };
  const limit = metric.limit && (state.metric === "change" || names.includes("copy"));
  const equals = narrow.matches && !across ? "1.0 =<br>" : "1.0 = ";
  const label = { text: state.metric === "change" ? "no change" : equals + limitText(chosen), showarrow: false };
  const [along, other] = across ? ["x", "y"] : ["y", "x"];
  const row = narrow.matches ? 34 : 26;
  const height = !across ? (narrow.matches ? 340 : 460) : 110 + categories.length * (state.axis === "suite" ? 44 : row);
  Plotly.react(
    $("chart"),
    traces,
    layout({
      height,
      margin: { l: 8, r: across || !limit ? 12 : narrow.matches ? 58 : 96, t: 34, b: 8 },
      hovermode: joined ? "x unified" : "closest",
      xaxis: across ? metricAxis : lengthAxis,
      yaxis: across ? caseAxis : metricAxis,
      shapes: !limit ? [] : [
        {
          type: "line", layer: "above", line: { color: css("--ink"), width: 1.4, dash: "dash" },
          [`${other}ref`]: "paper", [`${other}0`]: 0, [`${other}1`]: 1, [`${along}0`]: 1, [`${along}1`]: 1,
        },
      ],
      annotations: !limit ? [] : [
        across
          ? { ...label, x: 1, y: 1, yref: "paper", yanchor: "bottom", xanchor: "center" }
          : { ...label, x: 1, xref: "paper", y: 1, xanchor: "left", yanchor: "middle", align: "left" },
      ],
    }),
    config,
  );
  $("chart").removeAllListeners?.("plotly_relayout");
  if (!across) {
    $("chart").on("plotly_relayout", (changed) => {
      if (!Object.keys(changed).some((key) => key.startsWith("xaxis.range") || key === "xaxis.autorange")) return;
      const [from, to] = $("chart").layout.xaxis.range.map((v) => 10 ** v);
      const ticks = Object.entries(octaves(from, to)).map(([key, of]) => [`xaxis.${key}`, of]);
      Plotly.relayout($("chart"), Object.fromEntries(ticks));
    });
  }
}

function drawMap(chosen, names) {
  const providers = names.filter((name) => name !== "copy");
  if (!providers.includes(state.heat)) state.heat = providers[0] || "";
  choose("heat", providers.map((name) => [name, providerLabel(name)]), state.heat);
  const cells = new Map();
  for (const line of chosen) {
    const fraction = value(line, state.heat, "fraction");
    if (fraction === null || line.m < 1 || line.n < 1) continue;
    const at = [Math.floor(Math.log2(line.n)), Math.floor(Math.log2(line.m))].join();
    cells.set(at, [...(cells.get(at) || []), fraction]);
  }
  $("shapes").hidden = cells.size < 2;
  if (cells.size < 2) return;
  const corners = [...cells.keys()].map((key) => key.split(",").map(Number));
  const span = (i) => {
    const [first, last] = [Math.min(...corners.map((c) => c[i])), Math.max(...corners.map((c) => c[i]))];
    return Array.from({ length: last - first + 1 }, (_, k) => first + k);
  };
  const [ns, ms] = [span(0), span(1)];
  const at = (n, m) => cells.get(`${n},${m}`);
  const mean = (of) => of.reduce((a, b) => a + b, 0) / of.length;
  const range = (e) => (e === 0 ? "1" : `${2 ** e} to ${2 ** (e + 1) - 1}`);
  const labelled = $("map").clientWidth / (ns.length + 4) > 30; // where a number fits into a cell
  const means = corners.map(([n, m]) => mean(at(n, m)));
  const step = (of, most) => Math.ceil(of.length / most);
  const ticks = (of, most) => of.filter((_, i) => i % step(of, most) === 0);
  const axis = (of, title, most) => ({
    title: { text: title }, tickmode: "array", tickvals: ticks(of, most),
    ticktext: ticks(of, most).map((e) => power(2 ** e)), showgrid: false, range: [of[0] - 0.5, of.at(-1) + 0.5],
  });
  Plotly.react(
    $("map"),
    [
      {
        type: "heatmap", x: ns, y: ms, xgap: 1, ygap: 1, hoverongaps: false, zmin: 0, zmax: 1, colorscale: "Viridis",
        z: ms.map((m) => ns.map((n) => (at(n, m) ? mean(at(n, m)) : null))),
        customdata: ms.map((m) => ns.map((n) => {
          const of = at(n, m);
          return of ? `${of.length} cases, mean ${mean(of).toFixed(2)}, worst ${Math.min(...of).toFixed(2)}` : "";
        })),
        hovertext: ms.map((m) => ns.map((n) => `N ${range(n)}<br>M ${range(m)}`)),
        hovertemplate: "%{hovertext}<br>%{customdata}<extra></extra>",
        colorbar: { thickness: 12, outlinewidth: 0, tickvals: [0, 0.5, 1], ticktext: ["0", "0.5", limitText(chosen)] },
      },
      {
        type: "scatter", mode: "text", hoverinfo: "skip",
        x: corners.map(([n]) => n), y: corners.map(([, m]) => m),
        text: labelled ? means.map((v) => v.toFixed(2)) : [],
        textfont: { size: 11, color: means.map((v) => (v < 0.45 ? "#fff" : "#111")) },
      },
    ],
    layout({
      height: 90 + Math.max(3, ms.length) * 24,
      margin: { l: 8, r: 8, t: 30, b: 8 },
      hovermode: "closest",
      xaxis: axis(ns, AXES.n, narrow.matches ? 7 : 30),
      yaxis: axis(ms, ms.length < 6 ? "M" : AXES.m, 12),
    }),
    config,
  );
}
