// The logs of all ranks as one, in the order of the times that their lines begin with; each rank has a colour.
import { ansi } from "./ansi.js";
import { api, query } from "./api.js";
import { $, h } from "./dom.js";

const PAUSE = 2000; // ms between two looks at a job that runs
const MOST_LINES = 4000;
const COLORS = 8;
const element = $("log");
let timer = null;
let turn = 0;

/** Stop following. */
export function closeMerged() {
  turn += 1;
  clearTimeout(timer);
}

/** Show the newest lines of all ranks, and those that come while `runs()`. */
export async function openMerged(jobId, attempt, runs) {
  closeMerged();
  const mine = turn;
  element.replaceChildren();
  $("found").replaceChildren();
  $("log-note").textContent = "loading…";
  let after = "";
  const look = async () => {
    const follows = runs();
    let more = follows;
    try {
      const { lines, next, unreachable } = await api(`jobs/${encodeURIComponent(jobId)}/merged-log${query({ attempt, after })}`);
      if (mine !== turn) return;
      after = next;
      more ||= lines.length > 0; // an answer is of bounded size
      const atEnd = !element.childElementCount || element.scrollHeight - element.scrollTop - element.clientHeight < 60;
      element.append(...lines.map(({ rank, text }) => h("div", { class: "l" }, h("span", { class: `of r${rank % COLORS}` }, `rank ${rank} `), ansi(text)[0])));
      while (element.childElementCount > MOST_LINES) element.firstChild.remove();
      if (atEnd) element.scrollTop = element.scrollHeight;
      const missing = Object.entries(unreachable).map(([host, why]) => ` · missing: ${host} (${why})`).join("");
      $("log-note").textContent = `all ranks, by the times that lines begin with${follows ? " · following" : ""}${missing}`;
    } catch (error) {
      if (mine === turn) $("log-note").textContent = error.message;
    }
    if (mine === turn && more) timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", look, { once: true }) : look()), PAUSE);
  };
  await look();
}
