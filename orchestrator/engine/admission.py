"""Admission: the decision that a QUEUED job may be sent now, and the reason why not.

`CHECKS` is the whole truth: each check looks at one job within one `Admission`, which is one look at the ledger, and
returns a `Hold` or nothing. The reconciler asks before it drives a job; the transaction that makes an attempt PREPARED
asks again, so that two passes at once cannot both take the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


@dataclass(frozen=True)
class Hold:
    """Reason for which a job is not sent now; one line for people that begins with "waiting"."""

    reason: str


@dataclass
class Admission:
    """One look at the ledger, within one transaction: what the checks share is read once."""

    ws: Workspace
    tx: Transaction

    def hold(self, job: JobRecord) -> Hold | None:
        """Return why *job* is not sent now; `None` when it may be."""
        for check in CHECKS:
            if found := check(self, job):
                return found
        return None


Check = Callable[[Admission, "JobRecord"], Hold | None]

CHECKS: tuple[Check, ...] = ()
