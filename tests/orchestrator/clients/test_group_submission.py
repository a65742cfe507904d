"""Groups and schedules through a service: one for one key, whose they are, and every member checked like a job."""

from __future__ import annotations

import io
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from served_ledger import Served, requests_of

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError, RenderError, SpecError
from orc.launchers.spec import LoadedJob
from orc.launchers.spec.groups import LoadedGroup, load_jobs
from orc.orchestrator.api.call import PREFIX
from orc.orchestrator.clients.errors import NotAllowed
from orc.orchestrator.clients.http_session import Request, new_key
from orc.orchestrator.clients.service import ServiceClient
from orc.orchestrator.ledger import schedules as schedule_rows
from orc.orchestrator.ledger.history import export
from orc.orchestrator.views import GroupView, ScheduleView, decode

Project = Callable[..., LoadedJob]
SECRET = "hunter2-of-a-group"


def post(path: str, body: Any, key: str | None = None) -> Request[GroupView]:
    headers = {} if key is None else {"Idempotency-Key": key}
    return Request("POST", PREFIX + path, lambda reply: decode(GroupView, reply.json), body=body, headers=headers)


def code_of(client: ServiceClient, loaded: LoadedJob) -> dict[str, str]:
    view = client.submit(loaded)
    client.wait([view.id], timeout_s=120)
    return {"code": view.digests["code"]}


