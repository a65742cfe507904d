"""Subscriptions of jobs: what of their events goes into the outbox, in the transaction of the event."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from orc.orchestrator.ledger import outbox
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.lifecycle import Event, Kind

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


def announce(connection: Connection, job_id: str, events: Sequence[Event], now: float) -> None:
    """Put the messages of the job's subscriptions about *events*, which were just appended, into the outbox."""
    if not any(event.kind in _WORDS for event in events):
        return
    ((name, cluster, owner, project, attempt, text),) = connection.tuples(
        "SELECT name, cluster, owner, project, attempt, spec FROM jobs WHERE id = :id", {"id": job_id}
    )
    if '"notify":[{' not in text:  # canonical JSON; nobody listens to most jobs
        return
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
            outbox.put(
                connection, event_id=event_id, job_id=job_id, target=target, kind=words[0], payload=payload, now=now
            )


def _listeners(subscriptions: Iterable[Mapping[str, object]], words: Sequence[str]) -> list[str]:
    found = (str(entry["to"]) for entry in subscriptions if not set(map(str, _events(entry))).isdisjoint(words))
    return list(dict.fromkeys(found))


def _events(entry: Mapping[str, object]) -> Sequence[object]:
    events = entry["on"]
    return events if isinstance(events, list) else []
