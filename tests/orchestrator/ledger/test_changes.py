"""What a change of a job writes: columns, events, reservations, and which of it together."""

from __future__ import annotations

import dataclasses
import sqlite3

import pytest
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.leases import CLAIM_S
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, IllegalTransition, JobState, Kind, Position
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import AttemptRecord, JobRecord, NewJob, Reservation, dump
from orc.orchestrator.ledger.store import Ledger
from orc.orchestrator.ledger.transaction import Transaction

TWO = Placement(("n2", "n1"), 4)
A, B = "a-aaaaaa", "b-bbbbbb"


@pytest.fixture
def ledger(tmp_path, clock):
    opened = Ledger(open_database(tmp_path), clock)
    yield opened
    opened.close()


def new(job_id=A, **changes):
    values = {
        "id": job_id,
        "name": "digits",
        "cluster": "lab",
        "backend": "fake",
        "source": "job.yaml",
        "spec": {"b": [1], "a": "é"},
        "digests": {"runtime": "r", "code": "c"},
        "tags": {},
        "origin": "here:/state",
    }
    return NewJob(**{**values, **changes})


def create(ledger, job_id=A, placement=None, **changes):
    with ledger.transaction() as tx:
        return create_prepared(tx, new(job_id, **changes), f"orc-{job_id}-a1", "plan", "me", tx.now + 60, placement)


def record(ledger, job_id, *events, **options):
    with ledger.transaction() as tx:
        return tx.record(tx.find(job_id), *events, **options)


def told(ledger, job_id=A):
    return [(event.kind, event.attempt, event.data) for event in ledger.events(job_id)]


def cells(ledger, query):
    with ledger.database.read() as connection:
        return connection.tuples(query)


def test_a_new_job_with_its_first_attempt(ledger, clock):
    now = clock.now
    job = create(ledger, placement=TWO, tags={"u": "2", "t": "1"})
    attempt = AttemptRecord(
        job_id=A,
        number=1,
        marker="orc-a-aaaaaa-a1",
        state=AttemptState.PREPARED,
        cause=None,
        reason="",
        plan_digest="plan",
        handle=None,
        prepared_at=now,
        hosts=("n2", "n1"),
    )
    assert job == JobRecord(
        id=A,
        name="digits",
        cluster="lab",
        backend="fake",
        state=JobState.PREPARED,
        reason="",
        number=1,
        revision=1,
        created_at=now,
        updated_at=now,
        ended_at=None,
        next_attempt_at=None,
        cancel_requested_at=None,
        cancel_grace_s=None,
        poll_error_at=None,
        claim_owner="me",
        claim_expires_at=now + 60,
        source="job.yaml",
        digests={"runtime": "r", "code": "c"},
        attempt=attempt,
    )
    assert job.position == Position(JobState.PREPARED, 1, AttemptState.PREPARED)
    assert told(ledger) == [
        ("queued", None, {"cluster": "lab", "source": "job.yaml", "origin": "here:/state"}),
        (
            "prepared",
            1,
            {
                "marker": "orc-a-aaaaaa-a1",
                "plan": "plan",
                "trees": {"runtime": "r", "code": "c"},
                "hosts": ["n2", "n1"],
            },
        ),
    ]
    assert [event.at for event in ledger.events(A)] == [now, now]
    assert ledger.reservations(job_id=A) == [
        Reservation("lab", "n2", A, 1, 0, 4, now),
        Reservation("lab", "n1", A, 1, 1, 4, now),
    ]
    assert ledger.tags(A) == {"t": "1", "u": "2"}
    assert cells(ledger, "SELECT spec, digests FROM jobs") == [('{"a":"é","b":[1]}', '{"code":"c","runtime":"r"}')]
    assert cells(ledger, "SELECT hosts, progress, restarts FROM attempts") == [('["n2","n1"]', "{}", 0)]


def test_a_job_that_has_to_wait_says_for_what_and_has_no_attempt(ledger, clock):
    with ledger.transaction() as tx:
        waiting = tx.enqueue(new(), "waiting for room", owner="me", claim_expires_at=5.0)
        silent = tx.enqueue(new(B))
    assert (waiting.position, waiting.attempt, waiting.revision) == (Position(JobState.QUEUED, 0, None), None, 0)
    assert (waiting.reason, waiting.claim_owner, waiting.claim_expires_at) == ("waiting for room", "me", 5.0)
    assert (silent.reason, silent.claim_owner, silent.claim_expires_at) == ("", None, None)
    queued = ("queued", None, {"cluster": "lab", "source": "job.yaml", "origin": "here:/state"})
    assert told(ledger) == [queued, ("waiting", None, {"reason": "waiting for room"})]
    assert told(ledger, B) == [queued]


