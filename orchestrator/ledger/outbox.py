"""Outbox of notifications: stored with the event for its subscribers, sent afterwards by any process, at least once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orc.orchestrator.ledger.database import Connection, insert, one_of
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.queries import conditions
from orc.orchestrator.ledger.records import columns_of, decoded, dump


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


def put(
    connection: Connection, event_id: int, job_id: str, target: str, kind: str, payload: Mapping[str, Any], now: float
) -> None:
    """Store a notification that is due at once, unless *target* has one of this event already."""
    row = {"event_id": event_id, "job_id": job_id, "target": target, "kind": kind, "payload": dump(payload)}
    row |= {"state": "due", "tries": 0, "next_at": now, "last_error": "", "created_at": now}
    insert(connection, "notifications", row, conflict="ON CONFLICT (event_id, target) DO NOTHING")


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


# The word of each event first, then others under which it is subscribed to.
_WORDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.RUNNING: ("start",),
    Kind.REQUEUED: ("requeue",),
    Kind.RETRY: ("requeue",),
    Kind.STALLED: ("stall",),
    Kind.JOB_SUCCEEDED: ("success", "end"),
    Kind.JOB_FAILED: ("failure", "end"),
    Kind.JOB_CANCELLED: ("cancelled", "end"),
}
_STATES = {Kind.JOB_SUCCEEDED: "SUCCEEDED", Kind.JOB_FAILED: "FAILED", Kind.JOB_CANCELLED: "CANCELLED"}


def announce(connection: Connection, histories: Sequence[tuple[str, Sequence[Event]]], now: float) -> None:
    """Put the messages of jobs' subscriptions about their events, which were just appended, into the outbox."""
    told = {job_id: events for job_id, events in histories if any(event.kind in _WORDS for event in events)}
    for condition, parameters in conditions(list(told)):
        rows = connection.tuples(
            "SELECT j.id, j.name, j.cluster, j.owner, j.project, j.attempt, j.spec FROM jobs j "  # noqa: S608
            f"WHERE {condition} AND j.spec LIKE :subscribed",
            parameters | {"subscribed": '%"notify":[{%'},  # canonical JSON; most jobs have no subscription
        )
        for row in rows:
            _announce(connection, row, told[row[0]], now)


def _announce(connection: Connection, row: Sequence[Any], events: Sequence[Event], now: float) -> None:
    job_id, name, cluster, owner, project, attempt, text = row
    subscriptions = json.loads(text)["notify"]
    ids = connection.tuples(
        "SELECT id FROM events WHERE job_id = :id ORDER BY id DESC LIMIT :count", {"id": job_id, "count": len(events)}
    )
    about = {"job": job_id, "name": name, "cluster": cluster, "owner": owner, "project": project}
    for (event_id,), event in zip(reversed(ids), events, strict=True):
        if not (words := _WORDS.get(event.kind)):
            continue
        payload = {
            **about,
            "event": words[0],
            "state": _STATES.get(event.kind, ""),
            "attempt": event.attempt or attempt,
            "at": now,
            "reason": str(event.data.get("reason") or ""),
        }
        for target in _listeners(subscriptions, words):
            put(connection, event_id, job_id, target, words[0], payload, now)


def _listeners(subscriptions: Iterable[Mapping[str, object]], words: Sequence[str]) -> list[str]:
    found = (str(entry["to"]) for entry in subscriptions if not set(map(str, _events(entry))).isdisjoint(words))
    return list(dict.fromkeys(found))


def _events(entry: Mapping[str, object]) -> Sequence[object]:
    events = entry["on"]
    return events if isinstance(events, list) else []
