"""Methods of `Client` for notifications (docs/how-to/notifications.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from orc.orchestrator.client import Client


class NotificationView(NamedTuple):
    """Notification without anything secret. Times are seconds since the epoch."""

    id: int
    job: str
    event: str
    target: str  # of a URL, nothing behind its host
    state: str  # due, sent, dead
    tries: int
    next_at: float | None  # of one that is due
    error: str
    created_at: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return self._asdict()


class NotificationCalls:
    """Methods of `Client` for notifications."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def notifications(
        self, *, job_id: str | None = None, states: Sequence[str] = (), limit: int = 100, owner: str | None = None
    ) -> list[NotificationView]:
        """Return notifications, newest first.

        Args:
            job_id: Only those about this job.
            states: Only those in one of ``due``, ``sent``, ``dead``.
            limit: Number of them at most.
            owner: Only those about jobs of this user.
        """
        from orc.orchestrator.ledger import outbox
        from orc.orchestrator.notifications.targets import shown

        with self._client.workspace.ledger.database.read() as connection:
            found = outbox.listed(connection, job_id=job_id, states=states, owner=owner, limit=limit)
        return [
            NotificationView(
                one.id,
                one.job_id,
                one.kind,
                shown(one.target),
                one.state,
                one.tries,
                one.next_at if one.state == "due" else None,
                one.last_error,
                one.created_at,
            )
            for one in found
        ]

    def retry_notifications(self, job_id: str) -> int:
        """Make the notifications about a job that were given up due again; return how many there were."""
        from orc.orchestrator.ledger import outbox

        with self._client.workspace.ledger.transaction() as tx:
            count = outbox.revive(tx.connection, job_id, tx.now)
        self._client.leave_reconciler()
        return count
