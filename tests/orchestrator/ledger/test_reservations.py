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


def test_an_attempt_can_give_its_hosts_back_and_get_others(ledger, create):
    job = create("a-aaaaaa", TWO)
    with ledger.transaction() as tx:
        begun = tx.record(job, Event(Kind.SUBMITTING, 1))
        tx.record(begun, Event(Kind.RELEASED, 1), vacate=True)
    assert held(ledger) == []
    with ledger.transaction() as tx:
        placed = tx.place(tx.find(job.id), Placement(("n3",), 1))
    assert placed.attempt.hosts == ("n3",)
    with ledger.transaction() as tx:
        tx.place(tx.find(job.id), Placement(("n4",), 1))
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


def test_failed_hosts_are_kept_by_attempt_and_named_once(ledger, create):
    job = create("a-aaaaaa", TWO)
    with ledger.transaction() as tx:
        tx.record(job, Event(Kind.FAILED, 1), Event(Kind.RETRY), failed_hosts=["n2", "n1", "n2"])
        tx.prepare(tx.find(job.id), "orc-a-aaaaaa-a2", "p", TWO)
        tx.record(tx.find(job.id), Event(Kind.FAILED, 2), Event(Kind.JOB_FAILED), failed_hosts=["n2"])
    assert ledger.failed_hosts(job.id) == {1: ("n1", "n2"), 2: ("n2",)}
    assert ledger.failed_hosts("other") == {}
