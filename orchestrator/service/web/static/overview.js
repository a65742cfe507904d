// Above the table of jobs: how full the clusters are, what waits and for what, what failed today.
import { api, query } from "./api.js";
import { $, fill, h } from "./dom.js";
import { firstLine } from "./format.js";

const WAITING = ["QUEUED", "PREPARED", "SUBMITTING", "PENDING"];
const SHOWN = 4;
const QUEUE_MS = 60_000; // between two looks at a cluster's own queue
const queues = new Map(); // by cluster: {at, partitions}
let show = () => {}; // the clusters as they were told last

/** Return when today began here, in seconds since the epoch. */
export const midnight = () => new Date().setHours(0, 0, 0, 0) / 1000;

const sum = (counts, states) => states.reduce((total, state) => total + (counts[state] ?? 0), 0);

/** Return how much of a cluster is taken: `[taken, all, of what]`, or nothing where that is not known. */
function taken(cluster) {
  if (cluster.slots) return [cluster.slots_taken, cluster.slots, "slots"];
  const partitions = queues.get(cluster.name)?.partitions ?? [];
  const nodes = Math.max(0, ...partitions.map((partition) => partition.nodes)); // partitions may share their nodes
  const widest = partitions.find((partition) => partition.nodes === nodes);
  return nodes ? [nodes - widest.idle_nodes, nodes, "nodes"] : null;
}

function clusterRow(cluster, counts) {
  const full = taken(cluster);
  const [running, waiting] = [counts.RUNNING ?? 0, sum(counts, WAITING)];
  const jobs = [running ? `${running} running` : "", waiting ? `${waiting} waiting` : ""].filter(Boolean).join(", ") || "idle";
  const free = full ? `${Math.max(full[1] - full[0], 0)} of ${full[1]} ${full[2]} free` : "";
  return h("li", {}, h("a", { href: `/${query({ cluster: cluster.name })}` }, cluster.name),
    full ? h("meter", { min: 0, max: full[1], value: full[0], "aria-label": `${full[0]} of ${full[1]} ${full[2]} of ${cluster.name} are taken` }) : h("span", {}),
    h("span", { class: "muted" }, [cluster.error ? "does not answer" : free, jobs].filter(Boolean).join(" · ")));
}

const jobRow = (job, why) => h("li", {}, h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.id), h("span", { class: "muted", title: why }, why));

function list(element, rows, none) {
  fill(element, rows.length ? h("ul", {}, rows) : h("p", { class: "muted" }, none));
}

/** Ask anew and show. */
export async function showOverview() {
  const [{ clusters }, { clusters: counts }, waiting, failed] = await Promise.all([
    api("clusters"), api("job-counts"),
    api(`jobs${query({ state: WAITING, limit: SHOWN })}`), api(`jobs${query({ state: "FAILED", ended_since: midnight(), limit: SHOWN })}`),
  ]);
  show = () => list($("clusters-now"), clusters.map((cluster) => clusterRow(cluster, counts[cluster.name] ?? {})), "No cluster is configured.");
  show();
  list($("waiting-now"), waiting.jobs.map((job) => jobRow(job, firstLine(job.reason) || `for ${job.cluster}`)), "Nothing waits.");
  list($("failed-now"), failed.jobs.map((job) => jobRow(job, firstLine(job.reason))), "Nothing.");
  for (const { name } of clusters.filter(({ name, has_queue: asks }) => asks && !(Date.now() - queues.get(name)?.at < QUEUE_MS))) {
    queues.set(name, { ...queues.get(name), at: Date.now() }); // a cluster that is slow is not asked twice
    api(`clusters/${encodeURIComponent(name)}/queue`).catch(() => ({})).then(({ partitions }) => {
      queues.set(name, { at: Date.now(), partitions });
      show();
    });
  }
}
