// Parallel coordinates: an axis for each parameter, a line for each run.
import { h, s } from "./dom.js";
import { number } from "./format.js";

const [WIDTH, HEIGHT, TOP, BOTTOM, SIDE] = [900, 260, 34, 18, 60];
const LEVELS = 5;
const MOST_LABELS = 8;

/** Return `{at(value), labels}` of an axis: numbers by their size, by their orders where they span many, others in turn. */
function scale(values) {
  const numbers = values.map(Number);
  if (values.length && numbers.every(Number.isFinite) && values.every((value) => value !== "")) {
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    const log = low > 0 && high / low > 50;
    const on = (value) => (log ? Math.log(Number(value)) : Number(value));
    const span = on(high) - on(low);
    return { at: (value) => (span ? (on(value) - on(low)) / span : 0.5), labels: span ? [low, high] : [low] };
  }
  const known = [...new Set(values)].sort();
  return { at: (value) => (known.length > 1 ? known.indexOf(value) / (known.length - 1) : 0.5), labels: known.slice(0, MOST_LABELS) };
}

/**
 * Return a drawing of *runs*, `[{href, title, values: {axis: value}, best}]`, over *axes*; runs without all values are left
 * out. The last axis gives the colour. A run is a link.
 */
export function parallel(axes, runs) {
  const whole = runs.filter(({ values }) => axes.every((axis) => values[axis] !== undefined && values[axis] !== null));
  if (axes.length < 2 || whole.length < 2) return null;
  const scales = axes.map((axis) => scale(whole.map(({ values }) => values[axis])));
  const x = (place) => SIDE + (place * (WIDTH - 2 * SIDE)) / (axes.length - 1);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "parallel", role: "group", "aria-label": "Runs by their parameters" });
  for (const run of whole.toSorted((a, b) => Number(a.best) - Number(b.best))) {
    const points = axes.map((axis, place) => `${x(place).toFixed(1)},${y(scales[place].at(run.values[axis])).toFixed(1)}`).join(" ");
    const level = Math.round(scales.at(-1).at(run.values[axes.at(-1)]) * (LEVELS - 1));
    const link = s("a", { href: run.href, class: run.best ? "best" : `q${level}`, "aria-label": run.title });
    link.append(s("title", {}, run.title), s("polyline", { points, class: "wide" }), s("polyline", { points }));
    drawing.append(link);
  }
  axes.forEach((axis, place) => {
    drawing.append(s("line", { x1: x(place), x2: x(place), y1: TOP, y2: HEIGHT - BOTTOM }), s("text", { x: x(place), y: 14, class: "name" }, axis));
    for (const label of scales[place].labels) drawing.append(s("text", { x: x(place) + 6, y: y(scales[place].at(label)) + 4 }, typeof label === "number" ? number(label) : label));
  });
  return h("div", { class: "scroll" }, drawing);
}