def test_the_next_attempt_ends_the_wait(ledger, clock):
    create(ledger)
    job = record(
        ledger,
        A,
        Event(Kind.FAILED, 1),
        Event(Kind.RETRY),
        job_set={"reason": "will be tried again", "next_attempt_at": clock.now + 30},
    )
    assert (job.state, job.reason, job.next_attempt_at) == ("QUEUED", "will be tried again", clock.now + 30)
    clock.now += 30
    with ledger.transaction() as tx:
        again = tx.prepare(job, "orc-a-aaaaaa-a2", "other", TWO)
    assert (again.state, again.number, again.reason, again.next_attempt_at) == ("PREPARED", 2, "", None)
    assert (again.created_at, again.updated_at) == (clock.now - 30, clock.now)
    assert again.revision == job.revision + 1
    assert (again.attempt.marker, again.attempt.plan_digest, again.attempt.prepared_at) == (
        "orc-a-aaaaaa-a2",
        "other",
        clock.now,
    )
    assert [(one.number, one.state, one.hosts) for one in ledger.attempts(A)] == [
        (1, "FAILED", ()),
        (2, "PREPARED", ("n2", "n1")),
    ]
    assert [(r.attempt, r.host) for r in ledger.reservations("lab")] == [(2, "n1"), (2, "n2")]


def test_a_second_attempt_cannot_be_prepared_beside_the_first(ledger):
    job = create(ledger)
    before = (ledger.job(A), told(ledger))
    refused = pytest.raises(IllegalTransition, match="prepared is not allowed while the job is PREPARED")
    with refused, ledger.transaction() as tx:
        tx.prepare(job, "orc-a-aaaaaa-a2", "plan", TWO)
    assert (ledger.job(A), told(ledger)) == before
    assert ledger.reservations() == []


def test_a_stale_look_prepares_nothing(ledger):
    with ledger.transaction() as tx:
        stale = tx.enqueue(new(), "waiting for room")
        tx.record(stale, job_set={"reason": "still waiting"})
    with pytest.raises(Conflict, match=f"^{A}$"), ledger.transaction() as tx:
        tx.prepare(stale, "orc-a-aaaaaa-a1", "plan", TWO)
    assert (ledger.job(A).reason, ledger.attempts(A), ledger.reservations()) == ("still waiting", [], [])


def test_hosts_are_given_to_an_attempt_instead_of_those_it_had(ledger, clock):
    job = create(ledger, placement=TWO)
    with ledger.transaction() as tx:
        tx.record(job, job_set={"reason": "waiting for room", "next_attempt_at": 5.0})
    clock.now += 7
    with ledger.transaction() as tx:
        placed = tx.place(tx.find(A), Placement(("n3",), 2))
    assert (placed.reason, placed.next_attempt_at, placed.updated_at) == ("", None, clock.now)
    assert placed.attempt.hosts == ("n3",)
    assert placed == ledger.job(A)
    assert told(ledger)[-1] == ("placed", 1, {"hosts": ["n3"]})
    assert ledger.reservations() == [Reservation("lab", "n3", A, 1, 0, 2, clock.now)]


def test_columns_are_set_together_with_the_events(ledger, clock):
    create(ledger)
    clock.now += 3
    job = record(
        ledger,
        A,
        Event(Kind.SUBMITTING, 1),
        Event(Kind.ACCEPTED, 1, {"handle": {"z": 1, "y": 2}}),
        job_set={"poll_error_at": 4.0},
        attempt_set={"handle": {"z": 1, "y": 2}, "submitted_at": 3.0, "progress": {"step": 1}, "reason": "r"},
    )
    assert (job.state, job.attempt.state, job.poll_error_at, job.updated_at) == ("PENDING", "PENDING", 4.0, clock.now)
    assert (job.attempt.handle, job.attempt.submitted_at) == ({"z": 1, "y": 2}, 3.0)
    assert (job.attempt.progress, job.attempt.reason) == ({"step": 1}, "r")
    assert cells(ledger, "SELECT handle FROM attempts") == [('{"y":2,"z":1}',)]
    assert told(ledger)[2:] == [("submitting", 1, {}), ("accepted", 1, {"handle": {"y": 2, "z": 1}})]
    ended = record(
        ledger,
        A,
        Event(Kind.FAILED, 1),
        Event(Kind.JOB_FAILED),
        attempt_set={"handle": None, "cause": Kind.LOST, "exit": {"code": 1}, "hosts": ("n1",)},
    )
    assert (ended.attempt.handle, ended.attempt.cause, ended.attempt.exit) == (None, "lost", {"code": 1})
    assert cells(ledger, "SELECT exit, hosts, handle FROM attempts") == [('{"code":1}', '["n1"]', None)]
    assert record(ledger, A, attempt_set={"cause": None}).attempt.cause is None


