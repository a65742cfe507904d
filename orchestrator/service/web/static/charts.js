// Curves of a training, one chart for each measurement.
import { $, h } from "./dom.js";
import { bytes, number } from "./format.js";

// What orc measures comes behind what else a job has written, in this order; the spread between ranks is drawn around its mean.
const MEASURED = ["samples_per_s", "tokens_per_s", "step_s", "slowest_step_s", "grad_norm", "data_wait", "mfu", "tflops", "memory_allocated", "other_s"];
const SPREAD = { step_s: ["step_s_min", "step_s_max"], data_wait: ["data_wait_max"], memory_allocated: ["memory_reserved", "memory_peak"] };
const NAMES = {
  samples_per_s: "samples/s", tokens_per_s: "tokens/s", step_s: "step time (s)", slowest_step_s: "slowest step (s)", grad_norm: "gradient norm",
  memory_allocated: "memory of the fullest GPU", data_wait: "data wait (share of step)", mfu: "MFU", tflops: "TFLOP/s per device", other_s: "outside of steps (s)",
};
const LEFT_OUT = ["epoch", "steps", "window_s", "world_size", "ranks", "slowest_rank"];
const SHOWN = 16;
const HEIGHT = 170;
const text = (name) => (name.startsWith("memory_") ? bytes : number);
const charts = new Map(); // by name: {figure, plot, data, say}

// A chart is as wide as its place, which the other charts and the window decide.
const places = new ResizeObserver((entries) => {
  for (const { target } of entries) charts.get(target.dataset.metric)?.plot?.setSize(size(target));
});
const size = (figure) => ({ width: figure.clientWidth, height: HEIGHT });

const color = (name) => {
  // What CSS makes of it in the present theme: uPlot draws on a canvas, which knows no custom properties.
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

function make(name, figure, data) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 26 };
  const options = {
    ...size(figure), cursor: { y: false }, legend: { show: false },
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 52, values: (_, ticks) => ticks.map(text(name)) }],
    series: [
      {}, { stroke: color("--accent"), width: 1.5, points: { show: data[0].length < 30 } },
      ...data.slice(2).map(() => ({ stroke: color("--muted"), width: 1, dash: [4, 3], points: { show: false } })),
    ],
    hooks: {
      setCursor: [(plot) => {
        const at = plot.cursor.idx;
        charts.get(name)?.say(at === null || at === undefined ? plot.data[0].length - 1 : at, plot.data);
      }],
    },
  };
  return new window.uPlot(options, data, figure);
}

/** Return the names of the charts for `series`: the loss, what else the job has written, what orc measures. */
function order(series) {
  const known = Object.keys(series).filter((name) => series[name].length && !LEFT_OUT.includes(name));
  const around = Object.entries(SPREAD).flatMap(([name, spread]) => (known.includes(name) ? spread : []));
  const place = (name) => (name === "loss" ? -2 : MEASURED.indexOf(name)); // -1: not measured by orc, in the order in which it comes
  return known.filter((name) => !around.includes(name)).sort((a, b) => place(a) - place(b)).slice(0, SHOWN);
}

const columns = (points) => [points.map(([x]) => x), points.map(([, y]) => y)];

/** Draw `series`: `{name: [[step, value], ...]}`. */
export function draw(series) {
  const names = order(series);
  $("charts-card").hidden = !names.length;
  for (const name of names) {
    const drawn = [name, ...(SPREAD[name] ?? []).filter((around) => series[around]?.length)];
    const data = window.uPlot.join(drawn.map((each) => columns(series[each])));
    if (!charts.has(name)) {
      const value = h("span");
      const title = NAMES[name] ?? name.replaceAll("_", " ");
      const figure = h("figure", { "data-metric": name, role: "img" }, h("figcaption", {}, title, value));
      const say = (from, shown) => {
        let at = from; // the spread may have been measured at other steps
        while (at > 0 && !Number.isFinite(shown[1][at])) at -= 1;
        value.textContent = Number.isFinite(shown[1][at]) ? `${text(name)(shown[1][at])} at step ${shown[0][at]}` : "";
        figure.setAttribute("aria-label", `${title}: ${value.textContent}`);
      };
      charts.set(name, { figure, say, plot: null });
    }
    charts.get(name).data = data;
  }
  const figures = names.map((name) => charts.get(name).figure);
  if (figures.some((figure, place) => $("charts").children[place] !== figure)) $("charts").replaceChildren(...figures);
  for (const [name, chart] of charts) { // all have their place now
    if (chart.plot) chart.plot.setData(chart.data);
    else {
      chart.plot = make(name, chart.figure, chart.data);
      places.observe(chart.figure);
    }
    chart.say(chart.data[0].length - 1, chart.data);
  }
}

function again() {
  for (const [name, chart] of charts) {
    chart.plot?.destroy();
    chart.plot = make(name, chart.figure, chart.data);
  }
}

document.addEventListener("theme", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
