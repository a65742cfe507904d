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


def test_failed_hosts_are_kept_by_attempt_and_named_once(ledger, create):
    job = create("a-aaaaaa", TWO)
    with ledger.transaction() as tx:
        tx.record(job, Event(Kind.FAILED, 1), Event(Kind.RETRY), failed_hosts=["n2", "n1", "n2"])
        tx.prepare(tx.find(job.id), "orc-a-aaaaaa-a2", "p", TWO)
        tx.record(tx.find(job.id), Event(Kind.FAILED, 2), Event(Kind.JOB_FAILED), failed_hosts=["n2"])
    assert ledger.failed_hosts(job.id) == {1: ("n1", "n2"), 2: ("n2",)}
    assert ledger.failed_hosts("other") == {}
