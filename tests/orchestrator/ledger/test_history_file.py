"""Export and import: everything that makes history arrives, once, in whatever database, or nothing does."""

from __future__ import annotations

import io
import json
import re

import pytest
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.engine import queueing
from orc.orchestrator.engine.queueing import Quota
from orc.orchestrator.ledger import audit, groups, schedules, schema, tokens
from orc.orchestrator.ledger.database import HEAD, insert
from orc.orchestrator.ledger.groups import Dependency, GroupRecord
from orc.orchestrator.ledger.history import TABLES, InvalidImport, export, import_history, live_work
from orc.orchestrator.ledger.lifecycle import Event, Kind, fold
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.prune import PruneRule, prune
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.schedules import ScheduleRecord
from orc.orchestrator.ledger.store import JobFilter, Ledger
from orc.orchestrator.ledger.tokens import TokenRecord


def fill(ledger, clock):
    """Something in every table."""
    with ledger.transaction() as tx:
        groups.create(tx.connection, GroupRecord("g", "sweep", "lr", "ann", tx.now, 2, {"lr": [1]}))
        for name, days in (("pruned", 90), ("ended", 2), ("live", 1)):
            tx.now = clock.now - days * 86400.25
            job = NewJob(
                name, "dé", "lab", "fake", "f", {"n": 1}, {"code": "c"}, {"t": "ü"}, "o", "ann", "p", 2, "g", 1
            )
            made = create_prepared(tx, job, f"orc-{name}-a1", "plan", "me", tx.now + 300, Placement(("n1", "n2"), 2))
            if name != "live":
                ended = (Event(Kind.FAILED, 1), Event(Kind.JOB_FAILED))
                tx.record(
                    made, *ended, job_set={"ended_at": tx.now}, failed_hosts=["n1"], attempt_set={"exit": {"c": 1}}
                )
        groups.add_dependencies(tx.connection, [Dependency("live", "ended", "any")])
        schedules.create(
            tx.connection,
            ScheduleRecord("s", "nightly", "ann", "0 3 * * *", "UTC", True, 1.5, None, None, {}, {}, "f"),
        )
        queueing.put_quota(tx.connection, Quota("user", "ann", "gpus", 4.0))
        tokens.create(tx.connection, TokenRecord("t-1", "ann", "admin", "", 1.0), "hash-of-a-token")
        insert(tx.connection, "sealed_secrets", {"job_id": "live", "sealed": "sealed-text", "at": 1.0})
        for i in range(2):
            audit.append(tx.connection, at=1.5, user="ann", action="cancel", subject=str(i), token_id=None)
    ledger.note_seen(["live"])


@pytest.fixture
def source(tmp_path, clock):
    (tmp_path / "source").mkdir()
    made = Ledger(open_database(tmp_path / "source"), clock)
    fill(made, clock)
    with made.transaction() as tx:  # as if the group had been empty then
        tx.connection.execute("UPDATE jobs SET group_id = NULL WHERE id = 'pruned'")
    assert prune(made, PruneRule(clock.now - 30 * 86400)).jobs == 1
    yield made
    made.close()


def text(ledger):
    file = io.StringIO()
    export(ledger, file)
    return file.getvalue()


def content(exported):
    """The rows, without the numbers that each ledger gives."""
    rows = [json.loads(line) for line in exported.splitlines()[1:]]
    for row in rows[:-1]:
        if row[0] in ("events", "audit"):
            row[1].pop("id")
        if row[0] == "schedules":
            row[1]["enabled"] = bool(row[1]["enabled"])
    return rows


def read(ledger, exported, *, take_over=True):
    return import_history(ledger, io.StringIO(exported), "f.jsonl", take_over=take_over)


