// A bounded window of lines of one log: the page holds as much of a log of a gigabyte as of one of a megabyte.
import { ansi } from "./ansi.js";
import { h } from "./dom.js";

const MOST_LINES = 4000; // and those of one part
const LONGEST_LINE = 64 << 10; // a longer one is broken
const PART = 256 << 10; // characters of one part

/** Lines in *element*, in parts that begin and end with whole lines and know their bytes: [begin, end). */
export class LogWindow {
  constructor(element) {
    this.element = element;
    this.clear(0);
  }

  /** Drop all lines; the next one is at the byte *offset*. */
  clear(offset) {
    this.element.replaceChildren();
    this.parts = [];
    this.begin = this.end = offset;
    this.open = null; // the last line, while it has no end: {element, text, style}
    this.style = {};
  }

  get lines() {
    return this.parts.reduce((sum, part) => sum + part.element.childElementCount, 0);
  }

  /** Add *text*, which ends at the byte *end*. */
  append(text, end) {
    let part = this.parts.at(-1);
    if (!part || part.closed) {
      part = { element: h("div"), begin: this.end, size: 0, closed: false };
      this.parts.push(part);
      this.element.append(part.element);
    }
    const [first, ...others] = text.split("\n");
    if (first !== "" || others.length) this.#extend(part, first);
    others.forEach((line, index) => {
      this.#close();
      if (line !== "" || index < others.length - 1) this.#extend(part, line);
    });
    part.size += text.length;
    part.end = this.end = end;
    part.closed = (!this.open && text.endsWith("\n")) || part.size > PART;
    if (part.closed) this.#close();
    while (this.lines - this.parts[0].element.childElementCount >= MOST_LINES) {
      this.parts.shift().element.remove();
      this.begin = this.parts[0].begin;
    }
  }

  /** Put the bytes before the first line; they are whole lines. What is too much leaves at the end. */
  prepend(bytes, begin) {
    const part = { element: h("div"), begin, end: this.begin, closed: true };
    part.element.append(...lineElements(bytes, begin));
    this.parts.unshift(part);
    this.element.prepend(part.element);
    this.begin = begin;
    if (this.parts.length === 1) this.end = part.end;
    while (this.lines - this.parts.at(-1).element.childElementCount >= MOST_LINES) {
      this.parts.pop().element.remove();
      this.end = this.parts.at(-1).end;
      this.open = null;
    }
  }

  /** Show *bytes* alone, from the byte *begin* on, and return the line that the byte *at* is in. */
  show(bytes, begin, at) {
    this.clear(begin);
    const part = { element: h("div"), begin, end: begin + bytes.length, closed: true };
    part.element.append(...lineElements(bytes, begin));
    this.parts.push(part);
    this.element.append(part.element);
    this.end = part.end;
    return [...part.element.children].findLast((line) => Number(line.dataset.at) <= at);
  }

  #extend(part, text) {
    if (this.open && this.open.text.length > LONGEST_LINE) this.#close();
    if (!this.open) {
      this.open = { element: h("div", { class: "l" }), text: "", style: this.style };
      part.element.append(this.open.element);
    }
    this.open.text += text;
    const [nodes, style] = ansi(this.open.text, this.open.style);
    this.open.element.replaceChildren(...nodes);
    this.style = style;
  }

  #close() {
    this.open = null;
  }
}

function lineElements(bytes, begin) {
  const decoder = new TextDecoder();
  const found = [];
  let style = {};
  for (let from = 0; from < bytes.length; ) {
    const newline = bytes.indexOf(10, from);
    const to = newline < 0 ? bytes.length : newline;
    const [nodes, next] = ansi(decoder.decode(bytes.subarray(from, to)), style);
    style = next;
    found.push(h("div", { class: "l", "data-at": begin + from }, nodes));
    from = to + 1;
  }
  return found;
}
