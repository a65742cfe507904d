"""Each call of the API answers what its OpenAPI model says, and reads the same from a ledger and from a service."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from served_ledger import Served

from orc.launchers.backends.reports import PartitionReport, QueuedJob, QueueReport
from orc.launchers.spec import LoadedJob
from orc.orchestrator.api.call import CALLS, PREFIX, SAFE_METHODS, Digests, NewMember
from orc.orchestrator.api.session import Caller
from orc.orchestrator.clients.http_session import Request, Response
from orc.orchestrator.service.api import ROUTERS
from orc.orchestrator.service.auth import role_of_route
from orc.orchestrator.views import decode, encode

Project = Callable[..., LoadedJob]
# This machine has no queue; clusters are polled meanwhile; each plan has a new key.
NOT_COMPARED = {"read_queue", "list_clusters", "read_plan"}


def differences(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> list[str]:
    """The keys that *value*, at any depth, has beside those of its schema, or lacks."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for one in schema.get("anyOf", ()):
        if value is not None and one.get("type") != "null":
            return differences(value, one, schemas, where)
    if isinstance(value, list):
        return [key for item in value for key in differences(item, schema.get("items", {}), schemas, where)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    return [f"{where}.{key}" for key in value.keys() ^ known.keys()] + [
        one for key in value if key in known for one in differences(value[key], known[key], schemas, f"{where}.{key}")
    ]


@pytest.fixture
def document(served: Served) -> dict[str, Any]:
    return dict(httpx.get(f"{served.url}/openapi.json").json())


def test_each_call_answers_with_the_keys_of_its_model_and_no_others(
    served: Served, project: Project, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = project("raise SystemExit(1)\n")
    with served.client("ada") as client:
        job = client.submit(loaded)
        client.wait([job.id], timeout_s=120)
        digests = Digests(job.digests["code"])
        spec = loaded.spec.model_dump(mode="json")
        answers: dict[str, Any] = {}
        exchange = client.session.connections.exchange

        def heard(request: Request[Any]) -> Response:
            answers["last"] = response = exchange(request)
            return response

        monkeypatch.setattr(client.session.connections, "exchange", heard)

        def ask(name: str, *args: Any, **kwargs: Any) -> Any:
            result = CALLS[name](client.session, *args, **kwargs)
            answers[name] = json.loads(answers["last"].content)
            return result

        ask("submit_job", spec, digests, idempotency_key="a-key-of-a-job")
        copy = ask("resubmit_job", job.id, ["tags.of=copy"])
        group = ask("submit_group", "sweep", "tuned", [NewMember(0, digests, spec, parameters={"env.LR": "1"})])
        schedule = ask("create_schedule", spec, digests, "nightly", "0 3 * * *")
        ask("change_schedule", schedule.id, enabled=False)
        ask("change_tags", copy.id, {"best": "yes"})
        ask("cancel_job", copy.id, 0.0)
        ask("cancel_group", group.id, 0.0)
        client.wait([member.job.id for member in group.members], timeout_s=120)
        ask("retry_group", group.id)
        ask("retry_notifications", job.id)
        for name in (
            "list_jobs",
            "count_jobs",
            "list_groups",
            "list_schedules",
            "list_clusters",
            "list_notifications",
            "who_am_i",
        ):
            ask(name)
        for name in ("get_job", "list_events", "list_logs", "merge_logs", "read_metrics", "read_ranks", "read_plan"):
            ask(name, job.id)
        ask("resolve_job", "@last")
        ask("get_group", group.id, metrics=True)
        ask("diff_jobs", job.id, copy.id)
        ask("add_up_costs", by="job")
        ask("set_quota", "user", "eve", "gpus", 8.0)
        ask("list_quotas")
        ask("find_missing", ["0" * 64])
        token = ask("create_token", "joan", expires_s=None)
        assert token.expires_at is None
        ask("list_tokens")
        ask("revoke_token", token.id)
        ask("read_audit", limit=5)
        ask("delete_schedule", schedule.id)
        ask("set_quota", "user", "eve", "gpus")
    report = QueueReport(
        (PartitionReport("gpu", True, "up", 2, 1, 8, 4, None, ("gpu:a100:4",), (2,)),),
        (QueuedJob("orc-digits-k3f9a2-a1", "12", "PENDING", "gpu", 2),),
    )
    answers["read_queue"] = encode(report)
    assert decode(QueueReport, answers["read_queue"]) == report
    assert CALLS.keys() - answers.keys() == set()
    schemas = document["components"]["schemas"]
    for name, call in CALLS.items():
        operation = document["paths"][PREFIX + call.path][call.method.lower()]
        schema = operation["responses"][str(call.status)]["content"]["application/json"]["schema"]
        assert sorted(set(differences(answers[name], schema, schemas, name))) == []


def test_what_a_call_reads_is_the_same_from_a_ledger_and_from_a_service(served: Served, project: Project) -> None:
    with served.client("ada") as client, served.ledger() as ledger:
        job = client.submit(project("print('hello')\n"))
        client.wait([job.id], timeout_s=120)
        here = ledger.session.on_behalf_of(Caller("ada", "admin", client.me()["token_id"]))
        arguments = {
            "job_id": job.id, "ref": job.id, "a": job.id, "b": job.id, "limit": 1, "name": "local", "by": "user",
        }  # fmt: skip
        group = {"group_id": client.groups(limit=1)[0].id} if client.groups(limit=1) else {}
        for name, call in CALLS.items():
            needed = {one.name: {**arguments, **group}.get(one.name) for one in call.parameters if one.place == "path"}
            needed |= {one.name: arguments[one.name] for one in call.parameters if one.name in ("ref", "a", "b", "by")}
            if call.method in SAFE_METHODS and None not in needed.values() and name not in NOT_COMPARED:
                assert call(client.session, **needed) == call(here, **needed), name


def test_each_call_has_its_route_with_the_role_that_it_names() -> None:
    routes = {route.name: route for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    assert CALLS.keys() <= routes.keys()
    for name, call in CALLS.items():
        assert (routes[name].path, routes[name].methods) == (call.path, {call.method})
        assert role_of_route(routes[name].endpoint, call.method) == call.role
    assert {name for name, call in CALLS.items() if call.role == "admin"} == {
        *("list_tokens", "create_token", "revoke_token", "read_audit", "set_quota"),
    }
