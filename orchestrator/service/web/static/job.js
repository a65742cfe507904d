// The page of one job.
import { api, connection, query, stream } from "./api.js";
import { draw } from "./charts.js";
import { clone } from "./clone.js";
import { diagnose } from "./diagnosis.js";
import { $, fill, h, problem, toast } from "./dom.js";
import { badge, duration, sizeOf, time } from "./format.js";
import { showHeadline } from "./headline.js";
import { closeLog, ended, lastLine, openLog } from "./log.js";
import { closeMerged, openMerged } from "./merged_log.js";
import { shape, showRanks, tailed } from "./ranks.js";
import { me } from "./shell.js";
import { showAttempts, showEvents } from "./timeline.js";

const id = $("title").dataset.job;
const path = `jobs/${encodeURIComponent(id)}`;
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
// What the cluster itself calls an attempt, by the kind of the cluster; elsewhere as `orc status` says.
const NATIVE = { slurm: "Slurm job", sagemaker: "Training job", local: "Directory", ssh: "Directory" };
let job = null;
let attempt = null; // number that the ranks and the log are of; null: the newest
let opened = ""; // the log that is open, as text
const tails = new Map();
let speeds = {}; // by rank
let measured = { series: {}, lowest: {} };
let cost = null;

const chosen = () => job.attempts.find(({ number }) => number === attempt) ?? job.attempts.at(-1);

