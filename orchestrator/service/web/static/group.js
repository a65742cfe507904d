// A sweep, an array or a pipeline: its members, their parameters and their best values.
import { api, connection, query, stream } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { badge, number, time } from "./format.js";
import { parallel } from "./parallel.js";
import "./shell.js";

const id = $("title").dataset.group;
const show = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : value === undefined || value === null ? "–" : JSON.stringify(value));
const best = new Map(); // by job: the lowest loss that it has measured
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
const COMPARED = 8;
const MEASURED = 32; // members whose metrics are asked for
let ids = new Set();

/** Return the members of *group* as `{id, index, state, stage, parameters}`. */
function membersOf({ members, jobs, spec = {} }) {
  return (members ?? jobs ?? []).map((member, place) => {
    const index = member.index ?? place;
    const job = typeof member.job === "object" ? member.job : member;
    return { id: job.id, state: job.state, index, stage: member.stage ?? spec.stages?.[index], parameters: member.parameters ?? spec.members?.[index] ?? {} };
  });
}

async function measure(members) {
  for (const { id: job, state } of members.slice(0, MEASURED)) {
    if (best.has(job) && best.get(job).state === state && ENDED.includes(state)) continue;
    const { lowest } = await api(`jobs/${encodeURIComponent(job)}/metrics?points=2`).catch(() => ({ lowest: {} }));
    best.set(job, { state, loss: lowest.loss ?? null });
  }
}

async function load() {
  let group;
  try {
    group = await api(`groups/${encodeURIComponent(id)}`);
    problem($("problem"), null);
  } catch (error) {
    if (error.status) {
      problem($("problem"), error);
      $("members").hidden = true;
    }
    return;
  }
  const members = membersOf(group);
  ids = new Set(members.map((member) => member.id));
  $("title").textContent = group.name || id;
  $("kind").textContent = [group.kind, `${members.length} jobs`, group.owner].filter(Boolean).join(" · ");
  const counts = Object.entries(Object.groupBy(members, (member) => member.state));
  $("summary").hidden = !counts.length;
  fill($("summary"), h("div", { class: "line" }, counts.map(([state, list]) => [badge(state), h("span", {}, String(list.length))]),
    h("a", { href: `/${query({ group: id })}` }, "In the table of jobs"),
    members.length > 1 && members.length <= COMPARED ? h("a", { href: `/compare${query({ job: members.map((member) => member.id) })}` }, "Compare all") : null, group.created_at ? h("span", { class: "muted" }, "created ", time(group.created_at)) : null));
  table(members);
  await measure(members);
  table(members);
}

function table(members) {
  const keys = [...new Set(members.flatMap((member) => Object.keys(member.parameters)))];
  const staged = members.some((member) => member.stage);
  const losses = members.map((member) => best.get(member.id)?.loss ?? null);
  const lowest = Math.min(...losses.filter((loss) => loss !== null));
  const winner = members.find((member, index) => losses[index] !== null && losses[index] === lowest);
  const runs = members.map((member, index) => ({
    href: `/jobs/${encodeURIComponent(member.id)}`, title: `${member.id}: best loss ${show(losses[index])}`, best: member === winner,
    values: { ...Object.fromEntries(Object.entries(member.parameters).map(([key, value]) => [key, value && typeof value === "object" ? show(value) : value])), "best loss": losses[index] },
  }));
  const drawn = keys.length && winner ? parallel([...keys, "best loss"], runs) : null;
  $("runs").hidden = !drawn;
  if (drawn) {
    fill($("runs"), h("h2", {}, "Runs"), h("p", {}, members.length > MEASURED ? `Best of the first ${MEASURED} runs: ` : "Best run: ", h("a", { href: `/jobs/${encodeURIComponent(winner.id)}` }, winner.id), ` with a loss of ${show(lowest)}`,
      h("span", { class: "muted" }, ` (${keys.map((key) => `${key} ${show(winner.parameters[key])}`).join(", ")})`)), drawn);
  }
  const columns = [["#", "number"], ["State"], ["Job"], ...(staged ? [["Stage"]] : []), ...keys.map((key) => [key]), ...(lowest < Infinity ? [["Best loss", "number"]] : [])];
  fill($("members"), members.length ? h("table", { "aria-label": "Members" },
    h("thead", {}, h("tr", {}, columns.map(([text, name]) => h("th", { scope: "col", class: name }, text)))),
    h("tbody", {}, members.map((member, index) => h("tr", {},
      h("td", { class: "number" }, String(member.index)),
      h("td", {}, badge(member.state)),
      h("td", {}, h("a", { href: `/jobs/${encodeURIComponent(member.id)}`, "data-row": true }, member.id)),
      staged ? h("td", {}, member.stage || "–") : null,
      keys.map((key) => h("td", { class: "mono" }, show(member.parameters[key]))),
      lowest < Infinity ? h("td", { class: "number" }, losses[index] === lowest ? h("strong", {}, show(lowest)) : show(losses[index])) : null)))) :
    h("div", { class: "empty" }, "It has no jobs."));
}

let soon = null;
connection.addEventListener("restored", load);
load();
stream(() => "/api/v1/events/stream", {
  message: (event) => {
    if (ids.has(event.job)) soon ??= setTimeout(() => { soon = null; load(); }, 300);
  },
  opened: (again) => again && load(),
});
