"""Who sees what: a canary of every kind of thing, and every route asked by everybody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from running_service import LoggingBackend, Running, make_running

from orc.launchers.plan import PlanFile
from orc.launchers.spec import load_job
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.api.call import RIGHTS, SAFE_METHODS, Kind, Reader, reader_of, shown_kinds
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import polls
from orc.orchestrator.ledger.lifecycle import Event
from orc.orchestrator.ledger.lifecycle import Kind as EventKind
from orc.orchestrator.service.api import ROUTERS, TOP_ROUTERS
from orc.orchestrator.service.app import create_app
from orc.orchestrator.service.settings import Settings
from orc.orchestrator.service.web import pages

CANARIES: Mapping[Kind, tuple[str, ...]] = {
    Kind.STATE: ("canary-env", "canary-tag"),
    Kind.LOGS: ("canary-log",),
    Kind.METRICS: ("canary-metric",),
    Kind.CODE: ("canary-code",),
    Kind.PLAN: ("canary-plan",),
    Kind.PLACES: ("canary-source", "canary-receiver", "canary-hook"),
    Kind.ACCOUNTS: ("canary-note", "canary-poll"),
}
NOBODY = ("canary-secret",)
READERS = {"grace": Reader.OWNER, "alan": Reader.SUBMITTER, "eve": Reader.VIEWER, "ada": Reader.ADMIN}
# What a route shows of which kinds, as a person would say it; a route that is not here fails the test below.
PUBLIC = {"read_health", "read_readiness", "login", "logout"}
NONE = frozenset[Kind]()
SHOWN: dict[str, Set[Kind]] = {
    "list_jobs": {Kind.STATE},
    "resolve_job": NONE,
    "get_job": {Kind.STATE, Kind.PLACES},
    "list_events": {Kind.PLACES},
    "stream_events": {Kind.PLACES},
    "read_metrics": {Kind.METRICS},
    "read_plan": {Kind.PLAN},
    "read_ranks": NONE,
    "count_jobs": NONE,
    "list_logs": NONE,
    "merge_logs": {Kind.LOGS},
    "read_log": {Kind.LOGS},
    "stream_log": {Kind.LOGS},
    "find_in_log": {Kind.LOGS},
    "list_groups": NONE,  # how many are in which state
    "get_group": {Kind.STATE, Kind.METRICS},
    "list_schedules": {Kind.PLACES},
    "list_notifications": {Kind.PLACES},
    "diff_jobs": {Kind.CODE, Kind.METRICS, Kind.PLACES, Kind.STATE},
    "add_up_costs": NONE,
    "list_quotas": NONE,
    "list_clusters": {Kind.ACCOUNTS},
    "read_queue": NONE,
    "read_service_metrics": NONE,
    "who_am_i": NONE,
    "list_tokens": {Kind.ACCOUNTS},
    "read_audit": NONE,
    # What changes something answers with the thing; nobody else gets so far.
    **dict.fromkeys(("find_missing", "receive_contents", "receive_tree", "submit_job", "submit_group"), NONE),
    **dict.fromkeys(("resubmit_job", "cancel_job", "change_tags", "cancel_group", "retry_group"), NONE),
    **dict.fromkeys(("create_schedule", "change_schedule", "delete_schedule", "retry_notifications"), NONE),
    **dict.fromkeys(("create_token", "revoke_token", "set_quota"), NONE),
}


def routes() -> list[tuple[str, str, Any]]:
    """(method, path, endpoint) of every route of the API."""
    paths = create_app(Settings()).openapi()["paths"]
    every = [route for router in (*ROUTERS, *TOP_ROUTERS) for route in router.routes]
    endpoints = {route.name: route.endpoint for route in every}
    found = [
        (method.upper(), path, endpoints.pop(operation["operationId"]))
        for path, of in paths.items()
        for method, operation in of.items()
    ]
    assert not endpoints, "a route that no description has"
    return found


ROUTES = routes()


class Showing(LoggingBackend):
    """A cluster whose plans have a canary."""

    def render(self, *args: Any, **values: Any) -> Any:
        plan = super().render(*args, **values)
        return replace(plan, files=(*plan.files, PlanFile("/home/account", "canary-plan")))


class Holding(Running):
    @property
    def backend(self) -> Showing:
        return Showing(self.state_dir / "fake")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    """A service in which grace has a job, a group and a schedule."""
    home = tmp_path_factory.mktemp("rights")
    made = make_running(home / "state", requests_per_minute=1_000_000, failed_logins_per_minute=1_000_000)
    made.__class__ = Holding
    project = home / "canary-source"
    project.mkdir()
    spec = {
        "name": "j",
        "cluster": "local",
        "script": "train.py",
        "env": {"A": "canary-env"},
        "tags": {"a": "canary-tag"},
    }
    spec["notify"] = [
        {"to": to, "on": "failure"} for to in ("email:canary-receiver@a.org", "https://a.org/canary-hook")
    ]
    (project / "job.yaml").write_text(json.dumps(spec | {"secrets": ["A_SECRET"]}))
    (project / "sweep.yaml").write_text(json.dumps(spec | {"name": "many", "sweep": {"grid": {"args.x": [1, 2]}}}))
    names = {}
    with pytest.MonkeyPatch.context() as patched, made.open_client() as client:
        patched.setenv("A_SECRET", "canary-secret")
        patched.setenv("ORC_CONFIG_DIR", str(home))
        (home / "notifications.yaml").write_text("mail: {host: mail.a.org, from: orc@a.org}\n")
        client.workspace.user = "grace"
        (project / "train.py").write_text("print('canary-code')\n")
        names["job_id"] = client.submit(load_job(project / "job.yaml")).id
        (project / "train.py").write_text("print('canary-code, too')\n")
        other = ["env.A=canary-env, too", "notify=https://a.org/canary-hook/2"]
        names["other"] = client.submit(load_job(project / "job.yaml", other)).id
        names["group_id"] = client.submit_group(load_jobs(project / "sweep.yaml")).id
        schedule = client.create_schedule(load_job(project / "job.yaml"), "0 3 * * *", name="nightly")
        names["schedule_id"] = schedule.id
        _fail(client, names["job_id"])
        names["last_event"] = str(client.workspace.ledger.last_event_id())
        with client.workspace.ledger.database.write() as connection:
            assert polls.take_lease(connection, "local", "me", 0.0, 60.0, "linus")
            assert polls.record(connection, polls.ClusterPoll("local", error="canary-poll", account="linus"), "me")
    made.token("linus", "user", note="canary-note")
    made.log(f"orc-{names['job_id']}-a1").write_text("canary-log\n")
    for job in (names["job_id"], names["other"], *_members(made, names["group_id"])):
        file = made.state_dir / "fake" / "files" / f"orc-{job}" / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"step": 1, "canary-metric": 1}) + "\n")
    made.start()
    yield made, names
    made.stop()


def _fail(client: Client, job_id: str) -> None:
    with client.workspace.ledger.transaction() as tx:
        record = tx.find(job_id)
        assert record is not None
        tx.record(record, Event(EventKind.FAILED, 1, {"cause": "crash"}), Event(EventKind.JOB_FAILED))


def _members(made: Running, group: str) -> list[str]:
    with made.open_client() as client:
        return [member.job.id for member in client.group(group).members]


QUERIES: dict[str, list[dict[str, Any]]] = {
    "resolve_job": [{"ref": "{job_id}"}],
    "diff_jobs": [{"a": "{job_id}", "b": "{other}"}],
    "find_in_log": [{"q": "canary"}],
    "read_metrics": [{}, {"points": 10}],
    "get_group": [{"metrics": "true"}],
    "add_up_costs": [{"by": by} for by in ("job", "user", "project", "cluster", "day", "tag:a")],
    "stream_events": [{"after": 0}],
}


def _answers(http: httpx.Client, names: Mapping[str, str], method: str, path: str, endpoint: Any) -> str:
    """All that a route answers to a user."""
    fills = {**names, "name": "local", "digest": "0" * 64, "token_id": "none"}
    url = re.sub(r"\{(\w+)\}", lambda match: fills[match[1]], path)
    texts = []
    for query in QUERIES.get(endpoint.__name__, [{}]):
        params = {key: str(value).format(**names) for key, value in query.items()}
        if not path.endswith("/stream"):
            body = {} if method not in SAFE_METHODS else None
            texts.append(http.request(method, url, params=params, json=body).text)
            continue
        with http.stream(method, url, params=params) as answer:
            ended = False
            for line in answer.iter_lines():
                texts.append(line)
                if ended and line.startswith("data:"):
                    break
                ended = ended or line == f"id: {names['last_event']}" or (line.startswith("id:") and "job_id" in path)
    return "\n".join(texts)


def _seen(text: str) -> set[Kind]:
    assert not [canary for canary in NOBODY if canary in text]
    return {kind for kind, canaries in CANARIES.items() if any(canary in text for canary in canaries)}


def test_every_route_says_what_it_shows() -> None:
    names = {endpoint.__name__ for _, _, endpoint in ROUTES}
    assert names == SHOWN.keys() | PUBLIC
    silent = [e.__name__ for _, _, e in ROUTES if e.__name__ not in PUBLIC and not hasattr(e, "orc_shows")]
    assert silent == []
    assert shown_kinds(lambda: None) == (Kind.ACCOUNTS,)  # a new one that says nothing is for admins


def test_the_table_has_every_kind_and_an_admin_in_it() -> None:
    assert RIGHTS.keys() == set(Kind)
    assert all(Reader.ADMIN in readers for readers in RIGHTS.values())
    assert reader_of("grace", "viewer", "grace") is Reader.OWNER
    assert reader_of("", "user", "") is Reader.SUBMITTER  # what belongs to nobody is nobody's own


@pytest.mark.parametrize("user", READERS)
def test_each_route_shows_to_each_reader_what_the_table_has(service: tuple[Running, dict[str, str]], user: str) -> None:
    running, names = service
    allowed = {kind for kind, readers in RIGHTS.items() if READERS[user] in readers}
    wrong = {}
    with running.http(user) as http:
        for method, path, endpoint in ROUTES:
            if method not in SAFE_METHODS and READERS[user] in RIGHTS[Kind.CODE]:
                continue  # it would be done
            seen = _seen(_answers(http, names, method, path, endpoint))
            expected = SHOWN.get(endpoint.__name__, NONE) & allowed
            if not set(shown_kinds(endpoint)) <= allowed and endpoint.__name__ not in PUBLIC:
                expected = NONE  # there is no answer
            if seen != expected:
                wrong[endpoint.__name__] = (sorted(seen), sorted(expected))
    assert wrong == {}


def test_an_owner_sees_all_of_a_job_and_nobody_sees_a_secret(service: tuple[Running, dict[str, str]]) -> None:
    running, names = service
    for user, reader in READERS.items():
        with running.http(user) as http:
            text = "\n".join(_answers(http, names, m, p, e) for m, p, e in ROUTES if m in SAFE_METHODS)
        expected = {c for kind, canaries in CANARIES.items() if reader in RIGHTS[kind] for c in canaries}
        assert {c for canaries in CANARIES.values() for c in canaries if c in text} == expected


def test_what_is_refused_says_whose_it_is(service: tuple[Running, dict[str, str]]) -> None:
    running, names = service
    with running.http("alan") as http:
        refused = http.get(f"/api/v1/jobs/{names['job_id']}/plan")
    assert refused.status_code == 403
    what = f"{names['job_id']} belongs to grace: only its owner or an admin may read its plan"
    assert refused.json()["error"]["what"] == what


@pytest.mark.parametrize("user", ["alan", "ada"])
def test_a_digest_is_no_right_to_what_it_names(service: tuple[Running, dict[str, str]], user: str) -> None:
    """Neither for another submitter nor for an admin: to both it is as if it were not there."""
    running, names = service
    with running.http(user) as http:
        digests = http.get(f"/api/v1/jobs/{names['job_id']}").json()["digests"]
        new = {"spec": {"name": "j", "cluster": "local", "script": "train.py"}, "digests": {"code": digests["code"]}}
        refused = http.post("/api/v1/jobs", json=new)
        assert (refused.status_code, refused.json()["missing"]) == (409, [digests["code"]])
        nowhere = http.post("/api/v1/jobs", json=new | {"digests": {"code": "0" * 64}})
        assert nowhere.json()["error"] == refused.json()["error"]


def test_pages_and_the_description_hold_no_data(service: tuple[Running, dict[str, str]]) -> None:
    running, names = service
    paths = [route.path for route in pages.router.routes if isinstance(route, APIRoute)]
    assert len(paths) == len(pages.router.routes)
    for page in (*(path.format(**names) for path in paths), "/openapi.json"):
        answer = httpx.get(running.url + page)
        assert answer.status_code == 200
        assert _seen(answer.text) == set(), page


def test_the_code_of_the_service_has_no_second_table() -> None:
    """Rights are asked of the table: no route decides by a role of its own."""
    api = Path(create_app.__globals__["__file__"]).parent / "api"
    own = [
        path.name
        for path in api.glob("*.py")
        if re.search(r"principal\.role\b|principal\.user (==|!=)", path.read_text())
    ]
    assert own == []
