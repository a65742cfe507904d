// Why a job failed or waits: what `orc status` says, first on its page.
import { ansi } from "./ansi.js";
import { $, fill, h } from "./dom.js";
import { firstLine } from "./format.js";

const CAUSES = {
  crash: "a process of the job ended with an error",
  node_failure: "a node or its agent went away",
  preempted: "the platform took its nodes",
  timeout: "it reached its time limit",
  launch: "it could not be started",
  cancelled: "it was cancelled",
};
const HINTS = {
  crash: "The last lines are those of the first rank that failed; other ranks often only follow it. The whole log is below.",
  node_failure: "Later attempts keep away from the node. With `retry: {max: 3, on: [node_failure]}` the job goes on by itself.",
  preempted: "With `retry: {max: 3, on: [preempted]}` the job goes on from its last checkpoint.",
  timeout: "Clone it with a larger time_limit, or save checkpoints and let it retry on timeout.",
  launch: "Nothing ran. `orc render` and `orc doctor` show what would be started, and what is missing.",
};

/** Return what a program printed, line by line. */
const lines = (text) => text.trimEnd().split("\n").map((line) => [...ansi(line)[0], "\n"]);

/** Show why *job* failed, or what it waits for; `showRank(rank, node)` opens a log. */
export function diagnose(job, showRank) {
  const card = $("diagnosis");
  const attempt = job.attempts.at(-1);
  const failed = job.state === "FAILED";
  const reason = job.reason || attempt?.reason || "";
  const waiting = !failed && !["RUNNING", "SUCCEEDED"].includes(job.state) && reason;
  card.hidden = !failed && !waiting;
  card.className = `card ${failed ? "diagnosis" : "notice"}`;
  if (card.hidden) return;
  if (waiting) {
    const title = job.state === "CANCELLED" ? "Cancelled" : "Why it does not run yet";
    fill(card, h("h2", {}, title), h("pre", {}, lines(reason)));
    return;
  }
  const first = attempt?.exit?.first_failure;
  const cause = attempt?.cause;
  const more = reason.includes("\n") ? reason.slice(reason.indexOf("\n") + 1) : "";
  const who = first && (first.rank === null ? `node ${first.node}` : `rank ${first.rank}`);
  const how = first && (first.signal ? `was killed by ${first.signal}` : `exited with ${first.exit_code}`);
  const changed = fill(card,
    h("h2", {}, "Why it failed"),
    h("p", {}, h("strong", {}, firstLine(reason) || CAUSES[cause] || "no reason is known")),
    h("dl", {},
      cause ? [h("dt", {}, "Cause"), h("dd", {}, `${cause.replace("_", " ")}: ${CAUSES[cause] ?? ""}`)] : null,
      first ? [h("dt", {}, "First failure"), h("dd", {}, `${who} on ${first.host} (node ${first.node}) ${how}`)] : null,
      first?.stall ? [h("dt", {}, "Stalled"), h("dd", {}, first.stall)] : null,
      attempt?.failed_hosts?.length ? [h("dt", {}, "Failed hosts"), h("dd", {}, attempt.failed_hosts.join(", "))] : null),
    HINTS[cause] ? h("p", { class: "hint muted" }, HINTS[cause]) : null,
    first?.log_tail || more ? h("pre", { tabindex: "0", "aria-label": "Last lines of the rank that failed first" }, lines(first?.log_tail || more)) : null,
    first ? h("p", {}, h("button", { onclick: () => showRank(first.rank, first.node) }, `Open the log of ${who}`)) : null);
  const tail = card.querySelector("pre");
  if (changed && tail) tail.scrollTop = tail.scrollHeight; // a traceback says last what went wrong
}