function facts() {
  const link = (name, value) => h("a", { href: `/${query({ [name]: value })}` }, value);
  const rows = {
    Owner: job.owner ? link("owner", job.owner) : null,
    Project: job.project || null,
    Cluster: [link("cluster", job.cluster), ` (${job.backend})`],
    Size: sizeOf(shape(job)[0], shape(job)[0] * (job.spec.resources?.gpus_per_node || 0)),
    Created: time(job.created_at),
    Elapsed: duration((job.ended_at ?? Date.now() / 1000) - job.created_at),
    "Next attempt": job.next_attempt_at && !job.ended_at ? time(job.next_attempt_at) : null,
    "Not before": job.not_before && !job.ended_at ? time(job.not_before) : null,
    Deadline: job.deadline_at ? time(job.deadline_at) : null,
    Priority: job.priority || null,
    Tags: Object.keys(job.tags).length ? Object.entries(job.tags).map(([key, value]) =>
      h("a", { class: "tag", href: `/${query({ tag: `${key}=${value}` })}` }, `${key}=${value}`)) : null,
    [NATIVE[job.backend] ?? "Native id"]: chosen()?.native_id || null,
    "Job file": job.source || null,
    Snapshots: Object.entries(job.digests).map(([name, digest]) => h("div", {}, `${name} `, h("code", { title: digest }, digest.slice(0, 12)))),
  };
  const shown = Object.entries(rows).filter(([, value]) => value !== null && value !== undefined && (!Array.isArray(value) || value.length));
  fill($("facts"), shown.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  const links = [];
  if (job.group_id) links.push(h("dt", {}, "Group"), h("dd", {}, h("a", { href: `/groups/${encodeURIComponent(job.group_id)}` }, job.group_id)));
  if (job.source.startsWith("job:")) links.push(h("dt", {}, "Resubmission of"), h("dd", {}, h("a", { href: `/jobs/${encodeURIComponent(job.source.slice(4))}` }, job.source.slice(4)), " ", h("a", { href: `/compare${query({ job: [job.source.slice(4), id] })}` }, "compare")));
  for (const needed of job.spec.depends_on ?? []) {
    const [other, condition] = needed.split(":"); // JOB[:CONDITION]
    links.push(h("dt", {}, "Depends on"), h("dd", {}, h("a", { href: `/jobs/${encodeURIComponent(other)}` }, other), condition ? ` (${condition})` : ""));
  }
  $("links-card").hidden = !links.length;
  fill($("links"), links);
}

const nameOf = ({ rank, node }) => (rank !== null && rank !== undefined ? `rank ${rank}` : node !== null && node !== undefined ? `node ${node}` : "launcher");

/** Show the log of a rank, or of a node where *rank* is null, and bring it into view. */
function showLog(rank, node) {
  const value = JSON.stringify(rank === null ? { node } : { rank });
  const select = $("log-of");
  if (![...select.options].some((option) => option.value === value)) select.append(h("option", { value }, nameOf({ rank, node })));
  select.value = value;
  $("log-card").hidden = false;
  choose();
  $("log-title").scrollIntoView({ block: "start", behavior: "smooth" });
  $("log").focus({ preventScroll: true });
}

function choose() {
  const of = JSON.parse($("log-of").value || "null");
  const number = chosen()?.number;
  if (!of || !number) return;
  opened = JSON.stringify([number, of]);
  const over = ENDED.includes(job.state) || number !== job.attempts.at(-1).number;
  const merged = Boolean(of.all);
  for (const part of ["follow", "earlier", "log-search"]) $(part).hidden = merged;
  closeMerged();
  if (!merged) openLog({ id, ended: over }, { attempt: number, ...of });
  else {
    closeLog();
    openMerged(id, number, () => !ENDED.includes(job.state) && number === job.attempts.at(-1).number);
  }
}

/** Fill the selection of logs; the first rank's, or that of the rank that failed first, is opened. */
async function selectors() {
  const current = chosen();
  fill($("log-attempt"), job.attempts.map(({ number }) => h("option", { value: number }, `attempt ${number}`)));
  $("log-attempt").hidden = job.attempts.length < 2;
  if (!current) return;
  $("log-attempt").value = current.number;
  const { logs } = await api(`${path}/logs${query({ attempt: current.number })}`);
  const options = logs.map((of) => h("option", { value: JSON.stringify(of.rank !== null && of.rank !== undefined ? { rank: of.rank } : of.node !== null && of.node !== undefined ? { node: of.node } : { launcher: true }) }, nameOf(of)));
  if (logs.filter(({ rank }) => rank !== null && rank !== undefined).length > 1) options.push(h("option", { value: JSON.stringify({ all: true }) }, "all ranks by time"));
  const kept = $("log-of").value;
  fill($("log-of"), options);
  $("log-card").hidden = !options.length;
  const values = options.map((option) => option.value);
  const failed = current.exit?.first_failure?.rank;
  const first = failed !== null && failed !== undefined ? JSON.stringify({ rank: failed }) : values[0];
  $("log-of").value = values.includes(kept) ? kept : values.includes(first) ? first : values[0] ?? "";
  if ($("log-of").value && opened !== JSON.stringify([current.number, JSON.parse($("log-of").value)])) choose();
}

async function refreshTails() {
  const current = chosen();
  if (!current?.started_at || document.hidden) return;
  await Promise.all(tailed(job).map(async (rank) => {
    const line = await lastLine(id, current.number, rank).catch(() => "");
    if (line) tails.set(rank, line);
  }));
  // The job may have been asked for anew meanwhile, and another attempt chosen.
  const newest = () => chosen().number === job.attempts.at(-1).number;
  const told = newest() && shape(job)[0] * shape(job)[1] > 1 ? (await api(`${path}/ranks`)).ranks : {};
  speeds = newest() ? told : {};
  showRanks(job, chosen(), tails, speeds, showLog);
}

async function refreshMetrics() {
  measured = await api(`${path}/metrics?points=600`);
  draw([{ name: id, ...measured }]);
  showHeadline(job, measured, cost);
}

async function refreshCost() {
  cost = (await api(`costs${query({ job: id })}`)).total;
  showHeadline(job, measured, cost);
}

function actions(user) {
  const over = ENDED.includes(job.state);
  const mine = user.role === "admin" || (user.role === "user" && user.user === job.owner);
  $("actions").hidden = user.role === "viewer";
  $("plan").hidden = user.role !== "admin" && user.user !== job.owner;
  $("cancel").hidden = over || !mine;
  $("cancel").disabled = Boolean(job.cancel_requested_at);
  $("cancel").textContent = job.cancel_requested_at ? "Being cancelled…" : "Cancel";
}

async function load() {
  try {
    job = await api(path);
    problem($("problem"), null);
  } catch (error) {
    $("loading").hidden = true;
    if (error.status) problem($("problem"), error);
    return;
  }
  $("loading").hidden = true;
  $("job").hidden = false;
  document.title = `${job.state.toLowerCase()} · ${id} · orc`;
  fill($("state"), badge(job.state));
  ended(ENDED.includes(job.state));
  diagnose(job, showLog);
  facts();
  showHeadline(job, measured, cost);
  showRanks(job, chosen(), tails, speeds, showLog);
  showAttempts(job);
  fill($("spec").querySelector("pre"), JSON.stringify(job.spec, null, 2));
  me.then(actions);
  const rest = [api(`${path}/events`).then(({ events }) => showEvents(events)), selectors(), refreshTails(), refreshMetrics(), refreshCost()];
  for (const outcome of await Promise.allSettled(rest)) {
    if (outcome.reason?.status) console.warn(outcome.reason.message);
  }
}

/** Do *action*; say what happened. */
async function act(action, done) {
  try {
    await action();
    toast(done);
    await load();
  } catch (error) {
    problem($("problem"), error);
    $("problem").scrollIntoView({ block: "center" });
  }
}

$("log-of").onchange = choose;
$("log-attempt").onchange = () => {
  attempt = Number($("log-attempt").value);
  tails.clear();
  speeds = {};
  showRanks(job, chosen(), tails, speeds, showLog);
  selectors();
  refreshTails();
};
$("cancel").onclick = () => {
  $("grace").value = "";
  $("grace").placeholder = `${job.spec.grace ?? ""}`;
  $("cancel-dialog").returnValue = "";
  $("cancel-dialog").showModal();
};
$("cancel-dialog").onclose = () => {
  if ($("cancel-dialog").returnValue !== "cancel") return;
  const grace = $("grace").value;
  act(() => api(`${path}/cancel`, { method: "POST", body: grace === "" ? {} : { grace_s: Number(grace) } }), "Cancellation asked for");
};
$("resubmit").onclick = () => act(async () => {
  const made = await api(`${path}/resubmit`, { method: "POST", body: {} });
  location.assign(`/jobs/${encodeURIComponent(made.id)}`);
}, "Submitted again");
$("clone").onclick = () => clone(job);
$("plan").ontoggle = async () => {
  const body = $("plan").querySelector("div");
  if (!$("plan").open) return;
  fill(body, h("p", { class: "loading" }, "Loading…"));
  try {
    const plan = await api(`${path}/plan`);
    const commands = plan.commands.map(({ argv, cwd, host, purpose }) => [purpose ? `# ${purpose}` : "", [host ? `${host}: ` : "", cwd ? `cd ${cwd}; ` : "", argv.join(" ")].join("")].filter(Boolean).join("\n"));
    const parts = [["Commands", commands.join("\n")], ["Environment of the ranks", Object.entries(plan.env).map(([name, value]) => `${name}=${value}`).join("\n")], ...plan.files.map(({ path: name, host, content }) => [host ? `${host}:${name}` : name, content])];
    fill(body, parts.filter(([, text]) => text).map(([name, text]) => [h("h3", {}, name), h("pre", { class: "code", tabindex: "0" }, text)]));
  } catch (error) {
    problem(body, error);
  }
};

let soon = null;
function later() {
  soon ??= setTimeout(() => { soon = null; load(); }, 200); // events come in bursts
}

/** Take what was asked for without an event; a change of the state, whose event did not come, concerns all. */
function renew(found) {
  if (found.state !== job.state) later();
  job = found;
}

connection.addEventListener("restored", load);
load();
stream(() => `/api/v1/events/stream${query({ job: id })}`, { message: (event) => event.job === id && later(), opened: (again) => again && load() });
setInterval(() => {
  if (!job || document.hidden || ENDED.includes(job.state)) return;
  facts();
  showAttempts(job);
  Promise.allSettled([api(path).then(renew), $("log-card").hidden && selectors(), refreshTails(), refreshMetrics(), refreshCost()]);
}, 5000);
