// The table of jobs: chips and filters, columns, pages, live states.
import { api, connection, query, stream } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { badge, firstLine, lasts, number, percent, sizeOf, time } from "./format.js";
import { howFar } from "./headline.js";
import { midnight, showOverview } from "./overview.js";
import "./shell.js";

const MOST_COMPARED = 8;
const CHIPS = [
  ["All", ""], ["Running", "RUNNING"], ["Waiting", "QUEUED,PREPARED,SUBMITTING,PENDING"], ["Failed", "FAILED"],
  ["Failed today", "FAILED", "today"], ["Succeeded", "SUCCEEDED"], ["Cancelled", "CANCELLED"],
];
// Columns by name: title, content, class; those with a title can be left out.
const COLUMNS = {
  owner: ["Owner", (job) => job.owner || "–"],
  cluster: ["Cluster", (job) => job.cluster],
  progress: ["Progress", progressOf],
  loss: ["Loss", (job) => (Number.isFinite(job.progress.loss) ? number(job.progress.loss) : "–"), "number"],
  size: ["Size", (job) => sizeOf(job.nodes, job.gpus)],
  duration: ["Duration", (job) => lasts(job.started_at, job.state === "RUNNING" ? null : job.ended_at ?? job.started_at)],
  attempts: ["Attempts", (job) => String(job.attempts), "number"],
  created: ["Created", (job) => time(job.created_at)],
};
const form = $("filters");
const rows = new Map(); // by id, as they are shown
const picked = new Set(); // to be compared
let hidden = new Set(JSON.parse(localStorage.getItem("orc-columns-hidden") ?? '["attempts"]'));
let cursor = null;
let loading = null;

for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;

/** Return what is chosen, as it stands in the address. */
const filters = () => Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));

/** Return *chosen* as the API takes it. */
function asked({ state, ended, ...others }) {
  return { ...others, state: state ? state.split(",") : "", ended_since: ended === "today" ? midnight() : "" };
}

function progressOf(job) {
  const share = job.share;
  const known = share !== null && share !== undefined && job.state !== "SUCCEEDED"; // there it says nothing new
  if (!known && !howFar(job.progress)) return "–";
  return [known ? h("progress", { max: 1, value: share, "aria-label": "Share that is done" }) : null, known ? ` ${percent(share)}` : "", h("div", { class: "muted" }, howFar(job.progress))];
}

function row(job) {
  const tags = Object.entries(job.tags ?? {}).map(([key, value]) =>
    h("a", { class: "tag", href: `/${query({ tag: `${key}=${value}` })}`, title: `Jobs with the tag ${key}=${value}` }, `${key}=${value}`));
  const why = job.state === "SUCCEEDED" ? "" : firstLine(job.reason);
  const pick = h("input", { type: "checkbox", "aria-label": `Compare ${job.id}`, title: "Compare (x)", onchange: () => choose(job.id, pick.checked) });
  pick.checked = picked.has(job.id);
  const made = h("tr", {},
    h("td", { class: "c-pick" }, pick),
    h("td", { class: "c-state" }, badge(job.state)),
    h("td", { class: "c-name" },
      h("a", { class: "name", href: `/jobs/${encodeURIComponent(job.id)}`, "data-row": true }, job.id),
      why ? h("div", { class: "why", title: job.reason }, why) : null,
      tags.length ? h("div", {}, tags) : null),
    Object.entries(COLUMNS).map(([name, [, cell, more]]) => h("td", { class: `c-${name} ${more ?? ""}`, hidden: hidden.has(name) }, cell(job))));
  made.shown = JSON.stringify(job);
  made.job = job;
  return made;
}

/** Choose a job to be compared, or not any more. */
function choose(id, on) {
  if (on) picked.add(id);
  else picked.delete(id);
  const several = picked.size > 1 && picked.size <= MOST_COMPARED;
  $("compare").setAttribute("aria-disabled", String(!several));
  $("compare").textContent = picked.size ? `Compare ${picked.size}` : "Compare";
  $("compare").title = several ? "" : `Choose 2 to ${MOST_COMPARED} jobs`;
  if (several) $("compare").href = `/compare${query({ job: [...picked] })}`;
  else $("compare").removeAttribute("href");
}

function showHead() {
  fill($("head"), h("tr", {}, h("th", { scope: "col", class: "c-pick" }, h("span", { class: "sr-only" }, "Compare")), h("th", { scope: "col", class: "c-state" }, "State"), h("th", { scope: "col" }, "Job"),
    Object.entries(COLUMNS).map(([name, [title, , more]]) => h("th", { scope: "col", class: `c-${name} ${more ?? ""}`, hidden: hidden.has(name) }, title))));
}

