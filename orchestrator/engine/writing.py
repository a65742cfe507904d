"""Writing of updates: events and columns of a job in one transaction, as long as the job is what was looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orc.orchestrator.engine.updates import JobUpdate
from orc.orchestrator.ledger.errors import Conflict
from orc.orchestrator.ledger.records import JobRecord

if TYPE_CHECKING:
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


def write(tx: Transaction, job: JobRecord, made: JobUpdate) -> JobRecord:
    """Write *made* about *job*. Raises what `Transaction.record` raises."""
    return tx.record(
        job,
        *made.events,
        job_set=made.job_set,
        attempt_set=made.attempt_set,
        failed_hosts=made.failed_hosts,
        vacate=made.vacate,
    )


def apply(
    ws: Workspace,
    job: JobRecord,
    allowed: Callable[[JobRecord], bool],
    change: Callable[[JobRecord, float], JobUpdate],
) -> JobRecord:
    """Write *change* about the attempt that *job* shows, as long as *allowed* holds for the job as it is now."""
    while True:
        try:
            with ws.ledger.transaction() as tx:
                current = tx.reload(job)
                if current.number != job.number or not allowed(current):
                    return current
                made = change(current, tx.now)
                if not made:
                    return current
                return write(tx, current, made)
        except Conflict:
            continue  # somebody wrote between our look and our write: look again
