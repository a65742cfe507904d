"""Outbox of notifications: stored with the event for its subscribers, sent afterwards by any process, at least once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orc.orchestrator.ledger.database import Connection, one_of
from orc.orchestrator.ledger.records import columns_of, decoded


@dataclass(frozen=True)
class Notification:
    """Row of the outbox. Times are seconds since the epoch."""

    id: int
    event_id: int
    job_id: str
    target: str
    kind: str
    payload: Mapping[str, Any]
    state: str  # due, sent, dead
    tries: int
    next_at: float
    last_error: str
    created_at: float

    @property
    def message_id(self) -> str:
        """Id that every copy of it has, and nothing else."""
        return f"{self.job_id}-{self.event_id}-{hashlib.sha256(self.target.encode()).hexdigest()[:10]}"


_COLUMNS = columns_of(Notification)


def due(connection: Connection, now: float, limit: int) -> list[Notification]:
    """Return the messages to be sent now, the longest waiting first, *limit* at most."""
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM notifications WHERE state = 'due' AND next_at <= :now "  # noqa: S608
        f"ORDER BY next_at, id LIMIT {int(limit)}",
        {"now": now},
    )
    return [decoded(Notification, row, "payload") for row in rows]


def next_due(connection: Connection) -> float | None:
    """Return when the next notification is to be sent, `None` where none is."""
    ((at,),) = connection.tuples("SELECT min(next_at) FROM notifications WHERE state = 'due'")
    return None if at is None else float(at)


def take(connection: Connection, notification: Notification, until: float) -> bool:
    """Take it for sending: no other process finds it due before *until*. False when another was faster."""
    taken = connection.execute(
        "UPDATE notifications SET tries = tries + 1, next_at = :until "
        "WHERE id = :id AND state = 'due' AND tries = :tries",
        {"id": notification.id, "tries": notification.tries, "until": until},
    )
    return taken == 1


def sent(connection: Connection, notification_id: int) -> None:
    """Note that it has arrived."""
    connection.execute(
        "UPDATE notifications SET state = 'sent', last_error = '' WHERE id = :id", {"id": notification_id}
    )


def failed(connection: Connection, notification_id: int, error: str, next_at: float | None) -> None:
    """Note that it has not arrived; it is due again at *next_at*, never without one."""
    change = "state = 'dead'" if next_at is None else "next_at = :next_at"
    values = {"id": notification_id, "error": error} | ({} if next_at is None else {"next_at": next_at})
    change += ", last_error = :error"
    connection.execute(f"UPDATE notifications SET {change} WHERE id = :id AND state = 'due'", values)  # noqa: S608


def listed(
    connection: Connection,
    *,
    job_id: str | None = None,
    states: Sequence[str] = (),
    owner: str | None = None,
    limit: int,
) -> list[Notification]:
    """Return notifications (about a job, or jobs of *owner*, in one of *states*), newest first, *limit* at most."""
    these, parameters = one_of("state", states) if states else ("1 = 1", {})
    where = [these]
    if job_id is not None:
        where.append("job_id = :job")
        parameters["job"] = job_id
    if owner is not None:
        where.append("job_id IN (SELECT id FROM jobs WHERE owner = :owner)")
        parameters["owner"] = owner
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM notifications WHERE {' AND '.join(where)} "  # noqa: S608
        f"ORDER BY id DESC LIMIT {int(limit)}",
        parameters,
    )
    return [decoded(Notification, row, "payload") for row in rows]


def revive(connection: Connection, job_id: str, now: float) -> int:
    """Make the dead notifications about a job due again, with all their tries before them; the number of them."""
    return connection.execute(
        "UPDATE notifications SET state = 'due', tries = 0, next_at = :now WHERE job_id = :id AND state = 'dead'",
        {"id": job_id, "now": now},
    )


def counts(connection: Connection) -> dict[str, int]:
    """Return the number of notifications by state."""
    return dict(connection.tuples("SELECT state, count(*) FROM notifications GROUP BY state"))
