from __future__ import annotations

import pytest
from prepared_jobs import create_prepared

from orc.orchestrator.ledger.database import Conflict, LedgerError
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import Ledger


def new_job(job_id: str = "digits-aaaaaa", **changes) -> NewJob:
    values = {
        "id": job_id,
        "name": "digits",
        "cluster": "local",
        "backend": "fake",
        "source": "job.yaml",
        "spec": {"name": "digits", "args": ["é", "'; DROP TABLE jobs; --"]},
        "digests": {"code": "c" * 64, "runtime": "r" * 64},
        "tags": {},
    }
    return NewJob(**{**values, **changes})


def create(ledger: Ledger, job_id: str = "digits-aaaaaa", **changes):
    with ledger.transaction() as tx:
        return create_prepared(tx, new_job(job_id, **changes), f"orc-{job_id}-a1", "p" * 64, "me", tx.now + 60)


def test_one_refused_change_leaves_the_others_of_its_transaction(ledger):
    stale, fresh = create(ledger, "a-aaaaaa"), create(ledger, "b-bbbbbb")
    with ledger.transaction() as tx:
        tx.record(stale, Event(Kind.SUBMITTING, 1))
    with ledger.transaction() as tx:
        with pytest.raises(Conflict):
            tx.record(stale, Event(Kind.SUBMITTING, 1))
        tx.record(fresh, Event(Kind.SUBMITTING, 1))
    assert [job.state for job in ledger.jobs(["a-aaaaaa", "b-bbbbbb"])] == ["SUBMITTING", "SUBMITTING"]
    assert len(ledger.events("a-aaaaaa")) == 3


def test_a_failure_in_a_transaction_undoes_all_of_it(ledger):
    def create_then_fail() -> None:
        with ledger.transaction() as tx:
            create_prepared(tx, new_job(), "orc-digits-aaaaaa-a1", "p", "me", 0.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        create_then_fail()
    assert ledger.job("digits-aaaaaa") is None
    create(ledger)


def test_two_jobs_cannot_have_one_id_and_two_attempts_cannot_have_one_marker(ledger):
    create(ledger)
    with pytest.raises(LedgerError, match=r"(?i)unique"):
        create(ledger)
    with pytest.raises(LedgerError, match=r"(?i)unique"), ledger.transaction() as tx:
        create_prepared(tx, new_job("other-bbbbbb"), "orc-digits-aaaaaa-a1", "p", "me", 0.0)
    assert ledger.job("other-bbbbbb") is None
