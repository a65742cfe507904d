// Jobs side by side: what differs in their specifications and code, their outcomes, their curves over each other.
import { api, query } from "./api.js";
import { draw } from "./charts.js";
import { $, fill, h, problem } from "./dom.js";
import { badge, duration, firstLine, flatten, number, yaml } from "./format.js";
import "./shell.js";

const MOST = 8;
const COLORS = 8;
const ids = [...new Set(new URLSearchParams(location.search).getAll("job"))].slice(0, MOST);
const path = (id) => `jobs/${encodeURIComponent(id)}`;

const took = (job) => {
  const began = job.attempts.find(({ started_at: at }) => at)?.started_at;
  return began ? duration((job.ended_at ?? Date.now() / 1000) - began) : "–";
};

/** Return the keys of a specification with their values; the arguments of the program by their flags. */
function keysOf({ args = [], ...spec }) {
  const keys = new Map(flatten(spec));
  const others = [];
  const isFlag = (word) => /^--?[a-z]/i.test(word); // -1 is a value
  for (const words = [...args]; words.length;) {
    const word = words.shift();
    const [name, value] = word.split(/=(.*)/s);
    if (!isFlag(word)) others.push(word);
    else keys.set(`args ${name}`, value ?? (words.length && !isFlag(words[0]) ? words.shift() : "true"));
  }
  return keys.set("args", others.join(" "));
}

/** Return rows `[name, values]` of the table; of the specifications the keys that differ. */
function table(jobs, measured) {
  const specs = jobs.map((job) => keysOf(job.spec));
  const keys = [...new Set(specs.flatMap((spec) => [...spec.keys()]))];
  const value = (spec, key) => (spec.get(key) === undefined || spec.get(key) === null ? "–" : yaml(spec.get(key)));
  const differing = keys.filter((key) => new Set(specs.map((spec) => value(spec, key))).size > 1);
  const lowest = measured.map((each) => each.lowest.loss ?? null);
  const best = Math.min(...lowest.filter((loss) => loss !== null));
  const losses = lowest.map((loss) => (loss === null ? "–" : loss === best ? h("strong", {}, number(loss)) : number(loss)));
  const digests = jobs.map((job) => job.digests.code ?? "");
  return [
    ["State", jobs.map((job) => [badge(job.state), job.state === "FAILED" ? h("div", { class: "muted" }, firstLine(job.reason)) : null])],
    ["Took", jobs.map(took)],
    best < Infinity ? ["Lowest loss", losses] : null,
    ["Code", digests.map((digest, place) => [h("code", { title: digest }, digest.slice(0, 12)), place && digest === digests[0] ? h("span", { class: "muted" }, " the same") : null])],
    ...differing.map((key) => [h("code", {}, key), specs.map((spec) => h("span", { class: "mono" }, value(spec, key)))]),
  ].filter(Boolean);
}

/** Show how the code of each job differs from that of the first. */
async function showCode(jobs) {
  const others = jobs.slice(1).filter((job) => job.digests.code !== jobs[0].digests.code);
  const parts = await Promise.all(others.map(async (job) => {
    const title = h("h3", {}, `${jobs[0].id} → ${job.id}`);
    try {
      const { code } = await api(`diff${query({ a: jobs[0].id, b: job.id })}`);
      const files = code.files.map(({ path: name, change, diff, note }) => h("details", { open: code.files.length < 4 }, h("summary", {}, `${name} (${change})`),
        diff ? h("pre", { class: "code diff", tabindex: "0" }, diff.split("\n").slice(2).map((line) => h({ "+": "ins", "-": "del" }[line[0]] ?? "span", {}, `${line}\n`))) : null, note ? h("p", { class: "muted" }, note) : null));
      return [title, files.length ? files : h("p", { class: "muted" }, code.missing || "No file differs.")];
    } catch (error) {
      return [title, h("p", { class: "muted" }, error.message)];
    }
  }));
  $("code-card").hidden = !parts.length;
  fill($("code"), parts);
}

async function load() {
  try {
    if (ids.length < 2) throw Object.assign(new Error("Choose two or more jobs in the table of jobs."), { status: 1 });
    const jobs = await Promise.all(ids.map((id) => api(path(id))));
    const measured = await Promise.all(ids.map((id) => api(`${path(id)}/metrics?points=600`).catch(() => ({ series: {}, times: [], lowest: {} }))));
    problem($("problem"), null);
    $("differences").hidden = false;
    document.title = `${ids.join(", ")} · orc`;
    fill($("differences"), h("table", { "aria-label": "Differences", class: "versus" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), jobs.map((job, place) => h("th", { scope: "col" }, h("i", { class: `swatch ${place ? `c${(place % COLORS) + 1}` : "accent"}`, "aria-hidden": "true" }), h("a", { href: `/jobs/${encodeURIComponent(job.id)}`, "data-row": true }, job.id))))),
      h("tbody", {}, table(jobs, measured).map(([name, cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell)))))));
    draw(measured.map((each, place) => ({ name: ids[place], ...each })));
    await showCode(jobs);
  } catch (error) {
    $("differences").hidden = true;
    problem($("problem"), error);
    if (error.status === 0) setTimeout(load, 2000); // the service is away
  }
}

load();
