// The log of one rank, node or launcher: its end at first, followed or paused, searched, and back to its beginning.
import { plain } from "./ansi.js";
import { api, query, request, stream } from "./api.js";
import { $, h } from "./dom.js";
import { bytes as size } from "./format.js";
import { LogWindow } from "./log_window.js";

const PIECE = 64 << 10; // bytes of one request
const FAR = 1 << 20; // bytes behind the end from which following skips to it

const element = $("log");
const shown = new LogWindow(element);
let job = null; // {id, ended}
let which = {}; // {attempt, rank | node | launcher}
let follows = false;
let close = null;
let turn = 0; // what an earlier choice still brings is dropped

const path = (what, more = {}) => `jobs/${encodeURIComponent(job.id)}/${what}${query({ ...which, ...more })}`;
const note = (text) => { $("log-note").textContent = text; };

/** Return bytes of the log, and where they begin: `{offset, limit}` of them, or the last ones, `{tail}`. */
async function read(part) {
  const response = await request(path("log", part));
  return [new Uint8Array(await response.arrayBuffer()), Number(response.headers.get("X-Orc-Offset"))];
}

/** Return the last line of a rank's log. */
export async function lastLine(jobId, attempt, rank) {
  const response = await request(`jobs/${encodeURIComponent(jobId)}/log${query({ attempt, rank, tail: 600 })}`);
  const text = new TextDecoder().decode(await response.arrayBuffer());
  return plain(text.trimEnd().split("\n").at(-1)).slice(0, 200);
}

/** Return *bytes* from their first whole line on, with its offset. */
function wholeLines(bytes, begin) {
  const cut = begin === 0 ? 0 : bytes.indexOf(10) + 1;
  return [bytes.subarray(cut), begin + cut];
}

const toEnd = () => { element.scrollTop = element.scrollHeight; };

function press(on) {
  follows = on;
  $("follow").setAttribute("aria-pressed", String(on));
}

function status() {
  $("follow").hidden = job.ended;
  $("earlier").disabled = shown.begin === 0;
  const part = shown.begin > 0 ? `from ${size(shown.begin)} on` : "";
  note([follows && !job.ended ? "following" : "", part, shown.end ? `${size(shown.end)}${job.ended ? "" : " so far"}` : job.ended ? "nothing printed" : "nothing printed yet"].filter(Boolean).join(" · "));
}

function pause() {
  close?.();
  close = null;
  press(false);
  note("paused: scroll to the end, or press Follow, to go on");
}

/** Follow from where the window ends; what is far behind is skipped. */
async function follow() {
  const mine = ++turn;
  close?.();
  close = null;
  press(true);
  const [last, from] = await read({ tail: PIECE });
  if (mine !== turn) return;
  if (from - shown.end > FAR) {
    const [found, begin] = wholeLines(last, from);
    shown.clear(begin);
    shown.append(new TextDecoder().decode(found), from + last.length);
    element.prepend(h("div", { class: "note" }, `… ${size(begin)} before this; Earlier shows them`));
  }
  toEnd();
  status();
  close = stream(() => `/api/v1/${path("log/stream", { offset: shown.end })}`, {
    message: ({ text }, id) => {
      if (mine !== turn || !follows) return;
      shown.append(text, Number(id));
      toEnd();
      status();
    },
    ended: (why) => {
      job.ended ||= !why;
      press(false);
      if (why) note(why.what);
      else status();
    },
  });
}

async function earlier() {
  if (!shown.begin) return;
  if (follows) pause();
  const mine = turn;
  const from = Math.max(shown.begin - PIECE, 0);
  const [found] = await read({ offset: from, limit: shown.begin - from });
  if (mine !== turn) return;
  const [lines, begin] = wholeLines(found, from);
  element.querySelector(".note")?.remove();
  const height = element.scrollHeight - element.scrollTop;
  if (lines.length) shown.prepend(lines, begin);
  else shown.begin = from; // one line that is longer than a piece
  element.scrollTop = element.scrollHeight - height;
  status();
}

async function later() {
  const mine = turn;
  const [found] = await read({ offset: shown.end, limit: PIECE });
  if (mine !== turn) return;
  if (found.length) shown.append(new TextDecoder().decode(found), shown.end + found.length);
  else if (!job.ended) follow();
  status();
}

/** Open a log at its end; one that still grows is followed. */
export async function openLog(about, choice) {
  const mine = ++turn;
  [job, which] = [about, choice];
  close?.();
  close = null;
  press(false);
  shown.clear(0);
  $("found").replaceChildren();
  note("loading…");
  try {
    const [found, begin] = wholeLines(...(await read({ tail: PIECE })));
    if (mine !== turn) return;
    // A line that is still being written is continued by what the stream brings.
    shown.clear(begin);
    if (found.length) shown.append(new TextDecoder().decode(found), begin + found.length);
    toEnd();
    status();
    if (!job.ended) await follow();
  } catch (error) {
    if (mine === turn) note(error.message);
  }
}

/** Stop following: another log takes the place. */
export function closeLog() {
  turn += 1;
  close?.();
  close = job = null;
  press(false);
}

/** Note that the job has ended or goes on. */
export function ended(value) {
  if (job) job.ended = value;
}

async function search(event) {
  event.preventDefault();
  const q = new FormData($("log-search")).get("q").trim();
  $("found").replaceChildren();
  if (!q || !job) return;
  const mine = turn;
  try {
    const { matches, next } = await api(path("log/search", { q, limit: 200, ignore_case: true }));
    if (mine !== turn) return;
    $("found").append(h("div", { class: "muted" }, matches.length ? `${matches.length}${next === null ? "" : "+"} lines with ${q}` : `no line has ${q}`));
    if (matches.length) {
      $("found").append(h("ul", { class: "found-list" }, matches.map((match) =>
        h("li", {}, h("button", { "data-row": true, onclick: () => jump(match.offset) }, plain(match.text) || " ")))));
    }
  } catch (error) {
    $("found").append(h("div", { class: "error" }, error.message));
  }
}

async function jump(offset) {
  const mine = ++turn;
  pause();
  const from = Math.max(offset - PIECE / 2, 0);
  const [found] = await read({ offset: from, limit: PIECE });
  if (mine !== turn) return;
  const [lines, begin] = wholeLines(found, from);
  const line = shown.show(lines, begin, offset);
  line?.classList.add("found");
  line?.scrollIntoView({ block: "center" });
  status();
}

$("follow").onclick = () => job && (follows ? pause() : follow());
$("earlier").onclick = () => job && earlier();
$("log-search").onsubmit = search;
element.addEventListener("scroll", () => {
  const below = element.scrollHeight - element.scrollTop - element.clientHeight;
  if (follows && below > 60) pause();
  else if (!follows && below < 2 && job && element.scrollTop > 0 && shown.end) later();
});
