// The figures of a job that people ask for first: how far, how fast, how long still, at what cost.
import { $, fill, h } from "./dom.js";
import { duration, money, number, percent } from "./format.js";

const last = (points) => points?.at(-1)?.[1];

/** Return the words for how far a training is. */
export function howFar(progress) {
  const said = ["epoch", "step"].filter((key) => Number.isFinite(progress[key])).map((key) => `${key} ${number(progress[key])}`);
  return said.join(" · ");
}

/** Show the figures of *job*, with what it has measured and its *cost* as far as they are known. */
export function showHeadline(job, { series, lowest }, cost) {
  const attempt = job.attempts.at(-1);
  const progress = attempt?.progress ?? {};
  const share = job.state === "SUCCEEDED" ? null : job.share;
  const stepTime = last(series.step_s);
  const running = job.state === "RUNNING";
  const [throughput, unit] = series.tokens_per_s?.length ? [last(series.tokens_per_s), "tokens/s"] : [last(series.samples_per_s), "samples/s"];
  const loss = last(series.loss) ?? progress.loss;
  const began = job.attempts.find(({ started_at: at }) => at)?.started_at;
  const left = running && share > 0 && stepTime && progress.step > 0 ? (progress.step / share - progress.step) * stepTime : null;
  const figures = [
    ["Progress", share !== null && share !== undefined ? percent(share) : howFar(progress), share !== null && share !== undefined ? [h("progress", { max: 1, value: share, "aria-label": "Share that is done" }), howFar(progress)] : null],
    ["Loss", Number.isFinite(loss) ? number(loss) : null, series.loss?.length > 1 ? `lowest ${number(lowest.loss)}` : null],
    ["Speed", stepTime ? `${number(Number((1 / stepTime).toPrecision(3)))} steps/s` : null, throughput ? `${number(Number(throughput.toPrecision(3)))} ${unit}` : null],
    running ? ["Time left", left === null ? null : duration(left), began ? `running for ${duration(Date.now() / 1000 - began)}` : null]
      : ["Took", began && job.ended_at ? duration(job.ended_at - began) : null, began && began > job.created_at ? `after ${duration(began - job.created_at)} of waiting` : null],
    cost ? (cost.cost ? ["Cost", money(cost.cost), hours(cost)] : ["Use", hours(cost), null]) : null,
  ].filter((figure) => figure && figure[1]);
  $("headline").hidden = !figures.length;
  fill($("headline"), figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), more ? h("dd", { class: "muted" }, more) : null)));
}

const amount = (value) => (value < 0.01 ? "< 0.01" : number(Number(value.toPrecision(3))));
const hours = ({ gpu_hours: gpu, node_hours: node }) => (gpu ? `${amount(gpu)} GPU hours` : node ? `${amount(node)} node hours` : null);