def test_drivers_get_plain_values_each_of_its_kind(ledger, clock):
    """Not every driver knows enumerations, and not every database makes a number of a text."""
    bound = []

    class Noting:
        def __init__(self, connection):
            self.connection = connection

        def executemany(self, sql, parameters):
            if sql.startswith("UPDATE"):
                bound.extend({name: type(value) for name, value in one.items()} for one in parameters)
            self.connection.executemany(sql, parameters)

        def __getattr__(self, name):
            return getattr(self.connection, name)

    create(ledger)
    with ledger.database.write() as connection:
        tx = Transaction(Noting(connection), clock.now)
        tx.record(tx.find(A), Event(Kind.FAILED, 1), attempt_set={"cause": Kind.LOST, "started_at": 2.0})
    keys = {"key_job": str, "key_number": int}
    assert bound == [
        {"state": str, "updated_at": type(clock.now), "revision": int, **keys},
        {"state": str, "cause": str, "started_at": float, **keys},
    ]


def test_only_the_newest_attempt_is_changed(ledger):
    create(ledger, placement=TWO)
    record(ledger, A, Event(Kind.FAILED, 1), Event(Kind.RETRY), attempt_set={"reason": "first"})
    create(ledger, B, TWO)
    with ledger.transaction() as tx:
        tx.prepare(tx.find(A), "orc-a-aaaaaa-a2", "plan", TWO)
    record(ledger, A, Event(Kind.FAILED, 2), attempt_set={"reason": "second"})
    assert [(one.number, one.reason) for one in ledger.attempts(A)] == [(1, "first"), (2, "second")]
    assert [one.reason for one in ledger.attempts(B)] == [""]
    assert [(r.job, r.attempt) for r in ledger.reservations()] == [(B, 1), (B, 1)]


def test_a_job_without_an_attempt_is_changed_by_itself(ledger):
    with ledger.transaction() as tx:
        tx.enqueue(new(), "waiting for room")
    job = record(
        ledger,
        A,
        Event(Kind.JOB_CANCELLED),
        job_set={"ended_at": 1.0},
        attempt_set={"reason": "nobody"},
        failed_hosts=["n1"],
        vacate=True,
    )
    assert (job.state, job.ended_at, job.attempt) == ("CANCELLED", 1.0, None)
    assert ledger.failed_hosts(A) == {}


@pytest.mark.parametrize(
    ("events", "vacate", "kept"),
    [
        ((Event(Kind.SUBMITTING, 1),), False, 2),
        ((Event(Kind.SUBMITTING, 1),), True, 0),
        ((Event(Kind.FAILED, 1),), False, 0),
        ((), False, 2),
        ((), True, 0),
    ],
)
def test_hosts_are_given_back_at_the_end_or_when_that_is_wanted(ledger, events, vacate, kept):
    create(ledger, placement=TWO)
    record(ledger, A, *events, vacate=vacate)
    assert len(ledger.reservations()) == kept


def test_an_event_that_is_not_allowed_changes_nothing(ledger):
    create(ledger, placement=TWO)
    before = (ledger.job(A), told(ledger), ledger.reservations())
    with pytest.raises(IllegalTransition, match="running is not allowed"), ledger.transaction() as tx:
        tx.record(tx.find(A), Event(Kind.SUBMITTING, 1), Event(Kind.RUNNING, 1), job_set={"reason": "x"}, vacate=True)
    assert (ledger.job(A), told(ledger), ledger.reservations()) == before


