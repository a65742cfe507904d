"""Orphans: attempts that were given up while a copy may still be on its way, to be looked for until some time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orc.orchestrator.ledger.database import Connection, insert
from orc.orchestrator.ledger.records import Destination, dump

_THIS = "job_id = :job_id AND attempt = :attempt AND sent_to = :sent_to"


@dataclass(frozen=True)
class Orphan:
    """Attempt of which a copy may come late, at one place. Times are seconds since the epoch."""

    job_id: str
    attempt: int
    sent_to: Destination | None  # where it may appear; `None`: where it would be sent now
    cluster: str
    owner: str
    hosts: tuple[str, ...]  # on which it may appear
    until: float  # after that nobody looks any more


def expect(
    connection: Connection,
    job_id: str,
    attempt: int,
    sent_to: Destination | None,
    *,
    hosts: Sequence[str],
    next_at: float,
    until: float,
) -> None:
    """Have the attempt looked for at *next_at*, and from then on *until* it cannot come any more.

    Hosts on which it is looked for already stay.
    """
    key = _key(job_id, attempt, sent_to)
    before = connection.tuples(f"SELECT hosts FROM late_copies WHERE {_THIS}", key)  # noqa: S608
    known = json.loads(before[0][0]) if before else []
    row = {**key, "hosts": dump(list(dict.fromkeys([*known, *hosts]))), "next_at": next_at, "until": until}
    changes = "hosts = excluded.hosts, next_at = excluded.next_at, until = excluded.until"
    conflict = f"ON CONFLICT (job_id, attempt, sent_to) DO UPDATE SET {changes}"
    insert(connection, "late_copies", row, conflict=conflict)


def postpone(connection: Connection, copy: Orphan, *, next_at: float, until: float) -> None:
    """Postpone the search; nothing where it is not searched for any more, as its job was removed meanwhile."""
    connection.execute(
        f"UPDATE late_copies SET next_at = :next_at, until = :until WHERE {_THIS}",  # noqa: S608
        {**_key(copy.job_id, copy.attempt, copy.sent_to), "next_at": next_at, "until": until},
    )


def due(connection: Connection, now: float, latest: float) -> list[Orphan]:
    """Return those that are to be looked for now. One due after *latest* was written before the clock was set back."""
    rows = connection.tuples(
        "SELECT l.job_id, l.attempt, l.sent_to, j.cluster, j.owner, l.hosts, l.until FROM late_copies l "
        "JOIN jobs j ON j.id = l.job_id WHERE l.next_at <= :now OR l.next_at > :latest ORDER BY l.next_at, l.job_id",
        {"now": now, "latest": latest},
    )
    return [
        Orphan(job, attempt, Destination.from_text(sent_to), cluster, owner, tuple(json.loads(hosts)), until)
        for job, attempt, sent_to, cluster, owner, hosts, until in rows
    ]


def next_due(connection: Connection) -> float | None:
    """Return when one is to be looked for next; `None` where none is expected."""
    at: float | None = connection.tuples("SELECT MIN(next_at) FROM late_copies")[0][0]
    return at


def forget(connection: Connection, job_id: str, attempt: int, sent_to: Destination | None) -> bool:
    """End the search; False where another process has done so already."""
    removed = connection.execute(f"DELETE FROM late_copies WHERE {_THIS}", _key(job_id, attempt, sent_to))  # noqa: S608
    return removed == 1


def _key(job_id: str, attempt: int, sent_to: Destination | None) -> dict[str, Any]:
    place = dump(sent_to.place.to_dict()) if sent_to is not None else ""
    return {"job_id": job_id, "attempt": attempt, "sent_to": place}
