// The clusters: whether they answer, what is in their queues.
import { api, connection, query } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { ago, badge, time } from "./format.js";
import "./shell.js";

const LIVE = ["QUEUED", "PREPARED", "SUBMITTING", "PENDING", "RUNNING"];
const queues = new Map(); // by cluster that has one: what it answered, or its error

function health(cluster) {
  if (cluster.error) return h("span", { class: "state", "data-state": "FAILED" }, "does not answer");
  if (cluster.answered_at) return h("span", { class: "state", "data-state": "SUCCEEDED" }, `answered ${ago(cluster.answered_at)}`);
  return h("span", { class: "state" }, "not asked yet");
}

function partitions(list) {
  if (!list?.length) return null;
  const rows = list.map((one) => h("tr", {}, h("td", {}, one.name + (one.default ? "*" : "")), h("td", {}, one.state),
    h("td", { class: "number" }, `${one.idle_nodes}/${one.nodes}`), h("td", { class: "number" }, `${one.idle_cpus}/${one.cpus}`)));
  return h("div", { class: "scroll" }, h("table", { "aria-label": "Partitions" },
    h("thead", {}, h("tr", {}, ["Partition", "State", "Idle nodes", "Idle cores"].map((text, column) => h("th", { scope: "col", class: column > 1 ? "number" : null }, text)))), h("tbody", {}, rows)));
}

function ours(jobs) {
  if (!jobs?.length) return h("p", { class: "muted" }, "None of our jobs is in its queue.");
  const rows = jobs.map((one) => h("tr", {},
    h("td", {}, h("a", { href: `/jobs/${encodeURIComponent(one.job)}`, "data-row": true }, one.job)),
    h("td", {}, badge(one.state)),
    h("td", {}, one.starts_at ? time(one.starts_at) : one.reason || "–")));
  return h("div", { class: "scroll" }, h("table", { "aria-label": "Our jobs in the queue" },
    h("thead", {}, h("tr", {}, ["Job", "State", "Starts, or why not"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}

function card(cluster, jobs) {
  const queue = queues.get(cluster.name);
  const counts = Object.entries(Object.groupBy(jobs.filter((job) => job.cluster === cluster.name), (job) => job.state)).map(([state, list]) => [state, list.length]);
  return h("section", { class: "card", "aria-label": cluster.name },
    h("div", { class: "head" }, h("h2", {}, cluster.name), h("span", { class: "muted" }, cluster.kind), health(cluster)),
    cluster.error ? h("div", { class: "error" }, cluster.error) : null,
    h("dl", {},
      cluster.polled_at ? [h("dt", {}, "Last asked"), h("dd", {}, time(cluster.polled_at))] : null,
      cluster.answered_at ? [h("dt", {}, "Last answer"), h("dd", {}, time(cluster.answered_at))] : null,
      cluster.next_at ? [h("dt", {}, "Asked again"), h("dd", {}, time(cluster.next_at))] : null,
      h("dt", {}, "Our jobs"),
      h("dd", {}, counts.length ? counts.map(([state, n]) => h("a", { class: "tag", href: `/?cluster=${encodeURIComponent(cluster.name)}&state=${state}` }, `${n} ${state.toLowerCase()}`)) : "none that has not ended")),
    queue?.error ? h("div", { class: "error" }, queue.error) : queue ? [partitions(queue.partitions), ours(queue.jobs)] : null);
}

async function load() {
  try {
    const [{ clusters }, { jobs }] = await Promise.all([api("clusters"), api(`jobs${query({ state: LIVE, limit: 500 })}`)]);
    problem($("problem"), null);
    const show = () => fill($("clusters"), clusters.length ? clusters.map((cluster) => card(cluster, jobs)) : h("div", { class: "empty" }, "No cluster is configured."));
    show();
    // A cluster that is slow to answer keeps nobody else waiting.
    await Promise.all(clusters.filter((cluster) => cluster.has_queue).map(async (cluster) => {
      queues.set(cluster.name, await api(`clusters/${encodeURIComponent(cluster.name)}/queue`).catch((error) => ({ error: error.message })));
      show();
    }));
  } catch (error) {
    if (error.status) problem($("problem"), error);
  }
}

connection.addEventListener("restored", load);
load();
setInterval(() => document.hidden || load(), 15000);