def test_a_ledger_arrives_whole_in_any_other_and_back_and_a_second_time_changes_nothing(
    source, ledger, tmp_path, clock
):
    exported = text(source)
    assert {row[0] for row in content(exported)[:-1]} == {table.name for table in TABLES}
    report = read(ledger, exported)
    assert report.added == content(exported)[-1]["end"]
    assert set(report.known.values()) == {0}
    assert content(text(ledger)) == content(exported)
    again = read(ledger, exported)
    assert again.known == report.added
    assert set(again.added.values()) == {0}
    assert content(text(ledger)) == content(exported)
    for job in ("ended", "live"):
        events = ledger.events(job)
        states = fold(Event(Kind(e.kind), e.attempt, e.data) for e in events)
        assert (states.job, states.attempts[1]) == (ledger.job(job).state, ledger.job(job).attempt.state)
    assert (ledger.job("live").claim_owner, source.job("live").claim_owner) == (None, "me")
    assert len(ledger.reservations("lab")) == 2
    back = Ledger(open_database(tmp_path / "back"), clock)
    read(back, text(ledger))
    assert content(text(back)) == content(exported)
    back.close()


def test_no_secret_and_no_hash_leaves(source):
    exported = text(source)
    assert "sealed-text" not in exported
    assert "hash-of-a-token" not in exported
    of_one_service = {"cluster_polls", "duties", "late_copies", "content_holders", "audit_intents", "audit_limits"}
    kept_back = {"alembic_version", "tokens", "sealed_secrets", "notifications"} | of_one_service
    assert {table.name for table in TABLES} | kept_back == set(schema.metadata.tables)
    made_of_the_job = {"cluster", "owner", "project", "gpus_per_node", "machine", "nodes"}
    hidden = {"jobs": {"attempt", "claim_owner", "claim_expires_at"}, "attempts": made_of_the_job}
    for table in TABLES:
        columns = {column.name for column in schema.metadata.tables[table.name].columns}
        assert columns - set(table.columns) <= hidden.get(table.name, set())


def test_an_archive_brings_pruned_jobs_back_beside_those_of_the_ledger(source, clock, tmp_path):
    archive = text(source)
    with source.transaction() as tx:
        dead = tx.record(tx.find("live"), Event(Kind.CANCELLED, 1), Event(Kind.JOB_CANCELLED))
        tx.enqueue(NewJob("newest", "n", "lab", "fake", "", {}, {}, {}))
    assert dead.state.terminal
    before = [row[1] for row in content(archive)[:-1] if row[0] == "events"]
    clock.now += 1000 * 86400
    assert prune(source, PruneRule(clock.now)).jobs == 2
    report = read(source, archive)
    assert (report.added["jobs"], report.added["events"]) == (2, len(before))
    assert [e.kind for e in source.events("ended")] == [e["kind"] for e in before if e["job_id"] == "ended"]
    assert source.job("live").state == "PREPARED"
    assert source.job("newest") is not None
    with source.database.read() as connection:
        assert connection.tuples("SELECT job_id FROM pruned_jobs") == [("pruned",)]


@pytest.mark.parametrize("state", ["QUEUED", "PREPARED", "SUBMITTING", "PENDING", "RUNNING"])
def test_an_import_is_an_archive_in_which_nothing_is_live(source, ledger, state):
    steps = {
        "QUEUED": [Event(Kind.FAILED, 1), Event(Kind.RETRY)],
        "SUBMITTING": [Event(Kind.SUBMITTING, 1)],
        "PENDING": [Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1)],
        "RUNNING": [Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), Event(Kind.RUNNING, 1)],
    }
    with source.transaction() as tx:
        job = tx.record(tx.find("live"), *steps.get(state, []), attempt_set={"handle": {"id": "/somebody/else's"}})
    assert job.state == state
    exported = text(source)
    assert [(work.what, work.name) for work in live_work(exported.splitlines())] == [
        ("job", "live"),
        ("schedule", "nightly"),
    ]
    report = read(ledger, exported, take_over=False)
    assert (report.added["jobs"], report.ended, report.disabled) == (3 - 1, 1, 1)
    imported = ledger.job("live")
    assert (imported.state, imported.attempt.state.terminal, imported.attempt.handle) == ("CANCELLED", True, None)
    assert state in imported.reason
    states = fold(Event(Kind(e.kind), e.attempt, e.data) for e in ledger.events("live"))
    assert (states.job, states.attempts[1]) == (imported.state, imported.attempt.state)
    assert not ledger.any_active()
    assert ledger.reservations("lab") == []
    with ledger.database.read() as connection:
        assert [schedule.enabled for schedule in schedules.all_schedules(connection)] == [False]
        assert queueing.all_quotas(connection) == []
    assert set(read(ledger, exported, take_over=False).added.values()) == {0}


