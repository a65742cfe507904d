// The table of jobs: filters, pages, live states.
import { api, connection, query, stream } from "./api.js";
import { $, h, problem } from "./dom.js";
import { badge, firstLine, time } from "./format.js";
import "./shell.js";

const form = $("filters");
const rows = new Map(); // by id, as they are shown
let cursor = null;
let loading = null;

for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;

const filters = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));

function row(job) {
  const tags = Object.entries(job.tags ?? {}).map(([key, value]) =>
    h("a", { class: "tag", href: `/${query({ tag: `${key}=${value}` })}`, title: `Jobs with the tag ${key}=${value}` }, `${key}=${value}`));
  const why = job.state === "SUCCEEDED" ? "" : firstLine(job.reason);
  const made = h("tr", {},
    h("td", { class: "c-state" }, badge(job.state)),
    h("td", { class: "c-name" },
      h("a", { class: "name", href: `/jobs/${encodeURIComponent(job.id)}`, "data-row": true }, job.id),
      why ? h("div", { class: "why", title: job.reason }, why) : null,
      tags.length ? h("div", {}, tags) : null),
    h("td", { class: "c-owner", title: job.owner }, job.owner || "–"),
    h("td", { class: "c-cluster", title: job.cluster }, job.cluster),
    h("td", { class: "c-attempts" }, String(job.attempts)),
    h("td", { class: "c-age" }, time(job.created_at)));
  made.shown = JSON.stringify(job);
  return made;
}

/** Put *jobs* into the table, newest first; the focus stays on its job. */
function show(jobs) {
  for (const job of jobs) {
    const old = rows.get(job.id);
    if (old?.shown === JSON.stringify(job)) continue;
    const made = row(job);
    made.at = job.created_at;
    rows.set(job.id, made);
    if (!old) {
      const below = [...$("rows").children].find((other) => other.at < job.created_at);
      $("rows").insertBefore(made, below ?? null);
      continue;
    }
    const focused = old.contains(document.activeElement);
    old.replaceWith(made);
    if (focused) made.querySelector("[data-row]").focus();
  }
  const chosen = Object.values(filters()).some(Boolean);
  $("clear").hidden = !chosen;
  $("more").hidden = !cursor;
  $("count").textContent = rows.size ? `${rows.size}${cursor ? "+" : ""}` : "";
  $("empty").hidden = rows.size > 0;
  $("empty").replaceChildren(h("div", { class: "empty" }, chosen
    ? "No job matches."
    : [h("p", {}, "No job yet. Submit one from a terminal:"), h("code", {}, "orc submit job.yaml")]));
}

/** Load the first page again, or the next one. */
async function load({ older = false, anew = false } = {}) {
  loading?.abort();
  const mine = (loading = new AbortController());
  try {
    const first = !older && (anew || !rows.size);
    const { state, ...others } = filters();
    const page = await api(`jobs${query({ ...others, state: state.split(","), limit: 50, cursor: older ? cursor : "" })}`, { signal: mine.signal });
    problem($("problem"), null);
    if (anew) {
      rows.clear();
      $("rows").replaceChildren();
    } else if (!older) {
      // What the first page would show and does not have any more has left the filter.
      const oldest = page.next ? page.jobs.at(-1).created_at : -Infinity;
      const still = new Set(page.jobs.map((job) => job.id));
      for (const [id, element] of rows) {
        if (element.at > oldest && !still.has(id)) {
          element.remove();
          rows.delete(id);
        }
      }
    }
    if (older || first) cursor = page.next;
    show(page.jobs);
  } catch (error) {
    if (error.name !== "AbortError") {
      problem($("problem"), error.status ? error : null);
      $("empty").hidden = rows.size > 0 || !error.status;
    }
  } finally {
    if (loading === mine) $("rows").setAttribute("aria-busy", "false");
  }
}

let typed = null;
let soon = null;

/** Load again in a moment: events come in bursts. */
function later() {
  soon ??= setTimeout(() => {
    soon = null;
    load();
  }, 150);
}

form.oninput = () => {
  history.replaceState(null, "", `/${query(filters())}`);
  clearTimeout(typed);
  typed = setTimeout(() => load({ anew: true }), 250);
};
form.onsubmit = (event) => {
  event.preventDefault();
  document.querySelector("[data-row]")?.focus();
};
form.onreset = () => setTimeout(form.oninput);
$("more").onclick = () => load({ older: true });
connection.addEventListener("restored", () => load());
load({ anew: true });
stream(() => "/api/v1/events/stream", { message: later, opened: (again) => again && load() });
