// The frame of every page: who is logged in, the theme, the keyboard.
import { api, request, toLogin } from "./api.js";
import { $ } from "./dom.js";

/** Promise of the user: `{user, role}`. */
export const me = api("me").then((found) => {
  $("user").textContent = found.role && found.role !== "user" ? `${found.user} (${found.role})` : found.user;
  $("logout-button").hidden = false;
  for (const link of document.querySelectorAll("[data-role]")) link.hidden = link.dataset.role !== found.role;
  return found;
});
me.catch(() => {});

$("theme-button").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("orc-theme", document.documentElement.dataset.theme);
  document.dispatchEvent(new Event("theme"));
};
$("logout-button").onclick = () => request("logout", { method: "POST" }).finally(toLogin);
$("help-button").onclick = () => $("help").showModal();

/** Move the focus among the `data-row` elements. */
function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent);
  const at = rows.indexOf(document.activeElement);
  rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)]?.focus();
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  g: () => location.assign("/"),
  f: () => $("follow")?.click(),
  "/": () => document.querySelector("input[type=search]")?.focus(),
  "?": () => $("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  // A dialog that was closed keeps the focus until it is put elsewhere.
  const typing = event.target.closest("input, select, textarea, dialog[open]");
  if (event.key === "Escape" && typing && !event.target.closest("dialog[open]")) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