def test_an_attempt_that_is_live_behind_the_newest_one_is_refused(source, tmp_path, clock):
    target = Ledger(open_database(tmp_path / "target"), clock)
    with pytest.raises(InvalidImport, match="live and not its newest"):
        read(
            target,
            text(source).replace('"PREPARED","reason":"","attempt":1', '"PREPARED","reason":"","attempt":2'),
            take_over=False,
        )
    target.close()


def change(exported, table, **values):
    """The file with other values in the first row of *table*."""
    lines = exported.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f'["{table}"'))
    row = json.loads(lines[at])
    row[1].update(values)
    return "\n".join([*lines[:at], json.dumps(row), *lines[at + 1 :]])


@pytest.mark.parametrize(
    ("table", "values", "why"),
    [
        ("jobs", {"spec": "{}"}, "another job ended"),
        ("jobs", {"created_at": 1.0}, "another job ended"),
        ("jobs", {"revision": 99}, "knows more of the job ended"),
        ("jobs", {"state": "SUCCEEDED"}, "gone on in both"),
        ("groups", {"owner": "eve"}, "another group g"),
        ("schedules", {"id": "s-2"}, "another schedule 'nightly' of 'ann'"),
    ],
)
def test_what_is_something_else_here_is_refused_and_nothing_is_changed(source, table, values, why):
    exported = text(source)
    with pytest.raises(InvalidImport, match=why) as caught:
        read(source, change(exported, table, **values))
    assert "nothing was changed" in caught.value.hint
    assert content(text(source)) == content(exported)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda t: "", "the file is cut"),
        (lambda t: t[: t.rindex('{"end"')], "the file is cut"),
        (lambda t: t[:-9], "not a line of JSON"),
        (lambda t: re.sub(r'\["events".*\n', "", t, count=1), "rows are missing"),
        (lambda t: t + t, "more after the end"),
        (lambda t: "[1]\n" + t, "not an exported ledger"),
        (lambda t: "[" * 100_000 + "\n", "not a line of JSON"),
        (lambda t: t.replace('"orc_ledger":1', '"orc_ledger":2'), f"schema '{HEAD}' in format 2"),
        (lambda t: t.replace(f'"schema":"{HEAD}"', '"schema":"0999"'), "schema '0999' in format 1"),
        (lambda t: t.replace('["quotas",', '["tokens",'), "not a row of a table"),
        (lambda t: t.replace('"amount":', '"amount; DROP TABLE jobs":'), "no column 'amount; DROP TABLE jobs'"),
        (lambda t: t.replace('"amount":4.0', '"amount":[4]'), "not a value of the column 'amount'"),
        (lambda t: t.replace('"amount":4.0', '"amount":NaN'), "not a value of the column 'amount'"),
        (lambda t: change(t, "jobs", priority=10**30), "not a value of the column 'priority'"),
        (lambda t: change(t, "jobs", created_at="today"), "not a value of the column 'created_at'"),
        (lambda t: change(t, "jobs", owner=None), "not a value of the column 'owner'"),
        (lambda t: change(t, "jobs", name="n" * 999), "not a value of the column 'name'"),
        (lambda t: change(t, "jobs", spec="[" * 100_000), "not a value of the column 'spec'"),
        (lambda t: re.sub('"amount":4.0,?|,"amount":4.0', "", t), "'amount' is missing"),
        (lambda t: t.replace('"ended"', '"../ended"'), "not a job id"),
        (lambda t: change(t, "attempts", state="FINE"), "not a state"),
        (lambda t: change(t, "jobs", spec="[]"), "the specification of a job is none"),
        (lambda t: change(t, "events", job_id="nobody"), "which is not in the file"),
        (lambda t: change(t, "job_tags", job_id="pruned"), "which is not in the file"),
    ],
)
def test_a_file_that_is_damaged_or_hostile_is_refused_with_its_place(source, tmp_path, clock, damage, why):
    target = Ledger(open_database(tmp_path / "target"), clock)
    with pytest.raises(InvalidImport, match=why) as caught:
        read(target, damage(text(source)))
    assert caught.value.where.startswith("f.jsonl")
    assert caught.value.hint
    assert target.page(JobFilter()).rows == []
    assert target.last_event_id() == 0
    target.close()
