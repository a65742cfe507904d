// Tokens and the audit log, for admins.
import { api } from "./api.js";
import { $, fill, h, problem } from "./dom.js";
import { time } from "./format.js";
import "./shell.js";

const table = (label, columns, rows) => h("table", { "aria-label": label },
  h("thead", {}, h("tr", {}, columns.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows));

async function tokens() {
  const { tokens: found } = await api("tokens");
  fill($("tokens"), table("Tokens", ["User", "Role", "Note", "Id", "Created", "Last used", "Expires", ""], found.map((token) =>
    h("tr", {}, h("td", {}, token.user), h("td", {}, token.role), h("td", {}, token.note || "–"), h("td", { class: "mono nowrap" }, token.id),
      h("td", { class: "nowrap" }, time(token.created_at)), h("td", { class: "nowrap" }, time(token.last_used_at)), h("td", { class: "nowrap" }, time(token.expires_at)),
      h("td", { class: "number" }, token.revoked_at ? h("span", { class: "muted nowrap" }, "revoked ", time(token.revoked_at)) :
        h("button", { class: "danger", "aria-label": `Revoke the token ${token.id} of ${token.user}`, onclick: () => revoke(token) }, "Revoke"))))));
}

async function audit() {
  const { lines } = await api("audit?limit=100");
  fill($("audit"), lines.length ? table("Audit log", ["When", "User", "Action", "Subject", "From"], lines.map((entry) =>
    h("tr", {}, h("td", { class: "nowrap" }, time(entry.at, false)), h("td", {}, entry.user || "–"), h("td", {}, entry.action), h("td", {}, entry.subject || "–"), h("td", { class: "mono" }, entry.address || "–")))) :
    h("div", { class: "empty" }, "Nothing yet."));
}

async function revoke(token) {
  if (!confirm(`Revoke the token ${token.id} of ${token.user}? Who uses it is locked out at once.`)) return;
  await attempt(() => api(`tokens/${encodeURIComponent(token.id)}`, { method: "DELETE" }));
}

async function attempt(action) {
  try {
    problem($("problem"), null);
    await action();
    await Promise.all([tokens(), audit()]);
  } catch (error) {
    problem($("problem"), error);
  }
}

$("create").onsubmit = (event) => {
  event.preventDefault();
  const values = Object.fromEntries(new FormData($("create")));
  attempt(async () => {
    const made = await api("tokens", { method: "POST", body: values });
    $("create").reset();
    $("created").replaceChildren(h("div", { class: "card" }, h("p", {}, `The token of ${values.user}. It is shown this once:`), h("pre", { class: "code", tabindex: "0" }, made.token)));
  });
};
attempt(async () => {});
