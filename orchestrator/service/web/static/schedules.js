// Schedules, which their owners pause and delete, and quotas, which admins set.
import { api, connection } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { time } from "./format.js";
import { me } from "./shell.js";

const table = (label, columns, rows) => h("table", { "aria-label": label },
  h("thead", {}, h("tr", {}, columns.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows));
const path = (schedule) => `schedules/${encodeURIComponent(schedule.id)}`;

function actions(schedule, who) {
  if (who.role !== "admin" && !(who.role === "user" && who.user === schedule.owner)) return null;
  const change = (enabled) => attempt(() => api(path(schedule), { method: "PATCH", body: { enabled } }));
  const forget = () => confirm(`Delete the schedule ${schedule.name}? Its jobs stay.`) && attempt(() => api(path(schedule), { method: "DELETE" }));
  return [
    h("button", { "aria-label": `${schedule.enabled ? "Pause" : "Resume"} ${schedule.name}`, onclick: () => change(!schedule.enabled) }, schedule.enabled ? "Pause" : "Resume"), " ",
    h("button", { class: "danger", "aria-label": `Delete ${schedule.name}`, onclick: forget }, "Delete"),
  ];
}

async function schedules(who) {
  const { schedules: found } = await api("schedules");
  fill($("schedules"), found.length ? table("Schedules", ["Name", "Owner", "When", "Next", "Last job", ""], found.map((one) =>
    h("tr", {}, h("td", {}, h("a", { href: `/groups/${encodeURIComponent(one.id)}`, "data-row": true }, one.name)), h("td", {}, one.owner || "–"),
      h("td", { class: "nowrap" }, h("code", {}, one.cron), ` ${one.timezone}`), h("td", { class: "nowrap" }, one.enabled ? time(one.next_at) : "paused"),
      h("td", {}, one.last_job ? h("a", { href: `/jobs/${encodeURIComponent(one.last_job)}` }, one.last_job) : "none yet"),
      h("td", { class: "number nowrap" }, actions(one, who))))) :
    h("div", { class: "empty" }, "No job is submitted by the clock: ", h("code", {}, "orc schedule create"), " makes a schedule."));
}

async function quotas(who) {
  const { quotas: found } = await api("quotas");
  const put = ({ scope, name, resource }, amount) => attempt(() => api("quotas", { method: "PUT", body: { scope, name, resource, amount } }));
  fill($("quotas"), found.length ? table("Quotas", ["Of", "Name", "Resource", "At most", ""], found.map((one) =>
    h("tr", {}, h("td", {}, one.scope), h("td", {}, one.name), h("td", {}, one.resource), h("td", {}, one.amount.toLocaleString()),
      h("td", { class: "number" }, who.role === "admin" ?
        h("button", { class: "danger", "aria-label": `Remove the quota of ${one.resource} of ${one.name}`, onclick: () => put(one, null) }, "Remove") : null)))) :
    h("div", { class: "empty" }, "Nobody's use is limited."));
}

async function attempt(action) {
  try {
    problem($("problem"), null);
    const who = await me;
    await action();
    await Promise.all([schedules(who), quotas(who)]);
  } catch (error) {
    problem($("problem"), error);
  }
}

$("set").onsubmit = (event) => {
  event.preventDefault();
  const values = Object.fromEntries(new FormData($("set")));
  attempt(async () => {
    await api("quotas", { method: "PUT", body: { ...values, amount: Number(values.amount) } });
    $("set").reset();
  });
};
const load = () => attempt(async () => {});
connection.addEventListener("restored", load);
load();
setInterval(() => document.hidden || load(), 15000);