def test_a_refused_change_is_found_before_anything_else_is_written(ledger):
    stale = create(ledger, placement=TWO)
    record(ledger, A, Event(Kind.SUBMITTING, 1))
    with ledger.transaction() as tx:
        with pytest.raises(Conflict, match=f"^{A}$"):
            tx.record(stale, Event(Kind.FAILED, 1), attempt_set={"reason": "x"}, failed_hosts=["n1"])
        assert tx.find(stale.id).state == "SUBMITTING"
    assert (ledger.job(A).attempt.reason, ledger.failed_hosts(A), len(ledger.reservations())) == ("", {}, 2)


def test_each_change_counts_one_revision_from_the_one_that_was_read(ledger):
    first = create(ledger)
    second = record(ledger, A, Event(Kind.POLL_ERROR))
    assert (first.revision, second.revision, ledger.job(A).revision) == (1, 2, 2)
    with pytest.raises(Conflict), ledger.transaction() as tx:
        tx.record(dataclasses.replace(second, revision=3), Event(Kind.POLL_ERROR))


def test_a_transaction_sees_what_it_has_written_and_nobody_else_does(ledger, tmp_path, clock):
    other = Ledger(open_database(tmp_path), clock)
    with ledger.transaction() as tx:
        job = tx.enqueue(new(), "waiting for room")
        assert tx.find(A) == tx.find(job.id) == job
        assert tx.find(B) is None
        assert other.job(A) is None
    assert other.job(A) == job
    other.close()


def test_a_transaction_has_one_time(ledger, clock):
    with ledger.transaction() as tx:
        now = tx.now
        clock.now += 5
        tx.enqueue(new())
    assert now == clock.now - 5
    assert (ledger.job(A).created_at, ledger.events(A)[0].at) == (now, now)


def test_jobs_that_want_hosts_come_oldest_first_then_by_name(ledger, clock):
    def wait(job_id, **changes):
        with ledger.transaction() as tx:
            return tx.enqueue(new(job_id, spec={"name": job_id}, **changes), "waiting for room")

    for job_id in ("c-1", "b-1"):
        wait(job_id)
    clock.now -= 10
    wait("z-old")
    wait("far", cluster="other")
    create(ledger, "held", TWO)
    create(ledger, "bare", spec={"name": "bare"})
    wait("stopped")
    record(ledger, "stopped", Event(Kind.CANCEL_REQUESTED), job_set={"cancel_requested_at": 1.0})
    create(ledger, "sent")
    record(ledger, "sent", Event(Kind.SUBMITTING, 1))
    create(ledger, "retried", TWO, spec={"name": "retried"})
    record(ledger, "retried", Event(Kind.FAILED, 1), Event(Kind.RETRY))
    with ledger.transaction() as tx:
        found = tx.unplaced("lab")
    names = ["bare", "retried", "z-old", "b-1", "c-1"]
    records = [ledger.job(name) for name in names]
    assert sorted(found) == sorted((job.id, job.created_at, job.priority, job.owner) for job in records)
    record(ledger, "bare", job_set={"next_attempt_at": clock.now + 1})
    record(ledger, "retried", job_set={"next_attempt_at": clock.now})
    with ledger.transaction() as tx:
        assert {job for job, *_ in tx.unplaced("lab")} == {"retried", "z-old", "b-1", "c-1"}


def test_hosts_of_an_earlier_attempt_are_none_of_the_newest(ledger):
    create(ledger, placement=TWO)
    record(ledger, A, Event(Kind.FAILED, 1), Event(Kind.RETRY))
    with ledger.transaction() as tx:
        tx._reserve(tx.find(A), 1, TWO)  # as a crash may have left them
        tx.prepare(tx.find(A), "orc-a-aaaaaa-a2", "plan")
        assert [job for job, *_ in tx.unplaced("lab")] == [A]


def test_a_database_that_changes_what_it_is_given_is_not_believed(ledger):
    with ledger.database.write() as connection:
        connection.execute(
            "CREATE TRIGGER odd AFTER INSERT ON jobs BEGIN UPDATE jobs SET state = 'RUNNING' WHERE id = new.id; END"
        )
    with pytest.raises(IllegalTransition) as caught, ledger.transaction() as tx:
        tx.enqueue(new())
    assert str(caught.value) == f"a new job is {Position(JobState.RUNNING, 0, None)}"
    assert ledger.job(A) is None


