// Exchanges a token for a session.
import { request } from "./api.js";
import { $, problem } from "./dom.js";

$("login").onsubmit = async (event) => {
  event.preventDefault();
  problem($("problem"), null);
  try {
    await request("login", { method: "POST", body: { token: $("token").value.trim() } });
    // Only a path of this service: `//host` and `https:` lead elsewhere.
    const next = new URLSearchParams(location.search).get("next") ?? "/";
    const target = new URL(next, location.origin);
    location.replace(target.origin === location.origin ? target.pathname + target.search : "/");
  } catch (error) {
    problem($("problem"), error);
    $("token").select();
  }
};
