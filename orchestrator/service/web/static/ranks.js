// Nodes and their ranks: how each is, how fast, and the last line that it printed; many of them as a heat map.
import { $, fill, h } from "./dom.js";
import { number, percent } from "./format.js";

const TAILS = 16; // ranks whose last line is asked for
const CARDS = 32; // more ranks are a heat map
const LEVELS = 5;
const DRAWN = 8192; // ranks beyond them have no place on a page
const seconds = (value) => `${number(Number(value.toPrecision(3)))} s`;
const MAPS = { state: ["State"], step: ["Step", "step", number], step_s: ["Step time", "step_s", seconds], data_wait: ["Data wait", "data_wait", percent] };
let wanted = "state";

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
  return [Number(String(resources.nodes ?? 1).split(":").at(-1)), resources.procs_per_node || resources.gpus_per_node || 1];
}

/** Return how a rank gets on, in words. */
function gait({ step, step_s: time, data_wait: wait } = {}) {
  return [step === undefined ? "" : `step ${number(step)}`, time === undefined ? "" : seconds(time), wait === undefined ? "" : `waits ${percent(wait)}`].filter(Boolean).join(" · ");
}

/** Show the ranks of *attempt*; `tails` maps ranks to their last lines, `speeds` to how they get on; `show(rank, node)` opens a log. */
export function showRanks(job, attempt, tails, speeds, show) {
  $("ranks-card").hidden = !attempt;
  const [nodes, perNode] = shape(job);
  const many = nodes * perNode > CARDS;
  const map = many && Object.keys(speeds).length ? wanted : "state"; // an earlier attempt has no speeds
  const values = map !== "state" ? Object.values(speeds).map((speed) => speed[MAPS[map][1]]).filter(Number.isFinite) : [];
  const [lowest, highest] = [Math.min(...values), Math.max(...values)];
  const level = (value) => (Number.isFinite(value) ? (highest > lowest ? Math.round(((value - lowest) / (highest - lowest)) * (LEVELS - 1)) : 0) : null);
  const drawn = Math.min(nodes, Math.max(1, Math.floor(DRAWN / perNode)));
  const rows = Array.from({ length: drawn }, (_, node) => {
    const host = attempt?.hosts?.[node];
    const cells = Array.from({ length: perNode }, (_, local) => {
      const rank = node * perNode + local;
      const [state, words] = howIs(rank, attempt);
      const said = gait(speeds[rank]);
      if (many) {
        const told = `rank ${rank}: ${words}${said ? ` · ${said}` : ""}`;
        return h("button", { class: "cell", "data-state": map === "state" ? state : null, "data-level": map === "state" ? null : level(speeds[rank]?.[MAPS[map][1]]), "data-rank": rank, title: told, "aria-label": told, onclick: () => show(rank, node) });
      }
      const tail = tails.get(rank);
      return h("button", { class: "rank", "data-state": state, "data-rank": rank, onclick: () => show(rank, node) },
        h("span", {}, `rank ${rank} `, h("small", {}, words)), said ? h("small", {}, said) : null,
        tail ? h("span", { class: "tail", title: tail }, tail) : null);
    });
    return h("tr", {},
      h("th", { scope: "row" }, h("button", { class: "plain", onclick: () => show(null, node), title: "The log of its agent and launcher" }, `node ${node}`), host ? h("div", { class: "muted" }, host) : null),
      h("td", {}, h("div", { class: "ranks" }, cells)));
  });
  const choose = many && Object.keys(speeds).length ? h("div", { class: "logbar" },
    h("select", { "aria-label": "Ranks by", onchange: (event) => { wanted = event.target.value; showRanks(job, attempt, tails, speeds, show); } },
      Object.entries(MAPS).map(([name, [title]]) => h("option", { value: name, selected: name === map }, title))),
    values.length ? h("span", { class: "muted" }, `${MAPS[map][2](lowest)} `, Array.from({ length: LEVELS }, (_, shade) => h("i", { class: "cell", "data-level": shade })), ` ${MAPS[map][2](highest)}`) : null) : null;
  // The handlers are of this call: what looks the same keeps those of an earlier one, which do the same.
  fill($("ranks"), choose, h("table", { class: "grid", "aria-label": "Nodes and their ranks" }, h("tbody", {}, rows)),
    drawn < nodes ? h("p", { class: "muted" }, `and ${nodes - drawn} more nodes`) : null);
}

/** Return the ranks whose last lines are shown. */
export const tailed = (job) => {
  const [nodes, perNode] = shape(job);
  return nodes * perNode <= TAILS ? Array.from({ length: nodes * perNode }, (_, rank) => rank) : [];
};