def test_what_cannot_last_is_refused_unless_it_need_not(tmp_path, clock):
    ledger = Ledger(open_database(tmp_path), clock)
    assert ledger.volatile == ""
    job = create(ledger)
    ledger.database.volatile = "its disk is full"
    assert ledger.volatile == "its disk is full"
    for change in (ledger.transaction().__enter__, lambda: ledger.claim([A], "you")):
        with pytest.raises(LedgerError) as caught:
            change()
        assert caught.value.what == "the ledger can only be read now: its disk is full"
        assert caught.value.where == f"{tmp_path}/ledger.db"
        assert caught.value.hint == (
            "free some space and try again; `orc status`, `list`, `logs` and `cancel` work meanwhile"
        )
    with ledger.transaction(durable=False) as tx:
        tx.record(job, Event(Kind.POLL_ERROR))
    assert ledger.job(A).revision == 2
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.job(A)


# -- claims


def test_a_claim_lasts_as_long_as_it_says_and_is_no_change(ledger, clock):
    job = create(ledger)  # which is claimed for a minute
    create(ledger, B)
    assert not ledger.claim([A], "you")
    clock.now += 60
    assert ledger.claim([A], "you") is True
    claimed = ledger.job(A)
    assert (claimed.claim_owner, claimed.claim_expires_at) == ("you", clock.now + CLAIM_S)
    assert (claimed.revision, claimed.updated_at) == (job.revision, job.updated_at)
    clock.now += CLAIM_S - 1
    assert ledger.claim([A], "they") is False
    assert ledger.job(A) == claimed
    ledger.release([A], "they")
    assert ledger.job(A) == claimed
    ledger.release([A], "you")
    free = ledger.job(A)
    assert (free.claim_owner, free.claim_expires_at) == (None, None)
    assert ledger.claim([A], "they")
    assert not ledger.claim([B, A], "you"), "all or none"
    assert ledger.job(B).claim_owner == "me"
    assert not ledger.claim(["unknown-1"], "me")


# -- values


def test_text_of_the_ledger_is_canonical():
    assert dump({"b": [1, None], "a": {"ü": "é"}}) == '{"a":{"ü":"é"},"b":[1,null]}'


ATTEMPT = (
    A,
    2,
    "m",
    "LOST",
    "lost",
    "r",
    "p",
    '{"id":7}',
    1.0,
    2.0,
    3.0,
    4.0,
    5.0,
    6.0,
    7,
    '["n"]',
    '{"s":1}',
    '{"c":0}',
    '{"login":"hopper","root":"/navy"}',
)
JOB = (
    *(A, "n", "c", "b", "QUEUED", "r", 2, 3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, "me", 8.0, "s", '{"t":"d"}'),
    *("ann", "vision", 9, "g", 4, 10.0, 11.0),
)


def test_rows_become_values_column_by_column():
    attempt = AttemptRecord.from_row(ATTEMPT)
    assert list(dataclasses.astuple(attempt)) == [
        *(A, 2, "m", AttemptState.LOST, "lost", "r", "p", {"id": 7}, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7, ("n",)),
        *({"s": 1}, {"c": 0}, ("hopper", "/navy", "", {})),
    ]
    assert type(attempt.state) is AttemptState
    job = JobRecord.from_row(JOB, attempt)
    assert (job.state, job.number, job.digests, job.attempt) == (JobState.QUEUED, 2, {"t": "d"}, attempt)
    assert type(job.state) is JobState
    assert (job.claim_owner, job.claim_expires_at, job.poll_error_at, job.source) == ("me", 8.0, 7.0, "s")
    assert (job.owner, job.project, job.priority) == ("ann", "vision", 9)
    assert (job.group_id, job.group_index, job.not_before, job.deadline_at) == ("g", 4, 10.0, 11.0)
    assert job.position == Position(JobState.QUEUED, 2, AttemptState.LOST)
    assert JobRecord.from_row(JOB, None).position == Position(JobState.QUEUED, 2, None)
    empty = AttemptRecord.from_row((*ATTEMPT[:7], None, *ATTEMPT[8:17], None, None))
    assert (empty.handle, empty.exit, empty.sent_to) == (None, None, None)


def test_an_event_of_no_job_is_refused(ledger):
    with pytest.raises(LedgerError) as caught, ledger.transaction() as tx:
        tx._append([("nobody", [Event(Kind.QUEUED)])])
    assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
