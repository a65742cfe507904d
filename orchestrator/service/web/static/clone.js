// Resubmission of a job with changed keys; the difference is shown before anything is sent.
import { api } from "./api.js";
import { $, h, problem } from "./dom.js";
import { flatten, yaml } from "./format.js";

let known = new Map();

const changes = () => [...$("pairs").children]
  .map((pair) => [...pair.querySelectorAll("input")].map((input) => input.value.trim()))
  .filter(([key]) => key);

function showDiff() {
  const lines = changes().flatMap(([key, value]) => {
    const old = known.has(key) ? yaml(known.get(key)) : null;
    if (old === value) return [];
    return [old === null ? null : h("del", {}, `- ${key}: ${old}`), h("ins", {}, `+ ${key}: ${value}`)];
  }).filter(Boolean);
  $("diff").replaceChildren(...(lines.length ? lines : [h("span", { class: "muted" }, "nothing: it would run again as it was")]));
}

function addPair() {
  const value = h("input", { placeholder: "value", "aria-label": "New value", autocomplete: "off", spellcheck: "false" });
  const key = h("input", {
    placeholder: "key, such as args.lr", "aria-label": "Key", list: "keys", autocomplete: "off", spellcheck: "false",
    onchange: () => {
      value.placeholder = known.has(key.value) ? yaml(known.get(key.value)) : "value";
      showDiff();
    },
  });
  const pair = h("div", {}, key, value, h("button", { type: "button", class: "plain", "aria-label": "Remove this change", onclick: () => { pair.remove(); showDiff(); } }, "✕"));
  $("pairs").append(pair);
  return key;
}

/** Let the user change keys of *job* and send it; the page of the new job opens. */
export function clone(job) {
  known = new Map(flatten(job.spec));
  $("keys").replaceChildren(...[...known.keys()].map((key) => h("option", { value: key })));
  $("pairs").replaceChildren();
  problem($("clone-problem"), null);
  const first = addPair();
  showDiff();
  $("clone-dialog").showModal();
  first.focus();
  $("send-clone").onclick = async (event) => {
    event.preventDefault(); // it stays open until the service has said yes
    $("send-clone").disabled = true;
    try {
      const made = await api(`jobs/${encodeURIComponent(job.id)}/resubmit`, { method: "POST", body: { set: changes().map(([key, value]) => `${key}=${value}`) } });
      location.assign(`/jobs/${encodeURIComponent(made.id)}`);
    } catch (error) {
      problem($("clone-problem"), error);
    } finally {
      $("send-clone").disabled = false;
    }
  };
}

$("pairs").oninput = showDiff;
$("add-pair").onclick = () => addPair().focus();
