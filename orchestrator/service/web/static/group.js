// A sweep, an array or a pipeline: its members, their parameters and their best values.
import { api, connection, query, stream } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { badge, number, time } from "./format.js";
import "./shell.js";

const id = $("title").dataset.group;
const show = (value) => (typeof value === "number" ? number(value) : typeof value === "string" ? value : value === undefined || value === null ? "–" : JSON.stringify(value));
let ids = new Set();

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
  const members = group.members ?? group.jobs ?? [];
  ids = new Set(members.map((member) => member.id ?? member.job));
  $("title").textContent = group.name || id;
  $("kind").textContent = [group.kind, `${members.length} jobs`, group.owner].filter(Boolean).join(" · ");
  const counts = Object.entries(Object.groupBy(members, (member) => member.state));
  $("summary").hidden = !counts.length;
  fill($("summary"), h("div", { class: "line" }, counts.map(([state, list]) => [badge(state), h("span", {}, String(list.length))]),
    h("a", { href: `/${query({ group: id })}` }, "In the table of jobs"), group.created_at ? h("span", { class: "muted" }, "created ", time(group.created_at)) : null));
  const keys = [...new Set(members.flatMap((member) => Object.keys(member.parameters ?? {})))];
  const measured = [...new Set(members.flatMap((member) => Object.keys(member.metrics ?? member.best ?? {})))];
  fill($("members"), members.length ? h("table", { "aria-label": "Members" },
    h("thead", {}, h("tr", {}, [["#", "number"], ["State"], ["Job"], ...keys.map((key) => [key]), ...measured.map((key) => [key, "number"])].map(([text, name]) => h("th", { scope: "col", class: name }, text)))),
    h("tbody", {}, members.map((member, index) => h("tr", {},
      h("td", { class: "number" }, String(member.group_index ?? member.index ?? index)),
      h("td", {}, badge(member.state)),
      h("td", {}, h("a", { href: `/jobs/${encodeURIComponent(member.id ?? member.job)}`, "data-row": true }, member.id ?? member.job)),
      keys.map((key) => h("td", { class: "mono" }, show(member.parameters?.[key]))),
      measured.map((key) => h("td", { class: "number" }, show((member.metrics ?? member.best)?.[key]))))))) :
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
