// Values as texts and small elements.
import { plain } from "./ansi.js";
import { h } from "./dom.js";

/** Return seconds as people say them: `4.2 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`. */
export function duration(seconds) {
  const s = Math.max(seconds, 0);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const parts = (big, bigName, small, smallName) => `${big} ${bigName}${small ? ` ${small} ${smallName}` : ""}`;
  if (s < 3600) return parts(Math.floor(s / 60), "min", Math.floor(s % 60), "s");
  if (s < 86400) return parts(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min");
  return parts(Math.floor(s / 86400), "d", Math.floor((s % 86400) / 3600), "h");
}

/** Return how long ago (or ahead) a time is, in its largest unit. */
export function ago(at) {
  const s = Date.now() / 1000 - at;
  const size = Math.abs(s);
  if (size < 5) return "just now";
  const [n, unit] = size < 60 ? [size, "s"] : size < 3600 ? [size / 60, "min"] : size < 86400 ? [size / 3600, "h"] : [size / 86400, "d"];
  return s < 0 ? `in ${Math.round(n)} ${unit}` : `${Math.floor(n)} ${unit} ago`;
}

/** Return the local date and time. */
export const clock = (at) => new Date(at * 1000).toLocaleString("sv-SE");

/** Return a `<time>` that stays right. */
export function time(at, relative = true) {
  if (!at) return h("span", { class: "muted" }, "–");
  const iso = new Date(at * 1000).toISOString();
  return h("time", { datetime: iso, title: clock(at), "data-at": relative ? at : null }, relative ? ago(at) : clock(at));
}

/** Return how long something has taken, or takes since *from*: a text that stays right. */
export function lasts(from, to) {
  if (!from) return h("span", { class: "muted" }, "–");
  return h("span", { "data-since": to ? null : from }, duration((to ?? Date.now() / 1000) - from));
}

setInterval(() => {
  for (const element of document.querySelectorAll("time[data-at], span[data-since]")) {
    const { at, since } = element.dataset;
    const text = at ? ago(Number(at)) : duration(Date.now() / 1000 - Number(since));
    if (element.textContent !== text) element.textContent = text;
  }
}, 5000);

/** Return a state as a badge; never told by its colour alone. */
export const badge = (state) => h("span", { class: "state", "data-state": state }, state.toLowerCase());

/** Return the first line of a reason, which may go on with what a program printed. */
export const firstLine = (text) => plain((text ?? "").split("\n")[0]).replace(/:$/, "");

/** Return a number with four digits that count. */
export const number = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4))));

/** Return bytes with their unit. */
export function bytes(n) {
  const power = Math.min(Math.floor(Math.log2(Math.max(n, 1)) / 10), 4);
  return `${number(Number((n / 1024 ** power).toPrecision(3)))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** Return a job's progress as `epoch 3  step 120  loss 0.21`. */
export function progress(values) {
  const first = ["epoch", "step", "loss"].filter((key) => key in values);
  const others = Object.keys(values).filter((key) => ![...first, "at", "samples", "of"].includes(key));
  return [...first, ...others]
    .filter((key) => ["number", "string"].includes(typeof values[key]))
    .map((key) => `${key} ${typeof values[key] === "number" ? number(values[key]) : values[key]}`)
    .join("  ");
}

/** Return a nested specification as `[key.path, value]` pairs. */
export function flatten(value, path = "") {
  const nested = value !== null && typeof value === "object" && !Array.isArray(value);
  if (!nested) return [[path, value]];
  return Object.entries(value).flatMap(([key, inner]) => flatten(inner, path ? `${path}.${key}` : key));
}

/** Return a value as one line of YAML. */
export const yaml = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Return a share as whole percents; what is not done is never 100 %. */
export const percent = (share) => `${share < 1 ? Math.min(Math.floor(share * 100), 99) : 100} %`;

/** Return amounts by currency. */
export const money = (cost) => Object.entries(cost).map(([currency, amount]) => `${amount.toFixed(2)} ${currency}`).join(" + ");

/** Return the nodes and GPUs of a job. */
export const sizeOf = (nodes, gpus) => `${nodes} ${nodes === 1 ? "node" : "nodes"}${gpus ? `, ${gpus} ${gpus === 1 ? "GPU" : "GPUs"}` : ""}`;
