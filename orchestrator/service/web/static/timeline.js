// The attempts of a job as bars, and its events as a list.
import { $, fill, h } from "./dom.js";
import { badge, clock, duration, firstLine, progress } from "./format.js";

const WORDS = {
  queued: "submitted",
  waiting: "queued",
  prepared: "made ready",
  placed: "given hosts",
  submitting: "being sent to the cluster",
  accepted: "accepted by the cluster",
  ambiguous: "cut off while it was sent; the cluster may or may not have it",
  not_found: "looked for on the cluster and not seen so far",
  adopted: "found on the cluster",
  released: "the cluster has certainly not got it; it is sent again",
  requeued: "put back into its queue by the cluster",
  cancel_requested: "cancellation asked for",
  cancel_sent: "the cluster was told to stop it",
  duplicate: "a second copy was sent, which does not run or was told to end",
  poll_error: "the cluster could not be asked",
  retry: "another attempt follows",
  job_succeeded: "the job has succeeded",
  job_failed: "the job has failed",
  job_cancelled: "the job was cancelled",
};

function sentence({ kind, data }) {
  const detail = [data.cause?.replace("_", " "), firstLine(data.reason), data.hosts?.join(", "), data.native_id, kind === "queued" ? data.source : ""];
  const said = detail.filter((text) => typeof text === "string" && text).join(" · ");
  return (WORDS[kind] ?? kind.replaceAll("_", " ")) + (said ? `: ${said}` : "");
}

/** Show the attempts; every bar has the length of the job's whole life. */
export function showAttempts(job) {
  const now = Date.now() / 1000;
  const whole = Math.max((job.ended_at ?? now) - job.created_at, 0.001);
  fill($("attempts"), job.attempts.map((attempt) => {
    const end = attempt.ended_at ?? now;
    const begin = attempt.submitted_at ?? end;
    const start = attempt.started_at ?? end;
    const took = attempt.started_at ? `ran ${duration(end - attempt.started_at)}` : `waiting ${duration(end - begin)}`;
    const before = begin - job.created_at;
    return h("div", {},
      h("div", { class: "line" }, h("strong", {}, `Attempt ${attempt.number}`), badge(attempt.state), h("span", { class: "muted" }, took),
        attempt.restarts ? h("span", { class: "muted" }, `requeued ${attempt.restarts} times by the cluster`) : null),
      h("div", { class: "bar", "aria-hidden": "true" },
        h("i", { class: "none", "data-share": before / whole }), h("i", { class: "queue", "data-share": (start - begin) / whole }), h("i", { class: attempt.state, "data-share": (end - start) / whole })),
      attempt.reason ? h("div", { class: "muted" }, firstLine(attempt.reason)) : null,
      attempt.progress && !attempt.ended_at && Object.keys(attempt.progress).length ? h("div", {}, progress(attempt.progress)) : null);
  }));
  // Widths are set by script: the policy of the page refuses style attributes.
  for (const part of $("attempts").querySelectorAll("[data-share]")) {
    const share = Math.min(Math.max(Number(part.dataset.share), 0), 1);
    part.style.width = `${share * 100}%`;
    part.hidden = share === 0;
  }
}

/** Show the events, newest first. */
export function showEvents(events) {
  fill($("events"), events.toReversed().map((event) =>
    h("li", {}, h("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
      h("span", {}, event.attempt ? h("span", { class: "muted" }, `attempt ${event.attempt}  `) : null, sentence(event)))));
}
