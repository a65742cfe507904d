"""Retention: the snapshots that the ledger's jobs still need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orc.orchestrator.ledger import dependencies, schedules
from orc.orchestrator.ledger.lifecycle import TERMINAL_JOB

if TYPE_CHECKING:
    from orc.orchestrator.ledger.store import Ledger


@dataclass(frozen=True)
class SnapshotNeeds:
    """For `orc gc`."""

    digests: frozenset[str]  # snapshots of jobs that run or may run again
    ended: frozenset[str]  # jobs that will not change any more


def snapshot_needs(ledger: Ledger) -> SnapshotNeeds:
    """Return the needs of all jobs, on whatever cluster. Raises `LedgerError`."""
    with ledger.database.read() as connection:
        rows = connection.tuples("SELECT id, state, digests FROM jobs")
        waited_for = {one.on_job for one, _ in dependencies.of_jobs(connection)}  # their outputs may still be taken
        scheduled = [schedule.digests for schedule in schedules.all_schedules(connection)]
    ended = frozenset(job for job, state, _ in rows if state in TERMINAL_JOB)
    needed = [json.loads(text) for job, _, text in rows if job not in ended] + scheduled
    digests = frozenset(digest for digests in needed for digest in digests.values())
    return SnapshotNeeds(digests, ended - waited_for)
