// Exchanges a token for a session.
import { request } from "./api.js";
import { $, problem } from "./dom.js";

$("login").onsubmit = async (event) => {
  event.preventDefault();
  problem($("problem"), null);
  try {
    await request("login", { method: "POST", body: { token: $("token").value.trim() } });
    // Compared is what is used, parsed once: the path of `/.//host` is `//host`, which leads elsewhere by itself.
    const next = new URLSearchParams(location.search).get("next") ?? "/";
    const target = URL.canParse(next, location.origin) ? new URL(next, location.origin) : null;
    location.replace(target?.origin === location.origin ? target.href : "/");
  } catch (error) {
    problem($("problem"), error);
    $("token").select();
  }
};
