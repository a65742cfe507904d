"""Transactions of each driver: what is undone with what, and what a job and an attempt have of their own."""

from __future__ import annotations

import pytest
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Placement
from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob

A, B = "a-aaaaaa", "b-bbbbbb"
TWO = Placement(("n1", "n2"), 2)


def prepare(tx, job_id=A, marker=f"orc-{A}-a1", placement=None):
    new = NewJob(job_id, "digits", "local", "fake", "job.yaml", {"args": ["é", "'; DROP TABLE jobs; --"]}, {}, {})
    return create_prepared(tx, new, marker, "p" * 64, "me", tx.now + 60, placement)


def test_one_refused_change_leaves_the_others_of_its_transaction(ledger):
    with ledger.transaction() as tx:
        stale, fresh = prepare(tx), prepare(tx, B, f"orc-{B}-a1")
    with ledger.transaction() as tx:
        tx.record(stale, Event(Kind.SUBMITTING, 1))
    with ledger.transaction() as tx:
        with pytest.raises(Conflict):
            tx.record(stale, Event(Kind.SUBMITTING, 1))
        tx.record(fresh, Event(Kind.SUBMITTING, 1))
    assert [job.state for job in ledger.jobs([A, B])] == ["SUBMITTING", "SUBMITTING"]
    assert len(ledger.events(A)) == 3


def test_a_failure_in_a_transaction_undoes_all_of_it(ledger):
    def prepare_then_fail():
        with ledger.transaction() as tx:
            prepare(tx)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare_then_fail()
    assert ledger.job(A) is None
    with ledger.transaction() as tx:
        prepare(tx)


def test_two_jobs_cannot_have_one_id_and_two_attempts_cannot_have_one_marker(ledger):
    with ledger.transaction() as tx:
        prepare(tx)
    with pytest.raises(LedgerError, match=r"(?i)unique"), ledger.transaction() as tx:
        prepare(tx, marker="other")
    with pytest.raises(LedgerError, match=r"(?i)unique"), ledger.transaction() as tx:
        prepare(tx, B)
    assert ledger.job(B) is None


def test_failed_hosts_are_kept_by_attempt_and_named_once(ledger):
    with ledger.transaction() as tx:
        tx.record(prepare(tx, placement=TWO), Event(Kind.FAILED, 1), Event(Kind.RETRY), failed_hosts=["n2", "n1", "n2"])
        tx.prepare(tx.find(A), f"orc-{A}-a2", "p", TWO)
        tx.record(tx.find(A), Event(Kind.FAILED, 2), Event(Kind.JOB_FAILED), failed_hosts=["n2"])
    assert ledger.failed_hosts(A) == {1: ("n1", "n2"), 2: ("n2",)}
    assert ledger.failed_hosts("other") == {}
