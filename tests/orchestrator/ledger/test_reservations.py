from __future__ import annotations

import pytest
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob

TWO = Placement(("n1", "n2"), 2)


@pytest.fixture
def create(ledger, clock):
    """A new job on the cluster ``lab``, PREPARED on hosts or waiting for a reason."""

    def create(job_id, placement=None, reason="", cluster="lab"):
        clock.now += 1
        job = NewJob(job_id, "digits", cluster, "fake", "job.yaml", {"name": job_id}, {}, {}, "here:/state")
        with ledger.transaction() as tx:
            if reason:
                return tx.enqueue(job, reason)
            return create_prepared(tx, job, f"orc-{job_id}-a1", "p", "me", tx.now + 60, placement)

    return create


def held(ledger, cluster=None):
    return [(r.host, r.marker, r.node, r.slots) for r in ledger.reservations(cluster)]


def test_a_prepared_attempt_holds_its_hosts_in_node_order(ledger, create):
    job = create("a-aaaaaa", Placement(("n2", "n1"), 3))
    assert job.attempt.hosts == ("n2", "n1")
    assert [(r.node, r.host) for r in ledger.reservations(job_id=job.id)] == [(0, "n2"), (1, "n1")]
    assert held(ledger) == [("n1", "orc-a-aaaaaa-a1", 1, 3), ("n2", "orc-a-aaaaaa-a1", 0, 3)]
    create("b-bbbbbb", TWO, cluster="other")
    assert {r.cluster for r in ledger.reservations("other")} == {"other"}
    assert len(ledger.reservations()) == 4


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.CANCELLED])
def test_the_end_of_an_attempt_gives_its_hosts_back_in_the_same_transaction(ledger, create, kind):
    job, other = create("a-aaaaaa", TWO), create("b-bbbbbb", TWO)

    def fail_then_break():
        with ledger.transaction() as tx:
            tx.record(tx.reload(job), Event(kind, 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_then_break()
    assert len(held(ledger)) == 4
    with ledger.transaction() as tx:
        tx.record(tx.reload(job), Event(kind, 1))
    assert {marker for _, marker, _, _ in held(ledger)} == {other.attempt.marker}


def test_an_attempt_can_give_its_hosts_back_and_get_others(ledger, create):
    job = create("a-aaaaaa", TWO)
    with ledger.transaction() as tx:
        begun = tx.record(job, Event(Kind.SUBMITTING, 1))
        tx.record(begun, Event(Kind.RELEASED, 1), vacate=True)
    assert held(ledger) == []
    with ledger.transaction() as tx:
        placed = tx.place(tx.reload(job), Placement(("n3",), 1))
    assert placed.attempt.hosts == ("n3",)
    with ledger.transaction() as tx:
        tx.place(tx.reload(job), Placement(("n4",), 1))
    assert held(ledger) == [("n4", job.attempt.marker, 0, 1)]


def test_the_jobs_without_hosts_are_those_that_want_some(ledger, create):
    create("held-aaaaaa", TWO)
    waiting = create("wait-bbbbbb", reason="waiting for room")
    vacated = create("gone-cccccc", TWO)
    cancelled = create("stop-dddddd", reason="waiting for room")
    create("far-eeeeee", reason="waiting for room", cluster="other")
    with ledger.transaction() as tx:
        tx.record(tx.record(vacated, Event(Kind.SUBMITTING, 1)), Event(Kind.RELEASED, 1), vacate=True)
        tx.record(cancelled, Event(Kind.CANCEL_REQUESTED), job_set={"cancel_requested_at": tx.now})
    with ledger.transaction() as tx:
        found = tx.unplaced("lab")
    assert {job for job, *_ in found} == {waiting.id, vacated.id}


def test_a_waiting_job_says_why_and_where_it_came_from(ledger, create):
    job = create("a-aaaaaa", reason="waiting for room: 2 hosts")
    assert (job.state, job.number, job.attempt, job.reason) == ("QUEUED", 0, None, "waiting for room: 2 hosts")
    assert (job.claim_owner, job.claim_expires_at) == (None, None)
    assert ledger.origin(job.id) == "here:/state"
    with ledger.transaction() as tx:
        prepared = tx.prepare(job, "orc-a-aaaaaa-a1", "p", TWO)
    assert (prepared.state, prepared.number, prepared.reason) == ("PREPARED", 1, "")


def test_failed_hosts_are_kept_by_attempt_and_named_once(ledger, create):
    job = create("a-aaaaaa", TWO)
    with ledger.transaction() as tx:
        tx.record(job, Event(Kind.FAILED, 1), Event(Kind.RETRY), failed_hosts=["n2", "n1", "n2"])
        tx.prepare(tx.reload(job), "orc-a-aaaaaa-a2", "p", TWO)
        tx.record(tx.reload(job), Event(Kind.FAILED, 2), Event(Kind.JOB_FAILED), failed_hosts=["n2"])
    assert ledger.failed_hosts(job.id) == {1: ("n1", "n2"), 2: ("n2",)}
    assert ledger.failed_hosts("other") == {}