fill($("columns"), Object.entries(COLUMNS).map(([name, [title]]) => {
  const box = h("input", { type: "checkbox", "data-column": name });
  box.checked = !hidden.has(name);
  return h("label", {}, box, ` ${title}`);
}));
$("columns").oninput = (event) => event.stopPropagation(); // it stands in the form of the filters
$("columns").onchange = () => {
  hidden = new Set([...$("columns").querySelectorAll("input:not(:checked)")].map((box) => box.dataset.column));
  localStorage.setItem("orc-columns-hidden", JSON.stringify([...hidden]));
  showHead();
  for (const [id, old] of rows) {
    const made = row(old.job);
    made.at = old.at;
    old.replaceWith(made);
    rows.set(id, made);
  }
};

/** Show the chips with their counts; the one that is chosen is pressed. */
function chips(counts, today) {
  const { state, ended } = filters();
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const count = (states, since) => (since ? today.FAILED ?? 0 : states ? states.split(",").reduce((sum, one) => sum + (counts[one] ?? 0), 0) : total);
  fill($("chips"), CHIPS.map(([title, states, since = ""]) => h("button", {
    type: "button", class: "chip", "data-state": states, "data-ended": since, "aria-pressed": String(state === states && (ended ?? "") === since),
  }, `${title} `, h("b", {}, String(count(states, since))))));
}

async function count() {
  const { state, ended, ...others } = filters();
  const [all, today] = await Promise.all([api(`job-counts${query(others)}`), api(`job-counts${query({ ...others, ended_since: midnight() })}`)]);
  chips(all.states, today.states);
}

$("chips").onclick = (event) => {
  const chip = event.target.closest("button");
  if (!chip) return;
  form.elements.state.value = chip.dataset.state;
  form.elements.ended.value = chip.dataset.ended;
  for (const other of $("chips").children) other.setAttribute("aria-pressed", String(other === chip));
  form.oninput();
};

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
    const focus = old.contains(document.activeElement) ? (document.activeElement.matches("input") ? "input" : "[data-row]") : null;
    old.replaceWith(made);
    if (focus) made.querySelector(focus).focus();
  }
  const chosen = Object.values(filters()).some(Boolean);
  $("clear").hidden = !chosen;
  $("more").hidden = !cursor;
  $("empty").hidden = rows.size > 0;
  $("empty").replaceChildren(h("div", { class: "empty" }, chosen
    ? "No job matches."
    : [h("p", {}, "No job yet. Submit one from a terminal:"), h("code", {}, "orc submit job.yaml")]));
}

/** Load the first page again, or the next one. */
async function load({ older = false, anew = false } = {}) {
  if (loading && !older && !anew) return void setTimeout(load, 150); // what was asked for by hand comes first
  loading?.abort();
  const mine = (loading = new AbortController());
  try {
    const first = !older && (anew || !rows.size);
    const page = await api(`jobs${query({ ...asked(filters()), limit: 50, cursor: older ? cursor : "" })}`, { signal: mine.signal });
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
    if (loading === mine) {
      loading = null;
      $("rows").setAttribute("aria-busy", "false");
    }
  }
}

let surroundings = null; // what is being loaded
let stale = false;

/** Load what stands around the table, once at a time; what fails is told by the table. */
async function around() {
  stale = Boolean(surroundings);
  if (stale) return;
  await (surroundings = Promise.allSettled([count(), showOverview()]));
  surroundings = null;
  if (stale) around();
}

let typed = null;
let soon = null;

/** Load again in a moment: events come in bursts. */
function later() {
  soon ??= setTimeout(() => {
    soon = null;
    load();
    around();
  }, 150);
}

form.oninput = () => {
  history.replaceState(null, "", `/${query(filters())}`);
  clearTimeout(typed);
  typed = setTimeout(() => {
    load({ anew: true });
    count().catch(() => {});
  }, 250);
};
form.onsubmit = (event) => {
  event.preventDefault();
  document.querySelector("[data-row]")?.focus();
};
form.onreset = () => setTimeout(() => {
  for (const name of ["state", "ended"]) form.elements[name].value = ""; // a reset leaves hidden ones
  form.oninput();
});
document.addEventListener("keydown", (event) => {
  const pick = event.key === "x" && !event.ctrlKey && !event.metaKey && !event.altKey && document.activeElement.matches("[data-row]") && document.activeElement.closest("tr").querySelector("input");
  if (pick) pick.click();
});
$("more").onclick = () => load({ older: true });
connection.addEventListener("restored", () => later());
showHead();
chips({}, {});
choose("", false);
load({ anew: true });
around();
// What happened between the first answers and the first event is in neither.
stream(() => "/api/v1/events/stream", { message: later, opened: later });
// Progress and losses are no events.
setInterval(() => document.hidden || ([...rows.values()].some(({ job }) => job.state === "RUNNING") && load()), 5000);
