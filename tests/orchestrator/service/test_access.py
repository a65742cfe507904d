"""Who may do what: every route is asked by everybody."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from orc.orchestrator.api.access import DEFAULT_EXPIRES_S
from orc.orchestrator.api.call import SAFE_METHODS
from orc.orchestrator.cli.commands.service import create_token_command
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.auth import role_of_route
from orc.orchestrator.service.settings import Settings

REFERENCE = Path(__file__).parents[3] / "docs/reference/rest-api.md"
PUBLIC = {"/healthz", "/readyz", "/api/v1/login", "/api/v1/logout"}


def all_routes() -> list[tuple[str, str, Any]]:
    """(method, path, operation) of every route of the API."""
    paths = create_app(Settings()).openapi()["paths"]
    return [(method.upper(), path, operation) for path, of in paths.items() for method, operation in of.items()]


ROUTES = all_routes()
ROLE_OF_USER = {"eve": "viewer", "alan": "user", "ada": "admin"}


def _url(path: str) -> str:
    url = re.sub(r"\{(\w+)\}", lambda match: "digits-aaaaaa" if match[1] == "job_id" else "none", path)
    return f"{url}?a=none&b=none" if path.endswith("/diff") else url


def _ask(http: httpx.Client, method: str, path: str) -> int:
    if path.endswith("/stream"):
        with http.stream(method, _url(path)) as answer:
            return answer.status_code
    return http.request(method, _url(path), json={} if method not in SAFE_METHODS else None).status_code


def test_the_routes_are_found() -> None:
    assert {"/api/v1/jobs", "/api/v1/jobs/{job_id}/log/stream", "/api/v1/tokens", "/metrics"} <= {
        p for _, p, _ in ROUTES
    }


def test_the_reference_has_every_route_and_every_setting() -> None:
    page = REFERENCE.read_text()
    shown = [re.sub(r"\{\w+\}", "{}", row) for row in re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) [^`?]+)", page)]
    routes = [f"{method} {re.sub(r'{[^}]+}', '{}', path.removeprefix('/api/v1'))}" for method, path, _ in ROUTES]
    assert sorted(set(shown)) == sorted(routes)
    for name, field in Settings.model_fields.items():
        assert f"`{name}`" in page
        assert f"`ORC_SERVE_{name.upper()}`" in page
        if type(field.default) is int and field.default < 1 << 20:
            assert f"`ORC_SERVE_{name.upper()}` | {field.default} |" in page or name == "port"


def test_nothing_answers_without_a_token_but_what_is_public(running: Any) -> None:
    with running.http(None) as http:
        answers = {(method, path): _ask(http, method, path) for method, path, _ in ROUTES if path not in PUBLIC}
    assert set(answers.values()) == {401}, {k: v for k, v in answers.items() if v != 401}


def test_a_new_route_needs_a_token_unless_it_says_otherwise(running: Any) -> None:
    def endpoint() -> None: ...

    assert role_of_route(endpoint, "GET") == "viewer"
    assert role_of_route(endpoint, "POST") == "user"
    # Of the application itself, hidden routes included: static files and pages are the page's own.
    assert running.service is not None
    bare = [p for p in ("/docs", "/redoc", "/docs/oauth2-redirect") if httpx.get(running.url + p).status_code != 404]
    assert bare == []


@pytest.mark.parametrize("user", ROLE_OF_USER)
def test_each_role_reaches_what_it_may_and_nothing_else(running: Any, user: str) -> None:
    """Whoever is let in gets another answer than 401 and 403, be it that what is asked for does not exist."""
    ranks = {"viewer": 0, "user": 1, "admin": 2}
    wrong = {}
    with running.http(user) as http:
        for method, path, operation in ROUTES:
            if path in PUBLIC:
                continue
            needed = operation["x-orc-role"]
            status = _ask(http, method, path)
            # The job belongs to grace: alan may not change it, nor see its plan.
            owned = "{job_id}" in path and (method not in SAFE_METHODS or path.endswith("/plan")) and user != "ada"
            let_in = ranks[ROLE_OF_USER[user]] >= ranks[needed] and not owned
            if (status not in (401, 403)) != let_in:
                wrong[method, path] = status
    assert wrong == {}


def test_the_code_of_jobs_is_shown_to_their_owners_and_admins(running: Any) -> None:
    for user in ROLE_OF_USER:
        with running.http(user) as http:
            jobs = http.get("/api/v1/jobs").json()["jobs"]
            other = next(job for job in jobs if job["owner"] != user)
            own = [job["id"] for job in jobs if job["owner"] == user]
            asked = [http.get("/api/v1/diff", params=ids) for a in own[:1] for ids in ({"a": a, "b": other["id"]},)]
            asked += [http.get("/api/v1/diff", params={"a": other["id"], "b": other["id"]})]
        if ROLE_OF_USER[user] == "admin":
            assert [answer.status_code for answer in asked] == [200] * len(asked)
        else:
            assert {answer.status_code for answer in asked} == {403}
            assert "only its owner or an admin" in asked[0].json()["error"]["what"]


def test_a_token_made_by_rest_ends_when_one_of_the_command_would(running: Any) -> None:
    (command,) = (one for one in create_token_command.params if one.name == "expires")
    assert command.type.convert(command.default, command, None) == DEFAULT_EXPIRES_S
    with running.http() as admin:
        made = admin.post("/api/v1/tokens", json={"user": "linus"}).json()
        assert made["expires_at"] - made["created_at"] == DEFAULT_EXPIRES_S
        for_ever = admin.post("/api/v1/tokens", json={"user": "linus", "expires_s": None}).json()
    assert for_ever["expires_at"] is None


def test_a_token_is_shown_once_and_ends(running: Any) -> None:
    with running.http() as admin:
        made = admin.post("/api/v1/tokens", json={"user": "linus", "role": "viewer", "expires_s": 3600, "note": "x"})
        assert made.status_code == 201
        token, token_id = made.json()["token"], made.json()["id"]
        assert len(token) > 40
        bearer = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{running.url}/api/v1/me", headers=bearer).json()["user"] == "linus"
        listed = {one["id"]: one for one in admin.get("/api/v1/tokens").json()["tokens"]}
        assert listed[token_id]["last_used_at"] is not None
        assert token not in admin.get("/api/v1/tokens").text + admin.get("/api/v1/audit").text
        database = sqlite3.connect(running.state_dir / "ledger.db")
        assert token not in "\n".join(database.iterdump())
        database.close()
        assert admin.delete(f"/api/v1/tokens/{token_id}").json()["revoked_at"] is not None
        assert httpx.get(f"{running.url}/api/v1/me", headers=bearer).status_code == 401
        assert admin.delete("/api/v1/tokens/tok-none").status_code == 404
        actions = [(line["action"], line["subject"]) for line in admin.get("/api/v1/audit").json()["lines"]]
    assert [("revoke_token", token_id), ("create_token", token_id)] == [a for a in actions if a[1] == token_id]


@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_a_token_that_has_ended_opens_no_door(running: Any, how: str) -> None:
    """Not as a header, not as a cookie, not for a session, and not where bodies are read before a route is asked."""
    token, token_id = running.token(how, "admin", **({"expires_s": -1.0} if how == "expired" else {}))
    if how == "revoked":
        with running.http() as admin:
            assert admin.get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 200
            assert admin.delete(f"/api/v1/tokens/{token_id}").status_code == 200
    asked = [(method, path) for method, path, _ in ROUTES if path not in PUBLIC]
    for carried in ({"Authorization": f"Bearer {token}"}, {"Cookie": f"orc_session={token}", "X-Orc-Request": "1"}):
        with httpx.Client(base_url=running.url, headers=carried, timeout=60) as http:
            answers = {route: _ask(http, *route) for route in asked}
            large = http.put("/api/v1/bundles/content", content=b"x" * (3 << 20)).status_code
        assert {*answers.values(), large} == {401}, {key: value for key, value in answers.items() if value != 401}
    login = httpx.post(f"{running.url}/api/v1/login", json={"token": token})
    assert (login.status_code, login.headers.get("set-cookie")) == (401, None)


@pytest.mark.parametrize("header", ["Bearer", "Bearer orc_x", "Basic Z3JhY2U6eA==", "orc_", "Bearer " + "a" * 5000])
def test_what_is_no_token_opens_nothing(running: Any, header: str) -> None:
    assert httpx.get(f"{running.url}/api/v1/me", headers={"Authorization": header}).status_code == 401


def test_a_session_of_a_browser_needs_the_header_for_changes(running: Any) -> None:
    with running.http(None) as browser:
        opened = browser.post("/api/v1/login", json={"token": running.tokens["ada"]})
        assert opened.status_code == 200
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert browser.get("/api/v1/me").json()["user"] == "ada"
        wanted = {"user": "linus", "role": "viewer"}
        assert browser.post("/api/v1/tokens", json=wanted).status_code == 403
        assert browser.post("/api/v1/tokens", json=wanted, headers={"X-Orc-Request": "1"}).status_code == 201
        browser.post("/api/v1/logout")
        assert browser.get("/api/v1/me").status_code == 401
        assert browser.post("/api/v1/login", json={"token": "orc_no"}).status_code == 401
        strange = {"Sec-Fetch-Site": "cross-site"}
        login = {"token": running.tokens["ada"]}
        assert browser.post("/api/v1/login", json=login, headers=strange).status_code == 403


def test_refused_changes_are_in_the_audit_log_with_who_sent_them(running: Any) -> None:
    began = time.time()
    with running.http("eve") as viewer:
        assert viewer.post("/api/v1/tokens", json={"user": "eve", "role": "admin"}).status_code == 403
    with running.http() as admin:
        (line, *_) = admin.get("/api/v1/audit", params={"user": "eve"}).json()["lines"]
    assert (line["action"], line["address"], line["data"]) == ("create_token", "127.0.0.1", {"status": 403})
    assert line["at"] >= began


def test_an_admin_sets_quotas_and_everybody_reads_them(running: Any) -> None:
    quota = {"scope": "user", "name": "grace", "resource": "gpus", "amount": 8.0}
    shown = {"quotas": [{**quota, "used": 0.0}]}
    with running.http() as admin, running.http("eve") as viewer:
        assert viewer.put("/api/v1/quotas", json=quota).status_code == 403
        assert admin.put("/api/v1/quotas", json=quota).json() == shown
        assert viewer.get("/api/v1/quotas").json() == shown
        assert admin.put("/api/v1/quotas", json={**quota, "amount": None}).json() == {"quotas": []}
        assert viewer.get("/api/v1/groups/none").status_code == 404
