// Log bytes as elements: colours become classes, everything else that a terminal would obey is shown or dropped.
import { h } from "./dom.js";

// CSI and OSC sequences, other two-character escapes; then what is left of control and bidirectional characters.
const SEQUENCE = /\x1b\[([0-9;:?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Return *style* after the SGR parameters of one sequence. */
function restyle(style, parameters) {
  let next = { ...style };
  const codes = parameters.split(/[;:]/).map(Number);
  for (let i = 0; i < codes.length; i++) {
    const code = codes[i];
    if (code === 0) next = {};
    else if (code === 1) next.b = true;
    else if (code === 2) next.d = true;
    else if (code === 3) next.i = true;
    else if (code === 4) next.u = true;
    else if (code === 22) next.b = next.d = false;
    else if (code === 23) next.i = false;
    else if (code === 24) next.u = false;
    else if (code >= 30 && code <= 37) next.color = code - 30;
    else if (code >= 90 && code <= 97) next.color = code - 82;
    else if (code === 39) next.color = undefined;
    else if (code === 38 || code === 48) {
      if (code === 38) next.color = codes[i + 1] === 5 && codes[i + 2] < 16 ? codes[i + 2] : undefined;
      i += codes[i + 1] === 5 ? 2 : 4;
    }
  }
  return next;
}

function piece(text, style) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(CONTROL)) {
    parts.push(text.slice(from, match.index));
    const code = match[0].charCodeAt(0);
    parts.push(h("span", { class: "control" }, code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16)}`));
    from = match.index + 1;
  }
  parts.push(text.slice(from));
  const names = ["b", "i", "u", "d"].filter((name) => style[name]);
  if (style.color !== undefined) names.push(`a${style.color}`);
  return names.length ? [h("span", { class: names.join(" ") }, parts)] : parts;
}

/** Return *text* without colours and with visible control characters. */
export const plain = (text) => h("span", {}, ansi(text)[0]).textContent;

/** Return `[nodes, style]`: *line* as children of an element, and the style that the next line begins with. */
export function ansi(line, style = {}) {
  // A carriage return begins the line anew, as progress bars have it.
  const whole = line.replace(/\r+$/, "");
  const text = whole.slice(whole.lastIndexOf("\r") + 1);
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(SEQUENCE)) {
    if (match.index > from) nodes.push(...piece(text.slice(from, match.index), style));
    if (match[2] === "m") style = restyle(style, match[1]);
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(...piece(text.slice(from), style));
  return [nodes.filter((node) => node !== ""), style];
}
