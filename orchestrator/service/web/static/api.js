// Requests to the service, and whether it answers.

/** Error of a request: what, where and the hint, as the service says them. */
export class ApiError extends Error {
  constructor(status, { what, where = "", hint = "" }) {
    super(what);
    Object.assign(this, { status, where, hint });
  }
}

export const connection = new EventTarget();
let away = false;

/** Note whether the service answers; pages listen to `restored` and load again what they show. */
export function answered(ok) {
  if (ok === !away) return;
  away = !ok;
  document.getElementById("banner").hidden = ok;
  connection.dispatchEvent(new Event(ok ? "restored" : "lost"));
}

let leaving = false;

/** Go to the login, once: several requests may be refused at the same time. */
export function toLogin() {
  if (leaving || location.pathname === "/login") return;
  leaving = true;
  location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
}

/** Return the response of a request below /api/v1; what is no success is thrown as an `ApiError`. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = { Accept: "application/json" };
  if (method !== "GET") headers["X-Orc-Request"] = "1";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(`/api/v1/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    answered(false);
    throw new ApiError(0, { what: "the service does not answer", hint: "what was known stays on the page; it tries again by itself" });
  }
  answered(true);
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, said.error ?? { what: `the service answered with ${response.status}` });
  if (response.status === 401 && path !== "login") toLogin();
  throw error;
}

/** Return the JSON of a request below /api/v1. */
export async function api(path, options) {
  const response = await request(path, options);
  return response.status === 204 ? null : response.json();
}

/** Return *values* that are not empty as a query; a list is a parameter that comes several times. */
export function query(values) {
  const pairs = Object.entries(values).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const kept = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
}

/**
 * Keep a stream of server-sent events open while the page is visible: a browser allows six connections for all tabs.
 * `url()` is asked at each new connection, so that it can say where to go on; `opened(again)` is called after it.
 * An `end` or `failed` event of the service ends it. Returns a function that closes it.
 */
export function stream(url, { message, opened = () => {}, ended = () => {} }) {
  let source = null;
  let timer = null;
  let failures = 0;
  let again = false;
  let closed = false;
  const close = () => {
    source?.close();
    source = null;
    clearTimeout(timer);
  };
  const open = () => {
    close();
    if (closed || document.hidden) return;
    source = new EventSource(url());
    source.onopen = () => {
      failures = 0;
      answered(true);
      opened(again);
      again = true;
    };
    source.onmessage = (event) => message(JSON.parse(event.data), event.lastEventId);
    for (const last of ["end", "failed"]) {
      source.addEventListener(last, (event) => {
        closed = true;
        close();
        ended(last === "failed" ? JSON.parse(event.data) : null);
      });
    }
    source.onerror = async () => {
      close();
      const wait = Math.min(500 * 2 ** failures++, 8000) * (0.75 + Math.random() / 2);
      // An EventSource does not say why it failed; a request does, and leads to the login where that is the reason.
      await api("me").catch(() => {});
      if (!closed) timer = setTimeout(open, wait);
    };
  };
  const visible = () => (document.hidden ? close() : source || open());
  document.addEventListener("visibilitychange", visible);
  open();
  return () => {
    closed = true;
    close();
    document.removeEventListener("visibilitychange", visible);
  };
}
