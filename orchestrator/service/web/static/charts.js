// Curves of trainings: related measurements share a chart, and all charts the cursor, the axis and the smoothing.
import { $, h } from "./dom.js";
import { bytes, duration, number } from "./format.js";

// What orc measures comes behind what the script has written, in this order.
const MEASURED = ["samples_per_s", "tokens_per_s", "step_s", "slowest_step_s", "grad_norm", "data_wait", "mfu", "tflops", "memory_allocated", "other_s"];
const BAND = { __proto__: null, step_s: ["step_s_min", "step_s_max"], data_wait: ["data_wait", "data_wait_max"] }; // the spread between ranks
const BESIDE = { __proto__: null, memory_allocated: ["memory_reserved", "memory_peak"] };
const NAMES = {
  __proto__: null, // measurements have any name
  samples_per_s: "samples/s", tokens_per_s: "tokens/s", step_s: "step time (s)", slowest_step_s: "slowest step (s)", grad_norm: "gradient norm",
  memory_allocated: "memory of the fullest GPU", data_wait: "data wait (share of step)", mfu: "MFU", tflops: "TFLOP/s per device", other_s: "outside of steps (s)",
};
const LEFT_OUT = ["epoch", "steps", "window_s", "world_size", "ranks", "slowest_rank"];
const SPLIT = /^(train|training|val|valid|validation|eval|test)[_/]/;
const COLORS = ["--accent", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const SHOWN = 16;
const HEIGHT = { large: 250, small: 170 };
const text = (name) => (name.startsWith("memory_") ? bytes : number);
const charts = new Map(); // by name: {figure, values, plot, made, panel}
let runs = [];
const kept = JSON.parse(localStorage.getItem("orc-charts") ?? "{}");
const choice = { x: kept.x === "time" ? "time" : "step", log: kept.log === true, smooth: Number(kept.smooth) || 0 };

// A chart is as wide as its place, which the other charts and the window decide.
const places = new ResizeObserver((entries) => {
  for (const { target } of entries) charts.get(target.dataset.metric)?.plot?.setSize(size(target));
});
const size = (figure) => ({ width: figure.clientWidth, height: figure.classList.contains("large") ? HEIGHT.large : HEIGHT.small });

/** Return a colour of the present theme: uPlot draws on a canvas, which knows no custom properties. */
function color(name) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Return the charts for the measurements of all runs: the loss, what else the scripts have written, what orc measures. */
function panels() {
  const known = new Set(runs.flatMap(({ series }) => Object.keys(series).filter((name) => series[name].length && !LEFT_OUT.includes(name))));
  const spread = [...Object.entries(BAND), ...Object.entries(BESIDE)].flatMap(([name, around]) => (known.has(name) ? around.filter((each) => each !== name) : []));
  const found = new Map();
  for (const name of known) {
    if (spread.includes(name)) continue;
    const stem = MEASURED.includes(name) ? name : name.replace(SPLIT, "");
    found.set(stem, [...(found.get(stem) ?? []), name]);
  }
  const place = (stem) => (stem === "loss" ? -2 : MEASURED.indexOf(stem)); // -1: not measured by orc, in the order in which it comes
  const sorted = [...found].sort(([a], [b]) => place(a) - place(b)).slice(0, SHOWN);
  return sorted.map(([stem, names]) => ({ name: names[0], title: NAMES[names[0]] ?? stem.replaceAll("_", " "), names }));
}

/** Return the lines of a panel: `[{label, color, points, dash, faint, band}]`. */
function lines({ names }) {
  const found = [];
  const several = runs.length > 1;
  runs.forEach((run, place) => {
    names.forEach((name, index) => {
      const points = run.series[name];
      if (!points?.length) return;
      const own = { label: several ? (names.length > 1 ? `${run.name} ${name}` : run.name) : name, color: COLORS[(several ? place : index) % COLORS.length], dash: several && index ? [6, 3] : null };
      if (!several && BAND[name]) for (const around of BAND[name]) if (run.series[around]?.length) found.push({ ...own, points: run.series[around], run, band: true });
      if (!several) for (const around of BESIDE[name] ?? []) if (run.series[around]?.length) found.push({ label: around, color: "--muted", dash: [4, 3], points: run.series[around], run });
      if (choice.smooth) found.push({ ...own, points, run, faint: true });
      found.push({ ...own, points: smoothed(points), run, main: true });
    });
  });
  return found;
}

/** Return *points* as a mean that forgets; its first values are not drawn towards zero. */
function smoothed(points) {
  if (!choice.smooth) return points;
  let [sum, weight] = [0, 0];
  return points.map(([x, y]) => {
    sum = sum * choice.smooth + y * (1 - choice.smooth);
    weight = weight * choice.smooth + (1 - choice.smooth);
    return [x, sum / weight];
  });
}

/** Return seconds since the begin of *run* at a step. */
function elapsed({ times = [] }, step) {
  if (times.length < 2) return 0;
  let at = times.findIndex(([known]) => known >= step);
  if (at < 0) at = times.length - 1;
  const [[s0, t0], [s1, t1]] = [times[Math.max(at - 1, 0)], times[Math.max(at, 1)]];
  return t0 + (s1 === s0 ? 0 : ((step - s0) / (s1 - s0)) * (t1 - t0)) - times[0][1];
}

const onAxis = (run, step) => (choice.x === "time" ? elapsed(run, step) : step);
const columns = ({ points, run }) => {
  const by = new Map(points.map(([step, y]) => [onAxis(run, step), y])); // two steps of one moment are one point
  const xs = [...by.keys()].sort((a, b) => a - b);
  return [xs, xs.map((x) => by.get(x))];
};

function make(chart, drawn, data, log) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 26 };
  const show = text(chart.panel.name);
  const bands = drawn.findIndex((line) => line.band);
  const line = color("--line");
  const options = {
    ...size(chart.figure), cursor: { y: false, sync: { key: "orc" } }, legend: { show: false },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((tick) => (choice.x === "time" ? (tick < 0 ? "" : duration(tick)) : number(tick))), space: choice.x === "time" ? 90 : 50 },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : show(tick))) },
    ],
    series: [{}, ...drawn.map((each) => ({
      stroke: color(each.color), width: each.band ? 0 : each.main ? 1.75 : 1, alpha: each.faint ? 0.35 : 1, dash: each.dash ?? undefined,
      spanGaps: true, points: { show: each.main && each.points.length < 30 },
    }))],
    bands: bands >= 0 && drawn[bands + 1]?.band ? [{ series: [bands + 2, bands + 1], fill: color("--band") }] : [],
    hooks: {
      setCursor: [(plot) => say(chart, plot.cursor.idx)],
      draw: [(plot) => boundaries(plot, line)],
    },
  };
  return new window.uPlot(options, data, chart.figure);
}

