"""What is read from the ledger: which jobs, in which order, how many, and in one look."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import EventRecord, NewJob, Reservation
from orc.orchestrator.ledger.store import JobFilter, Ledger


@pytest.fixture
def ledger(tmp_path, clock):
    opened = Ledger(open_database(tmp_path), clock)
    yield opened
    opened.close()


@pytest.fixture
def put(ledger, clock):
    """A job that waits, or one with a prepared attempt on the hosts of *placement*."""

    def put(job_id, at=0, placement=None, cluster="lab", name="digits", tags=None, waits=False, origin="here:/state"):
        job = NewJob(job_id, name, cluster, "fake", "job.yaml", {"name": job_id}, {}, tags or {}, origin)
        began, clock.now = clock.now, clock.now + at
        with ledger.transaction() as tx:
            if waits:
                made = tx.enqueue(job)
            else:
                made = create_prepared(tx, job, f"orc-{job_id}-a1", "plan", "me", tx.now + 60, placement)
        clock.now = began
        return made

    return put


def end(ledger, job_id):
    with ledger.transaction() as tx:
        tx.record(tx.find(job_id), Event(Kind.FAILED, 1), Event(Kind.JOB_FAILED))


@pytest.fixture
def looks(ledger, monkeypatch):
    """How many queries each look made."""
    counts = []
    read = ledger.database.read

    @contextmanager
    def counted():
        with read() as connection:
            counts.append(0)
            tuples = connection.tuples

            def count(*arguments):
                counts[-1] += 1
                return tuples(*arguments)

            connection.tuples = count
            yield connection

    monkeypatch.setattr(ledger.database, "read", counted)
    return counts


def ids(jobs):
    return [job.id for job in jobs]


@pytest.mark.parametrize(("number", "queries"), [(0, 0), (1, 1), (500, 1), (501, 2), (1001, 3)])
def test_many_ids_are_looked_up_by_five_hundred_in_one_look(ledger, put, looks, number, queries):
    put("job-0", 2)
    put(f"job-{number - 1}", 1) if number > 1 else None
    found = ledger.jobs([f"job-{i}" for i in range(number)])
    assert ids(found) == ([] if not number else ["job-0"] if number == 1 else [f"job-{number - 1}", "job-0"])
    assert looks == [queries]


def test_jobs_come_oldest_first_then_by_id(ledger, put):
    put("b-late", 5)
    put("b-early")
    put("a-early")
    wanted = ["b-late", "b-early", "unknown", "a-early"]
    assert ids(ledger.jobs(wanted)) == ids(ledger.active(wanted)) == ["a-early", "b-early", "b-late"]
    assert ids(ledger.active()) == ["a-early", "b-early", "b-late"]
    assert ledger.job("b-early").attempt.marker == "orc-b-early-a1"
    assert ledger.job("unknown") is None
    assert ids(ledger.active(["b-late", "unknown"])) == ["b-late"]
    assert ledger.active([]) == ledger.jobs([]) == []
    end(ledger, "b-early")
    assert ids(ledger.active(wanted)) == ids(ledger.active()) == ["a-early", "b-late"]
    assert len(ledger.jobs(wanted)) == 3


def test_a_job_is_active_until_it_has_ended(ledger, put):
    assert ledger.any_active() is False
    put("a")
    put("b", waits=True)
    assert ledger.any_active() is True
    end(ledger, "a")
    assert ledger.any_active() is True
    with ledger.transaction() as tx:
        tx.record(tx.find("b"), Event(Kind.JOB_CANCELLED))
    assert ledger.any_active() is False


def test_a_row_is_all_that_a_list_shows_in_one_look(ledger, put, clock, looks):
    put("old", -5, Placement(("n2", "n1"), 1), cluster="far", name="first", tags={"t": "1", "u": "2"})
    put("new", waits=True)
    clock.now += 9
    ledger.note_seen(["old"])
    now = clock.now
    end(ledger, "old")
    looks.clear()
    new, old = ledger.page(JobFilter()).rows
    assert new[:13] == ("new", "digits", "lab", "fake", "QUEUED", "", 0, now - 9, now - 9, None, (), {}, None)
    assert old[:13] == (
        *("old", "first", "far", "fake", "FAILED", "", 1, now - 14, now, None, ("n2", "n1")),
        *({"t": "1", "u": "2"}, now),
    )
    assert old[13:] == new[13:] == ("", "", 0, None, None, None, None, None, 1, 0, {}, None)
    assert looks == [4]


def test_hosts_of_a_row_are_those_of_the_newest_attempt(ledger, put):
    put("a", placement=Placement(("n1",), 1))
    with ledger.transaction() as tx:
        job = tx.record(tx.find("a"), Event(Kind.FAILED, 1), Event(Kind.RETRY))
        tx.prepare(job, "orc-a-a2", "plan", Placement(("n2",), 1))
    assert [(row[6], row[10]) for row in ledger.page(JobFilter()).rows] == [(2, ("n2",))]


def test_what_belongs_to_a_job_is_read_by_its_id(ledger, put, clock):
    put("a", tags={"z": "1", "b": "2"})
    put("b", 7, tags={"x": "3"})
    assert ledger.spec("a") == {"name": "a"}
    assert list(ledger.tags("a").items()) == [("b", "2"), ("z", "1")]
    assert ledger.tags("unknown") == {}
    assert ledger.events("unknown") == ledger.attempts("unknown") == []
    with ledger.transaction() as tx:
        tx.record(tx.find("a"), Event(Kind.FAILED, 1, {"why": "é"}), Event(Kind.RETRY))
        tx.prepare(tx.find("a"), "orc-a-a2", "plan")
    assert [attempt.number for attempt in ledger.attempts("a")] == [1, 2]
    queued, _, failed, retry, _ = ledger.events("a")
    assert failed == EventRecord(failed.id, "a", 1, clock.now, "failed", {"why": "é"})
    assert (retry.attempt, retry.data) == (None, {})
    assert queued.id < failed.id < retry.id
    assert [event.job for event in ledger.events("b")] == ["b", "b"]


def test_a_job_came_from_where_its_first_event_says(ledger, put):
    put("new")
    put("bare", origin="")
    assert (ledger.origin("new"), ledger.origin("bare"), ledger.origin("unknown")) == ("here:/state", "", "")
    put("old", waits=True)
    with ledger.database.write() as connection:
        connection.execute("DROP TRIGGER events_no_delete")
        connection.execute("DELETE FROM events WHERE job_id = 'old'")
        values = "INSERT INTO events (job_id, at, kind, data) VALUES ('old', 1.0, :kind, :data)"
        connection.execute(values, {"kind": "waiting", "data": '{"origin":"not this"}'})
        connection.execute(values, {"kind": "queued", "data": "{}"})
    assert ledger.origin("old") == "", "a job of an older version"


def test_reservations_of_a_job_come_by_attempt_and_node(ledger, put, clock):
    put("a", placement=Placement(("n2", "n1"), 2))
    put("b", placement=Placement(("n1",), 1))
    with ledger.transaction() as tx:
        job = tx.record(tx.find("a"), Event(Kind.FAILED, 1), Event(Kind.RETRY))
        job = tx.prepare(job, "orc-a-a2", "plan", Placement(("n9", "n0"), 1))
        tx._reserve(job, 1, Placement(("n2", "n1"), 2))  # as a crash may have left them
    now = clock.now
    assert ledger.reservations(job_id="a") == [
        Reservation("lab", "n2", "a", 1, 0, 2, now),
        Reservation("lab", "n1", "a", 1, 1, 2, now),
        Reservation("lab", "n9", "a", 2, 0, 1, now),
        Reservation("lab", "n0", "a", 2, 1, 1, now),
    ]
    assert ledger.reservations("far", "a") == []
    assert ledger.reservations("lab", "b") == [Reservation("lab", "n1", "b", 1, 0, 1, now)]


def test_reservations_of_a_cluster_come_by_host_then_by_age_job_and_node(ledger, put):
    put("b", 1, Placement(("n1", "n2", "n1"), 1))
    put("a", 1, Placement(("n1",), 1))
    put("z", 0, Placement(("n1",), 1))
    put("far", 0, Placement(("n0",), 1), cluster="far")
    here = [("n1", "z", 0), ("n1", "a", 0), ("n1", "b", 0), ("n1", "b", 2), ("n2", "b", 1)]
    assert [(r.host, r.job, r.node) for r in ledger.reservations("lab")] == here
    assert [(r.host, r.job, r.node) for r in ledger.reservations()] == [("n0", "far", 0), *here]
    assert [r.job for r in ledger.reservations("far")] == ["far"]


def test_a_job_was_seen_when_its_cluster_last_spoke_of_it(ledger, put, clock):
    put("a")
    put("b")
    ledger.note_seen([])
    assert {row[0]: row[12] for row in ledger.page(JobFilter()).rows} == {"a": None, "b": None}
    ledger.note_seen(["a", "b"])
    first, clock.now = clock.now, clock.now + 5
    ledger.note_seen(["b"])
    assert {row[0]: row[12] for row in ledger.page(JobFilter()).rows} == {"a": first, "b": first + 5}
