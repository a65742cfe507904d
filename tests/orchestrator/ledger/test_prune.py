"""Pruning: which jobs go, with all that belongs to them, and that events of others stay append-only."""

from __future__ import annotations

import pytest
from prepared_jobs import create_prepared

from orc.orchestrator.ledger import groups, outbox
from orc.orchestrator.ledger import prune as pruning
from orc.orchestrator.ledger.database import LedgerError, SqliteDatabase, insert
from orc.orchestrator.ledger.groups import Dependency, GroupRecord
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.prune import PruneReport, PruneRule, prune, was_pruned, would_prune
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import JobFilter, Ledger
from orc.orchestrator.ledger.transaction import put_notification

DAY = 86400.0
TABLES = (
    *("jobs", "attempts", "events", "job_tags", "sightings", "culprits", "reservations", "dependencies"),
    *("sealed_secrets", "notifications", "groups"),
)


@pytest.fixture
def put(ledger, clock):
    """A job that was made *days* ago and has ended as *end* at once, or is live."""

    def put(job_id, days, end=Kind.JOB_SUCCEEDED, **values):
        now, clock.now = clock.now, clock.now - days * DAY
        job = NewJob(job_id, "digits", values.pop("cluster", "lab"), "fake", "", {}, {}, {"t": job_id}, **values)
        with ledger.transaction() as tx:
            made = create_prepared(tx, job, f"orc-{job_id}-a1", "plan", "me", tx.now)
            if end is not None:
                failed = Kind.FAILED if end is Kind.JOB_FAILED else Kind.CANCELLED
                if end is Kind.JOB_SUCCEEDED:
                    made = tx.record(made, Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), Event(Kind.RUNNING, 1))
                    failed = Kind.SUCCEEDED
                blamed = ["n1"] if failed is Kind.FAILED else []
                tx.record(made, Event(failed, 1), Event(end), job_set={"ended_at": tx.now}, failed_hosts=blamed)
        ledger.note_seen([job_id])
        clock.now = now

    return put