/** Mark where later attempts went on. */
function boundaries(plot, stroke) {
  if (runs.length !== 1) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.lineWidth = devicePixelRatio * 2;
  ctx.setLineDash([devicePixelRatio * 4, devicePixelRatio * 3]);
  for (const [step] of later()) {
    const x = plot.valToPos(onAxis(runs[0], step), "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

const later = () => (runs[0]?.attempts ?? []).slice(1);

/** Say the values of a chart below the cursor, or the last ones. */
function say(chart, index) {
  const { drawn, data, figure, panel, values } = chart;
  const show = text(panel.name);
  const end = index ?? data[0].length - 1;
  const told = drawn.flatMap((line, place) => {
    if (!line.main) return [];
    let at = end; // another line may have been measured at other steps
    while (at > 0 && !Number.isFinite(data[place + 1][at])) at -= 1;
    const value = data[place + 1][at];
    return [{ line, value: Number.isFinite(value) ? show(value) : "–", x: data[0][at] }];
  });
  const x = told.length === 1 ? told[0].x : data[0][end];
  const where = choice.x === "time" ? `after ${duration(x)}` : `at step ${number(x)}`;
  const several = told.length > 1;
  const named = runs.length === 1 || panel.names.length > 1 || figure.classList.contains("large"); // else the first chart names the runs
  const swatch = (line) => h("i", { class: `swatch ${line.color.slice(2)}`, "aria-hidden": "true" });
  values.replaceChildren(...told.map(({ line, value }) => h("span", {}, several ? [swatch(line), named ? `${line.label} ` : ""] : "", value)), ` ${where}`);
  figure.setAttribute("aria-label", `${panel.title}: ${told.map(({ line, value }) => (several ? `${line.label} ${value}` : value)).join(", ")} ${where}`);
}

/** Draw the curves of *given*: `[{name, series: {name: [[step, value], ...]}, times, attempts}]`. */
export function draw(given) {
  runs = given;
  const shown = panels();
  $("charts-card").hidden = !shown.length;
  $("charts-note").textContent = given.length === 1 ? later().map(([step, attempt]) => `attempt ${attempt} went on at step ${number(step)}`).join(" · ") : "";
  shown.forEach((panel, place) => {
    const chart = charts.get(panel.name) ?? { figure: h("figure", { "data-metric": panel.name, role: "img" }), values: h("span"), plot: null };
    charts.set(panel.name, Object.assign(chart, { panel, drawn: lines(panel) }));
    chart.data = window.uPlot.join(chart.drawn.map(columns));
    chart.figure.classList.toggle("large", place === 0);
    if (!chart.plot) chart.figure.append(h("figcaption", {}, panel.title, chart.values));
  });
  const figures = shown.map((panel) => charts.get(panel.name).figure);
  if (figures.length !== $("charts").children.length || figures.some((figure, place) => $("charts").children[place] !== figure)) $("charts").replaceChildren(...figures);
  for (const { name } of shown) { // all have their place now
    const chart = charts.get(name);
    const log = choice.log && chart.drawn.every(({ points }) => points.every(([, value]) => value > 0)); // zero has no logarithm
    const made = JSON.stringify([choice, log, chart.drawn.map(({ label, color: own }) => [label, own])]);
    if (chart.plot && chart.made === made) chart.plot.setData(chart.data);
    else {
      chart.plot?.destroy();
      chart.plot = make(chart, chart.drawn, chart.data, log);
      places.observe(chart.figure);
    }
    chart.made = made;
    say(chart, null);
  }
}

function again() {
  for (const chart of charts.values()) chart.made = null;
  draw(runs);
}

const inputs = { x: $("chart-x"), log: $("chart-log"), smooth: $("chart-smooth") };
inputs.x.value = choice.x;
inputs.log.checked = choice.log;
inputs.smooth.value = choice.smooth;
$("chart-controls").oninput = () => {
  Object.assign(choice, { x: inputs.x.value, log: inputs.log.checked, smooth: Number(inputs.smooth.value) });
  localStorage.setItem("orc-charts", JSON.stringify(choice));
  again();
};
document.addEventListener("theme", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
