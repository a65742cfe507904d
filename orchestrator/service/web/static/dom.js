// Elements from values. Text from outside only ever becomes a text node.

/** Return a new element. `on*` attributes are listeners; children are elements, texts or lists of them. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return a new element of a drawing. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Replace the children of *element*, if they would look different; return true when they do. */
export function fill(element, ...children) {
  const made = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
  const next = document.createElement("div");
  next.append(...made);
  // What is the same stays: the focus and the selection are not lost.
  if (next.innerHTML === element.innerHTML) return false;
  const path = []; // to what has the focus, which goes to what comes in its place
  for (let at = document.activeElement; at !== element && element.contains(at); at = at.parentElement) path.unshift([...at.parentElement.children].indexOf(at));
  element.replaceChildren(...next.childNodes);
  if (path.length) path.reduce((at, place) => at?.children[place], element)?.focus({ preventScroll: true });
  return true;
}

/** Show an error with what the service said about it, or nothing. */
export function problem(element, error) {
  element.replaceChildren(
    ...(error
      ? [h("div", { class: "error" }, h("strong", {}, error.message), error.where ? ` (${error.where})` : "", error.hint ? h("div", {}, error.hint) : null)]
      : []),
  );
}

let toastTimer;

/** Show *text* for some seconds. */
export function toast(text) {
  document.querySelector(".toast")?.remove();
  document.body.append(h("div", { class: "toast", role: "status" }, text));
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => document.querySelector(".toast")?.remove(), 5000);
}