def counts(ledger):
    with ledger.database.read() as connection:
        return {table: connection.tuples(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}


def left(ledger):
    return {row[0] for row in ledger.page(JobFilter()).rows}


def test_jobs_that_ended_long_ago_go_with_all_that_belongs_to_them(ledger, clock, put):
    put("old-failed", 40, Kind.JOB_FAILED)
    put("new", 1)
    kept = counts(ledger)
    kept.update({name: kept[name] - 1 for name in ("jobs", "attempts", "job_tags", "sightings", "culprits")})
    kept["events"] = len(ledger.events("new"))
    for name in ("old-1", "old-2"):
        put(name, 31)
    with ledger.transaction() as tx:
        insert(tx.connection, "sealed_secrets", {"job_id": "old-1", "sealed": "cipher", "at": tx.now})
        groups.add_dependencies(
            tx.connection, [Dependency("old-2", "old-1", "any"), Dependency("new", "old-2", "success")]
        )
        put_notification(tx.connection, 1, "old-1", "t", "end", {}, tx.now)
        outbox.sent(tx.connection, outbox.listed(tx.connection, job_id="old-1", limit=1)[0].id)
        tx.record(tx.find("new"))  # and the newest event is not one of theirs
    put("live", 0, None)
    kept = {name: number + {"jobs": 1, "attempts": 1, "events": 2, "job_tags": 1, "sightings": 1}.get(name, 0)
            for name, number in kept.items()}  # fmt: skip
    rule = PruneRule(clock.now - 30 * DAY)
    expected = would_prune(ledger, rule)
    assert expected.jobs == 3
    assert left(ledger) == {"old-failed", "old-1", "old-2", "new", "live"}
    assert prune(ledger, rule) == expected
    assert left(ledger) == {"new", "live"}
    assert counts(ledger) == kept
    assert prune(ledger, rule) == PruneReport(0, 0)
    with ledger.database.read() as connection:
        assert was_pruned(connection, ["old-1", "old-failed", "new", "never"]) == {"old-1", "old-failed"}


def test_failed_jobs_and_other_clusters_can_be_kept(ledger, clock, put):
    put("failed", 40, Kind.JOB_FAILED)
    put("cancelled", 40, Kind.JOB_CANCELLED)
    put("far", 40, cluster="far")
    put("new", 0)
    assert prune(ledger, PruneRule(clock.now - DAY, keep_failed=True, cluster="lab")).jobs == 1
    assert left(ledger) == {"failed", "far", "new"}


def test_what_is_still_needed_stays(ledger, clock, put):
    with ledger.transaction() as tx:
        for name, kind in (("sweep", "sweep"), ("nightly", "schedule"), ("empty", "array")):
            groups.create(tx.connection, GroupRecord(name, kind, name, "ann", tx.now - 90 * DAY))
    put("live", 90, None)
    put("awaited", 90)
    put("sweep-1", 90, group_id="sweep")
    put("sweep-2", 90, None, group_id="sweep")
    put("night-1", 90, group_id="nightly")
    put("night-2", 90, None, group_id="nightly")
    put("untold", 90)
    put("newest", 90)
    with ledger.transaction() as tx:
        groups.add_dependencies(tx.connection, [Dependency("live", "awaited", "success")])
        put_notification(tx.connection, 1, "untold", "t", "end", {}, tx.now)
    assert prune(ledger, PruneRule(clock.now)) == PruneReport(1, 7, 1)
    assert left(ledger) == {"live", "awaited", "sweep-1", "sweep-2", "night-2", "untold", "newest"}
    with ledger.database.read() as connection:
        assert {group.id for group in groups.newest(connection, 9)} == {"sweep", "nightly"}


def test_ids_of_events_are_never_given_again(ledger, clock, put):
    put("a", 40)
    put("b", 40)
    newest = ledger.last_event_id()
    prune(ledger, PruneRule(clock.now))
    put("c", 0)
    assert min(event.id for event in ledger.events("c")) > newest


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("DELETE FROM events", "append-only"),
        ("DELETE FROM events WHERE job_id = 'ended'", "append-only"),
        ("UPDATE events SET kind = 'x' WHERE job_id = 'gone'", "append-only"),
        ("INSERT INTO pruned_jobs (job_id, at) VALUES ('live', 0)", "a live job cannot be pruned"),
    ],
)
def test_nothing_else_can_remove_or_change_events(ledger, put, statement, why):
    put("gone", 40)
    put("ended", 40)
    put("live", 40, None)
    with ledger.database.write() as connection:
        connection.execute("INSERT INTO pruned_jobs (job_id, at) VALUES ('gone', 0)")
    before = ledger.events_after(0, 99)
    with pytest.raises(LedgerError, match=why), ledger.database.write() as connection:
        connection.execute(statement)
    assert ledger.events_after(0, 99) == before


def test_a_failure_in_the_middle_of_a_batch_leaves_it_whole(ledger, clock, put, monkeypatch):
    put("a", 40)
    put("b", 0)
    before = counts(ledger)
    monkeypatch.setattr("orc.orchestrator.ledger.prune._OF_JOBS", ("job_tags", "no_such_table"))
    with pytest.raises(LedgerError, match="no_such_table"):
        prune(ledger, PruneRule(clock.now - DAY))
    assert counts(ledger) == before


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (14, [["old-a", "old-b"], ["old-c", "old-d"], ["old-e"]]),
        (1, [[f"old-{name}"] for name in "abcde"]),  # a job that has more goes by itself
    ],
)
def test_what_is_removed_in_one_step_is_bounded_by_its_events(ledger, clock, put, monkeypatch, events, expected):
    """Who submits waits for a step."""
    for name in "abcde":
        put(f"old-{name}", 40)  # seven events each
    put("new", 1)
    steps = []
    remove = pruning._remove
    monkeypatch.setattr(pruning, "_remove", lambda tx, ids, now: steps.append(ids) or remove(tx, ids, now))
    monkeypatch.setattr(pruning, "EVENTS", events)
    assert prune(ledger, PruneRule(clock.now - DAY)).jobs == 5
    assert steps == expected


def test_nothing_is_pruned_in_a_copy_of_a_ledger_that_cannot_be_written(tmp_path, clock):
    open_database(tmp_path).close()
    copy = Ledger(SqliteDatabase(tmp_path / "ledger.db", "its disk is full"), clock)
    with pytest.raises(LedgerError, match="can only be read now: its disk is full"):
        prune(copy, PruneRule(clock.now))
    copy.close()
