from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prepared_jobs import create_prepared

from orc.orchestrator.ledger.lifecycle import ATTEMPT_KINDS, Event, IllegalTransition, Kind, advance, fold
from orc.orchestrator.ledger.opening import open_database
from orc.orchestrator.ledger.records import NewJob
from orc.orchestrator.ledger.store import Ledger


def history(ledger: Ledger, job_id: str):
    return fold(Event(Kind(e.kind), e.attempt, e.data) for e in ledger.events(job_id))


class RandomHistories(RuleBasedStateMachine):
    """Whatever is tried, the columns say what the events say, and what is refused leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.ledger = Ledger(open_database(Path(self.directory.name)), lambda: 1.0)
        self.ids: list[str] = []

    @initialize()
    def first(self) -> None:
        self.create()

    @rule()
    def create(self) -> None:
        if len(self.ids) < 3:
            self.ids.append(f"job-{len(self.ids)}")
            job = NewJob(self.ids[-1], "digits", "local", "fake", "job.yaml", {"name": "digits"}, {"code": "c"}, {})
            with self.ledger.transaction() as tx:
                create_prepared(tx, job, f"orc-{job.id}-a1", "plan", "me", tx.now + 60)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), kind=st.sampled_from(sorted(Kind)), off=st.sampled_from([0, 0, 0, 0, 1]))
    def record(self, data, kind, off) -> None:
        job = self.ledger.job(data.draw(st.sampled_from(self.ids)))
        number = job.number + off if kind in ATTEMPT_KINDS else None
        event = Event(kind, number, {"n": 1})
        before = self.ledger.events(job.id)
        try:
            if kind is Kind.PREPARED:
                with self.ledger.transaction() as tx:
                    tx.prepare(job, f"orc-{job.id}-a{job.number + 1}", "plan")
                event = Event(kind, job.number + 1)
            else:
                with self.ledger.transaction() as tx:
                    tx.record(job, event, attempt_set={"reason": kind})
        except IllegalTransition:
            assert self.ledger.job(job.id) == job
            assert self.ledger.events(job.id) == before
        else:
            assert self.ledger.job(job.id).position == advance(job.position, event)
            assert len(self.ledger.events(job.id)) == len(before) + 1

    @invariant()
    def columns_equal_events(self) -> None:
        for job_id in self.ids:
            told = history(self.ledger, job_id)
            assert told.job == self.ledger.job(job_id).state
            assert told.attempts == {a.number: a.state for a in self.ledger.attempts(job_id)}

    def teardown(self) -> None:
        self.ledger.close()
        self.directory.cleanup()


RandomHistories.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRandomHistories = RandomHistories.TestCase
