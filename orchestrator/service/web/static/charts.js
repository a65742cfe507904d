// Curves of a training, one chart for each measurement.
import { $, h } from "./dom.js";
import { number } from "./format.js";

const FIRST = ["loss", "samples_per_s", "tokens_per_s", "step_s", "grad_norm", "data_wait", "mfu"];
const NAMES = { step_s: "step time (s)", samples_per_s: "samples/s", tokens_per_s: "tokens/s", data_wait: "data wait", grad_norm: "gradient norm" };
const LEFT_OUT = ["epoch", "steps", "window_s", "world_size", "ranks", "slowest_rank"];
const SHOWN = 8;
const HEIGHT = 170;
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
    axes: [axis, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) }],
    series: [{}, { stroke: color("--accent"), width: 1.5, points: { show: data[0].length < 30 } }],
    hooks: {
      setCursor: [(plot) => {
        const at = plot.cursor.idx;
        charts.get(name)?.say(at === null || at === undefined ? plot.data[0].length - 1 : at, plot.data);
      }],
    },
  };
  return new window.uPlot(options, data, figure);
}

/** Draw `series`: `{name: [[step, value], ...]}`. */
export function draw(series) {
  const known = Object.keys(series).filter((name) => series[name].length && !LEFT_OUT.includes(name));
  const names = [...FIRST.filter((name) => known.includes(name)), ...known.filter((name) => !FIRST.includes(name))].slice(0, SHOWN);
  $("charts-card").hidden = !names.length;
  for (const name of names) {
    const data = [series[name].map(([x]) => x), series[name].map(([, y]) => y)];
    if (!charts.has(name)) {
      const value = h("span");
      const title = NAMES[name] ?? name.replaceAll("_", " ");
      const figure = h("figure", { "data-metric": name, role: "img" }, h("figcaption", {}, title, value));
      $("charts").append(figure);
      const say = (at, shown) => {
        value.textContent = shown[0].length ? `${number(shown[1][at])} at step ${shown[0][at]}` : "";
        figure.setAttribute("aria-label", `${title}: ${value.textContent}`);
      };
      charts.set(name, { figure, say, plot: null });
    }
    charts.get(name).data = data;
  }
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
