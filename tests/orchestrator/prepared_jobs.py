"""Jobs in a ledger whose first attempt is PREPARED."""

from __future__ import annotations

from orc.launchers.backends.base import Placement
from orc.orchestrator.ledger.records import JobRecord, NewJob
from orc.orchestrator.ledger.transaction import Transaction


def create_prepared(
    tx: Transaction,
    job: NewJob,
    marker: str,
    plan_digest: str,
    owner: str,
    claim_expires_at: float,
    placement: Placement | None = None,
) -> JobRecord:
    """Return a new job with its first attempt PREPARED and claimed by *owner*."""
    return tx.prepare(tx.enqueue(job, owner=owner, claim_expires_at=claim_expires_at), marker, plan_digest, placement)
