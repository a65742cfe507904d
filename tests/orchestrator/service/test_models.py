"""What is sent is what OpenAPI says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_service import Running, make_running

from orc.launchers.backends.base import Phase
from orc.launchers.spec import load_job
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.clients.service import ServiceClient
from orc.orchestrator.workspace import login_name


def _undeclared(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> list[str]:
    """Return the keys of *value*, at any depth, that its schema does not have."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", ()):
        if value is not None and one.get("type") != "null":
            return _undeclared(value, one, schemas, where)
    if isinstance(value, list):
        return [key for item in value for key in _undeclared(item, schema.get("items", {}), schemas, where)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    found = [f"{where}.{key}" for key in value if key not in known]
    return found + [
        one for key in value if key in known for one in _undeclared(value[key], known[key], schemas, f"{where}.{key}")
    ]


class Answers:
    """ASGI middleware: keeps the JSON that routes answer with, by operation."""

    def __init__(self, app: Any, kept: list[tuple[str, str, int, Any]]) -> None:
        self._app, self._kept = app, kept

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, kind, body = 0, "", b""

        async def send_on(message: Any) -> None:
            nonlocal status, kind, body
            if message["type"] == "http.response.start":
                status, kind = message["status"], dict(message["headers"]).get(b"content-type", b"").decode()
            elif kind == "application/json":
                body += message.get("body", b"")
                if not message.get("more_body"):
                    self._kept.append((scope["method"], scope["path"], status, json.loads(body)))
            await send(message)

        await self._app(scope, receive, send_on)


NO_JSON = {"read_log", "read_service_metrics"}
NO_QUEUE = {"read_queue"}  # no cluster here has one, and its rows are those of `orc queue --json`


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, list[tuple[str, str, int, Any]]]]:
    """A service that was asked for everything, and what it has answered."""
    home = tmp_path_factory.mktemp("models")
    made = make_running(home / "state", requests_per_minute=1_000_000)
    kept: list[tuple[str, str, int, Any]] = []
    made.prepare = lambda app: app.add_middleware(Answers, kept=kept)
    made.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ORC_CONFIG_DIR", str(home))
        (home / "notifications.yaml").write_text("mail: {host: mail.a.org, from: orc@a.org}\nallow: {mail: [b.org]}\n")
        (home / "train.py").write_text("1\n")
        spec = {
            "name": "j",
            "cluster": "local",
            "script": "train.py",
            "notify": [{"to": "email:a@b.org", "on": "failure"}],
        }
        (home / "job.yaml").write_text(json.dumps(spec))
        (home / "sweep.yaml").write_text(json.dumps(spec | {"sweep": {"grid": {"args.x": [1, 2]}}}))
        made.tokens["ada"] = made.token(login_name(), "admin")[0]  # whose jobs run as the service
        with ServiceClient(made.url, made.tokens["ada"]) as client:
            ask_for_everything(made, client, home)
    yield made, kept
    made.stop()


def ask_for_everything(made: Running, client: ServiceClient, home: Path) -> None:
    job = client.submit(load_job(home / "job.yaml")).id
    again = client.resubmit(job, overrides=["name=k"]).id
    made.log(f"orc-{job}-a1").write_text("hello\n")
    measured = made.state_dir / "fake" / "files" / f"orc-{job}" / "metrics.jsonl"
    measured.parent.mkdir(parents=True)
    measured.write_text('{"step": 1, "loss": 2}\n')
    measured.with_name("ranks.json").write_text('{"at": 1, "ranks": {"0": {"step": 1}}}')
    group = client.submit_group(load_jobs(home / "sweep.yaml")).id
    schedule = client.create_schedule(load_job(home / "job.yaml"), "0 3 * * *").id
    made.backend.set(f"orc-{again}-a1", Phase.FAILED, cause="crash", reason="r")
    with made.open_client() as local:
        local.refresh()
    with made.http() as http:
        for path in ("healthz", "readyz"):
            http.get(f"/{path}")
        token = http.post("/api/v1/tokens", json={"user": "linus"}).json()["id"]
        http.delete(f"/api/v1/tokens/{token}")
        http.put("/api/v1/quotas", json={"scope": "user", "name": "ada", "resource": "jobs", "amount": 9})
        for path in (
            "me",
            "jobs",
            "job-counts",
            "clusters",
            "clusters/local/queue",
            "tokens",
            "audit",
            "quotas",
            "schedules",
        ):
            http.get(f"/api/v1/{path}")
        for path in (
            "",
            "/events",
            "/logs",
            "/metrics",
            "/metrics?points=5",
            "/ranks",
            "/merged-log",
            "/plan",
            "/log/search?q=h",
        ):
            http.get(f"/api/v1/jobs/{job}{path}")
        for path in ("notifications", "costs", "groups", f"groups/{group}?metrics=true", f"resolve?ref={job}"):
            http.get(f"/api/v1/{path}")
        http.get("/api/v1/diff", params={"a": job, "b": again})
        http.patch(f"/api/v1/jobs/{job}/tags", json={"a": "b"})
        http.post(f"/api/v1/jobs/{again}/notifications/retry")
        http.patch(f"/api/v1/schedules/{schedule}", json={"enabled": False})
        http.delete(f"/api/v1/schedules/{schedule}")
        http.post(f"/api/v1/groups/{group}/cancel", json={})
        with made.open_client() as local:
            local.refresh()
        http.post(f"/api/v1/groups/{group}/retry", json={})
        http.post(f"/api/v1/jobs/{job}/cancel", json={})
        http.post("/api/v1/bundles/missing", json={"hashes": []})
        http.post("/api/v1/login", json={"token": made.tokens["ada"]})
        http.post("/api/v1/logout")


def test_every_answer_of_every_route_has_the_fields_of_its_model_and_no_others(
    answers: tuple[Running, list[tuple[str, str, int, Any]]],
) -> None:
    running, kept = answers
    document = httpx.get(f"{running.url}/openapi.json", timeout=60).json()
    schemas = document["components"]["schemas"]
    of_path = {re.compile(re.sub(r"\{\w+\}", "[^/]+", path)): methods for path, methods in document["paths"].items()}
    wrong, asked = [], set()
    for method, path, status, value in kept:
        if status >= 300 or path == "/openapi.json":
            continue
        (operation,) = (methods[method.lower()] for of, methods in of_path.items() if of.fullmatch(path))
        asked.add(operation["operationId"])
        schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
        wrong += _undeclared(value, schema, schemas, operation["operationId"])
        wrong += _missing(value, schema, schemas, operation["operationId"])
    assert sorted(set(wrong)) == []
    every = {one["operationId"]: path for path, of in document["paths"].items() for one in of.values()}
    assert asked == {
        name for name, path in every.items() if name not in NO_JSON | NO_QUEUE and not path.endswith("/stream")
    }


def _missing(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> list[str]:
    """Return the keys that a schema requires, at any depth, and *value* does not have."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if isinstance(value, list):
        return [key for item in value for key in _missing(item, schema.get("items", {}), schemas, where)]
    if not isinstance(value, dict):
        return []
    found = [f"{where}: no {key}" for key in schema.get("required", ()) if key not in value]
    known = schema.get("properties", {})
    return found + [
        one for key in value if key in known for one in _missing(value[key], known[key], schemas, f"{where}.{key}")
    ]
