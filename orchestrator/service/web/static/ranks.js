// Nodes and their ranks: how each is, and the last line that it printed.
import { $, fill, h } from "./dom.js";

const TAILS = 16; // ranks whose last line is asked for

/** Return how one rank is: `[state, words]`. */
function howIs(rank, attempt) {
  const end = attempt?.exit?.ranks?.[rank];
  if (end?.signal) return ["failed", end.signal];
  if (end) return end.exit_code === 0 ? ["ok", "ok"] : ["failed", `exit ${end.exit_code}`];
  if (attempt?.state === "RUNNING") return ["running", "running"];
  return ["", (attempt?.state ?? "not started").toLowerCase()];
}

/** Return the numbers of nodes and of ranks on each. */
export function shape(job) {
  const resources = job.spec.resources ?? {};
  return [resources.nodes ?? 1, resources.procs_per_node || resources.gpus_per_node || 1];
}

/** Show the grid of *attempt*; `tails` maps ranks to their last lines, `show(rank, node)` opens a log. */
export function showRanks(job, attempt, tails, show) {
  $("ranks-card").hidden = !attempt;
  const [nodes, perNode] = shape(job);
  const rows = Array.from({ length: nodes }, (_, node) => {
    const host = attempt?.hosts?.[node];
    const cells = Array.from({ length: perNode }, (_, local) => {
      const rank = node * perNode + local;
      const [state, words] = howIs(rank, attempt);
      const tail = tails.get(rank);
      return h("button", { class: "rank", "data-state": state, "data-rank": rank, onclick: () => show(rank, node) },
        h("span", {}, `rank ${rank} `, h("small", {}, words)),
        tail ? h("span", { class: "tail", title: tail }, tail) : null);
    });
    return h("tr", {},
      h("th", { scope: "row" }, h("button", { class: "plain", onclick: () => show(null, node), title: "The log of its agent and launcher" }, `node ${node}`), host ? h("div", { class: "muted" }, host) : null),
      h("td", {}, h("div", { class: "ranks" }, cells)));
  });
  fill($("ranks"), h("table", { class: "grid", "aria-label": "Nodes and their ranks" }, h("tbody", {}, rows)));
}

/** Return the ranks whose last lines are shown. */
export const tailed = (job) => {
  const [nodes, perNode] = shape(job);
  return nodes * perNode <= TAILS ? Array.from({ length: nodes * perNode }, (_, rank) => rank) : [];
};