def body(loaded: LoadedJob, digests: dict[str, str], *members: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A sweep of *members*, two of them unless given."""
    wanted = [{"index": i, "digests": digests, **one} for i, one in enumerate(members or ({}, {}))]
    return {"kind": "sweep", "name": "tuned", "shared": loaded.spec.model_dump(mode="json"), "members": wanted, **keys}


def test_the_same_key_is_the_same_group_and_the_same_retry(served: Served, project: Project) -> None:
    loaded = project("raise SystemExit(1)\n")
    with served.client() as client, served.client() as another, served.client("alan") as alan:
        request = post("/groups", body(loaded, code_of(client, loaded)), "key-of-a-group")
        with ThreadPoolExecutor(4) as pool:
            views = list(pool.map(lambda one: one.ask(request), [client, another] * 3))
        made = views[0]
        assert {view.id for view in views} == {made.id}
        assert (made.owner, [member.job.owner for member in made.members]) == ("grace", ["grace"] * 2)
        code_of(alan, loaded)  # who has the code himself may ask for it by digest
        assert alan.ask(request).id != made.id
        client.wait([member.job.id for member in made.members], timeout_s=120)
        assert len(client.jobs(group=made.id)) == 2
        retry = post(f"/groups/{made.id}/retry", {}, "key-of-a-retry")
        with ThreadPoolExecutor(4) as pool:
            again = list(pool.map(lambda one: one.ask(retry), [client, another] * 2))
        client.wait([member.job.id for member in again[0].members], timeout_s=120)
        assert [member.submissions for member in client.ask(retry).members] == [2, 2]
        when = {"name": "once", "cron": "0 3 * * *", "spec": loaded.spec.model_dump(mode="json")}
        for _ in range(2):
            client.ask(post_schedule({**when, "digests": request.body["members"][0]["digests"]}, "key-of-a-schedule"))
        (schedule,) = [one for one in client.schedules() if one.name == "once"]
        client.delete_schedule(schedule.id)


def post_schedule(body: Any, key: str) -> Request[Any]:
    return Request(
        "POST",
        f"{PREFIX}/schedules",
        lambda reply: decode(ScheduleView, reply.json),
        body=body,
        headers={"Idempotency-Key": key},
    )


def test_groups_and_schedules_are_changed_by_their_owner_and_by_admins(served: Served, project: Project) -> None:
    loaded = project("raise SystemExit(1)\n")
    with served.client() as grace, served.client("alan") as alan, served.client("ada") as ada:
        made = grace.ask(post("/groups", body(loaded, code_of(grace, loaded))))
        schedule = grace.create_schedule(loaded, "0 3 * * *")
        grace.wait([member.job.id for member in made.members], timeout_s=120)
        assert alan.group(made.id).owner == "grace"
        assert replace(schedule, source="") in alan.schedules()  # where grace's job file lies is hers
        for name in ("alan", "eve"):
            with served.client(name) as other:
                for change in (
                    lambda: other.cancel_group(made.id),
                    lambda: other.retry_group(made.id),
                    lambda: other.enable_schedule(schedule.id, enabled=False),
                    lambda: other.delete_schedule(schedule.id),
                ):
                    with pytest.raises(NotAllowed):
                        change()
        for odd in ("@last", made.id[:-1], made.members[0].job.id):  # reads take them, changes do not
            with pytest.raises(LaunchError, match="no such group"):
                grace.cancel_group(odd)
        assert ada.enable_schedule(schedule.id, enabled=False).owner == "grace"
        assert {member.job.owner for member in ada.retry_group(made.id).members} == {"ada"}
        with pytest.raises(NotAllowed, match="ada has a job in"):  # which is not hers to end
            grace.cancel_group(made.id)
        assert ada.cancel_group(made.id).id == made.id
        grace.delete_schedule(schedule.id)
        lines = ada.ask(Request("GET", f"{PREFIX}/audit", lambda reply: reply.json["lines"]))
    written = {(line["action"], line["subject"], line["user"], line["data"]["status"]) for line in lines}
    assert {
        ("submit_group", made.id, "grace", 200),
        ("retry_group", made.id, "ada", 200),
        ("cancel_group", made.id, "alan", 403),
        ("create_schedule", schedule.id, "grace", 200),
        ("delete_schedule", schedule.id, "eve", 403),
    } <= written


def test_every_member_passes_the_checks_of_a_job(
    served: Served, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICES_OWN", "of the service")  # which runs in this process
    loaded = project("import os\nopen(os.environ.get('ORC_OUTPUT_MODEL', os.devnull), 'w').write('x')\n")
    theirs_file = project(
        "open(__import__('os').environ['ORC_OUTPUT_MODEL'], 'w').write('x')\n", outputs={"model": "m"}
    )
    with served.client("alan") as alan, served.client() as client:
        theirs = alan.submit(theirs_file)
        digests = code_of(client, loaded)
        before = [row.id for row in client.jobs(limit=None)]
        stages = [{"stage": "a", "spec": {"depends_on": ["b"]}}, {"stage": "b", "spec": {"depends_on": ["a"]}}]
        refused: list[tuple[type[LaunchError], str, dict[str, Any]]] = [
            (
                NotAllowed,
                "belongs to alan",
                body(loaded, digests, {}, {"spec": {"inputs": {"m": f"{theirs.id}.model"}}}),
            ),
            (RenderError, "no account on the cluster ours", body(loaded, digests, {}, {"spec": {"cluster": "ours"}})),
            (SpecError, "secret SERVICES_OWN", body(loaded, digests, {}, {"spec": {"secrets": ["SERVICES_OWN"]}})),
            (SpecError, "is no secret of these jobs", body(loaded, digests, secrets={"PATH": "x"})),
            (SpecError, "no sweep or array", body(loaded, digests, {}, {"spec": {"array": "5"}})),
            (SpecError, "the same index", body(loaded, digests, {}, {"index": 0})),
            (SpecError, "are no stages", body(loaded, digests, {}, {"stage": "a"})),
            (SpecError, "a stage of its own", body(loaded, digests, kind="pipeline")),
            (SpecError, "wait for each other", body(loaded, digests, *stages, kind="pipeline")),
            (SpecError, "nothing.py", body(loaded, digests, {}, {"spec": {"script": "nothing.py"}})),
            (SpecError, "printable", body(loaded, digests, name="a\x1b[2J")),
            (
                LaunchError,
                "looks up no secrets",
                body(loaded, digests, {}, {"spec": {"notify": ["slack:${secret:HOME}"]}}),
            ),
        ]
        for error, what, wanted in refused:
            with pytest.raises(error) as raised:
                client.ask(post("/groups", wanted))
            assert what in str(raised.value)
        spec = {**loaded.spec.model_dump(mode="json"), "secrets": ["SERVICES_OWN"]}
        schedule = {"name": "x", "cron": "* * * * *", "spec": spec, "digests": digests}
        with pytest.raises(SpecError, match="secret SERVICES_OWN"):
            client.ask(post_schedule(schedule, new_key()))
        assert [row.id for row in client.jobs(limit=None)] == before
        assert client.schedules() == []


def test_secrets_of_a_schedule_are_sealed_and_reach_its_jobs(
    served: Served, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    with served.client() as client, served.ledger() as ledger:
        made = client.create_schedule(
            project("import os\nprint(len(os.environ['API_KEY']))\n", secrets=["API_KEY"]), "0 3 1 1 *"
        )
        monkeypatch.delenv("API_KEY")
        dump = "\n".join(sqlite3.connect(f"file:{served.state_dir / 'ledger.db'}?mode=ro", uri=True).iterdump())
        assert made.id in dump
        assert SECRET not in dump
        assert not any(made.id in path.name for path in (served.state_dir / "job-secrets").glob("*"))
        file = io.StringIO()
        export(ledger.workspace.ledger, file)
        assert '\\"sealed\\":\\"-\\"' in file.getvalue().replace(" ", "")
        with ledger.workspace.ledger.transaction() as tx:  # it is due now
            record = schedule_rows.find(tx.connection, made.id)
            assert record is not None
            schedule_rows.update(tx.connection, record, next_at=tx.now - 1.0)
        deadline = time.monotonic() + 60
        while not (rows := client.jobs(group=made.id)):
            ledger.refresh()
            assert time.monotonic() < deadline
        (done,) = client.wait([rows[0].id], timeout_s=120)
        assert (done.state, done.owner) == ("SUCCEEDED", "grace"), done.reason
        data = b"".join(chunk.data for chunk in client.read_log(done.id, LogSelector(rank=0)))
        assert data == f"{len(SECRET)}\n".encode()
        assert [member.job.id for member in client.group(made.id).members] == [done.id]
        client.delete_schedule(made.id)


def test_each_snapshot_of_a_group_is_uploaded_once(served: Served, project: Project) -> None:
    directory = project("print('once')\n").base_dir
    (directory / "other").mkdir()
    (directory / "other" / "train.py").write_text("print('other')\n")
    (directory / "chain.yaml").write_text(
        "{name: chain, launcher: python, script: train.py, "
        "jobs: {a: {}, b: {}, c: {workdir: other}, d: {workdir: other}}}"
    )
    loaded = load_jobs(directory / "chain.yaml")
    assert isinstance(loaded, LoadedGroup)
    with served.client() as client:
        sent = requests_of(client)
        first = client.submit_group(loaded)
        trees = [one for one in sent if one.startswith("PUT /bundles/trees/")]
        assert len(trees) == len(set(trees)) == 2
        sent.clear()
        second = client.submit_group(loaded)
        assert sent == ["POST /groups"]
        client.wait([member.job.id for view in (first, second) for member in view.members], timeout_s=120)
        assert client.group(second.id).counts == {"SUCCEEDED": 4}
