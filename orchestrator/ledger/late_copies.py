"""Late copies: attempts that were given up while a copy may still be on its way, to be looked for until some time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.records import dump


@dataclass(frozen=True)
class LateCopy:
    """Attempt of which a copy may come late. Times are seconds since the epoch."""

    job_id: str
    attempt: int
    cluster: str
    owner: str
    hosts: tuple[str, ...]  # on which it may appear
    until: float  # after that nobody looks any more


def expect(
    connection: Connection, job_id: str, attempt: int, *, hosts: Sequence[str], next_at: float, until: float
) -> None:
    """Have the attempt looked for at *next_at*, and from then on *until* it cannot come any more."""
    connection.execute(
        "INSERT INTO late_copies (job_id, attempt, hosts, next_at, until) "
        "VALUES (:job, :attempt, :hosts, :next_at, :until) ON CONFLICT (job_id, attempt) "
        "DO UPDATE SET hosts = excluded.hosts, next_at = excluded.next_at, until = excluded.until",
        {"job": job_id, "attempt": attempt, "hosts": dump(list(hosts)), "next_at": next_at, "until": until},
    )


def due(connection: Connection, now: float, latest: float) -> list[LateCopy]:
    """Return those that are to be looked for now. One due after *latest* was written before the clock was set back."""
    rows = connection.tuples(
        "SELECT l.job_id, l.attempt, j.cluster, j.owner, l.hosts, l.until FROM late_copies l "
        "JOIN jobs j ON j.id = l.job_id WHERE l.next_at <= :now OR l.next_at > :latest ORDER BY l.next_at, l.job_id",
        {"now": now, "latest": latest},
    )
    return [
        LateCopy(job, attempt, cluster, owner, tuple(json.loads(hosts)), until)
        for job, attempt, cluster, owner, hosts, until in rows
    ]


def next_due(connection: Connection) -> float | None:
    """Return when one is to be looked for next; `None` where none is expected."""
    at: float | None = connection.tuples("SELECT MIN(next_at) FROM late_copies")[0][0]
    return at


def forget(connection: Connection, job_id: str, attempt: int) -> bool:
    """Look for it no more; False where somebody else has said so already."""
    removed = connection.execute(
        "DELETE FROM late_copies WHERE job_id = :job AND attempt = :attempt", {"job": job_id, "attempt": attempt}
    )
    return removed == 1
