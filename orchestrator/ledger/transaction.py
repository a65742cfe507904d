"""Writing to the ledger: every change goes through the lifecycle and leaves an event."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.orchestrator.ledger.database import Conflict, Connection, insert
from orc.orchestrator.ledger.lifecycle import Event, IllegalTransition, Kind, Position, advance
from orc.orchestrator.ledger.records import (
    JobRecord,
    JobUpdate,
    NewJob,
    QueueEntry,
    Reservation,
    columns_of_attempt,
    conditions,
    dump,
    jobs_of,
    read_failed_hosts,
    read_jobs,
    read_reservations,
    select_jobs,
)

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement

_APART_S = 1e-6  # between the times of two new jobs, whose order in the queue follows from it
_JSON_COLUMNS = frozenset({"handle", "hosts", "progress", "exit", "sent_to"})


def event_row(job_id: str, event: Event, at: float) -> dict[str, Any]:
    """Return the row of a new event."""
    return {
        "job_id": job_id, "attempt": event.attempt, "at": at, "kind": str(event.kind), "data": dump(event.data)
    }  # fmt: skip


class Transaction:
    """The changes of one transaction.

    What is not a job goes through `connection` and the functions of the tables' own modules (`tokens`, `groups`, ...).
    """

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection = connection
        self.now = now

    def enqueue(
        self,
        job: NewJob,
        reason: str = "",
        *,
        owner: str | None = None,
        claim_expires_at: float | None = None,
        ciphertext: str = "",
        request: str = "",
    ) -> JobRecord:
        """Return a new job without an attempt, which has to wait for *reason*, claimed by *owner* if given.

        *ciphertext* is that of its secrets, *request* the digest of the key of the request that makes it.
        """
        entry = QueueEntry(job, reason, ciphertext, request)
        return self.enqueue_all([entry], owner=owner, claim_expires_at=claim_expires_at)[0]

    def enqueue_all(
        self, entries: Sequence[QueueEntry], *, owner: str | None = None, claim_expires_at: float | None = None
    ) -> list[JobRecord]:
        """Return new jobs, as `enqueue`, in few statements for all. In the queue they are in the order of *entries*."""
        at = {entry.job.id: self.now + number * _APART_S for number, entry in enumerate(entries)}
        rows, histories = [], []
        for entry in entries:
            job = entry.job
            row = {name: value for name, value in vars(job).items() if name not in ("origin", "tags")}
            row |= {"digests": dump(job.digests), "spec": dump(job.spec), "state": "QUEUED", "reason": entry.reason}
            row |= {"attempt": 0, "revision": 0, "created_at": at[job.id], "updated_at": at[job.id]}
            rows.append(row | {"claim_owner": owner, "claim_expires_at": claim_expires_at})
            data = {"cluster": job.cluster, "source": job.source, "origin": job.origin}
            events = [Event(Kind.QUEUED, None, data | {"request": entry.request} if entry.request else data)]
            if entry.reason:
                events.append(Event(Kind.WAITING, None, {"reason": entry.reason}))
            histories.append((job.id, events))
        insert(self.connection, "jobs", *rows)
        jobs = [entry.job for entry in entries]
        tags = ({"job_id": job.id, "key": key, "value": value} for job in jobs for key, value in job.tags.items())
        insert(self.connection, "job_tags", *tags)
        sealed = ({"job_id": e.job.id, "sealed": e.ciphertext, "at": self.now} for e in entries if e.ciphertext)
        insert(self.connection, "sealed_secrets", *sealed)
        self._append(histories, at)
        created = self.reload_all([job.id for job in jobs])
        position = advance(Position(), Event(Kind.QUEUED))
        if wrong := [job for job in created if job.position != position]:
            raise IllegalTransition(f"a new job is {wrong[0].position}")
        return created

    def prepare(self, job: JobRecord, marker: str, plan_digest: str, placement: Placement | None = None) -> JobRecord:
        """Return the next attempt of *job*, durable before anything is sent, with the hosts of *placement* kept for it.

        Raises `Conflict`, `IllegalTransition`.
        """
        (prepared,) = self.prepare_all([(job, marker, plan_digest)], list(placement.hosts) if placement else [])
        if placement:
            self._reserve(job, prepared.number, placement)
        return prepared

    def prepare_all(self, attempts: Sequence[tuple[JobRecord, str, str]], hosts: Sequence[str] = ()) -> list[JobRecord]:
        """Return the next attempts of jobs, given with their markers and the digests of their plans; all or none.

        Raises `Conflict`, `IllegalTransition`.
        """
        found = select_jobs(self.connection, "j.id, j.revision, j.spec", [job.id for job, _, _ in attempts])
        specs = {job_id: spec for job_id, _, spec in found}
        current = {(job_id, revision) for job_id, revision, _ in found}
        batch, rows, histories = Batch(), [], []
        for job, _, _ in attempts:
            if (job.id, job.revision) not in current:
                raise Conflict(job.id)
        for job, marker, plan_digest in attempts:
            number = job.number + 1
            data = {"marker": marker, "plan": plan_digest, "trees": dict(job.digests)}
            event = Event(Kind.PREPARED, number, {**data, "hosts": list(hosts)} if hosts else data)
            after = advance(job.position, event)
            changed = {"state": after.job, "attempt": number, "reason": "", "next_attempt_at": None}
            self._update_job(batch, job, changed)
            row = {"job_id": job.id, "number": number, "marker": marker, "state": str(after.attempt), "reason": ""}
            row |= {"plan_digest": plan_digest, "prepared_at": self.now, "restarts": 0}
            row |= columns_of_attempt({**vars(job), "spec": specs[job.id]}, len(hosts))
            rows.append({**row, "hosts": dump(list(hosts)), "progress": "{}"})
            histories.append((job.id, [event]))
        batch.run(self.connection)
        insert(self.connection, "attempts", *rows)
        self._append(histories)
        return self.reload_all([job.id for job, _, _ in attempts])

    def place(self, job: JobRecord, placement: Placement) -> JobRecord:
        """Keep the hosts of *placement* for the PREPARED attempt of *job*, instead of those it may have had."""
        hosts = list(placement.hosts)
        changed = {"reason": "", "next_attempt_at": None}
        event = Event(Kind.PLACED, job.number, {"hosts": hosts})
        placed = self.record(job, event, job_set=changed, attempt_set={"hosts": hosts}, vacate=True)
        self._reserve(placed, placed.number, placement)
        return placed

    def reservations(self, cluster: str) -> list[Reservation]:
        """Return the hosts of *cluster* that attempts hold."""
        return read_reservations(self.connection, cluster, None)

    def failed_hosts(self, job_id: str) -> dict[int, tuple[str, ...]]:
        """Hosts that were to blame for node failures of the job, by attempt."""
        return read_failed_hosts(self.connection, job_id)

    def unplaced(self, cluster: str) -> list[tuple[str, float, int, str]]:
        """Return the jobs of *cluster* that have no hosts and want some now: id, age, priority and owner, in no order.

        That is little of each: most callers look at the first few only.
        """
        return self.connection.tuples(
            "SELECT j.id, j.created_at, j.priority, j.owner FROM jobs j WHERE j.cluster = :cluster "
            "AND j.cancel_requested_at IS NULL AND (j.next_attempt_at IS NULL OR j.next_attempt_at <= :now) "
            "AND (j.state = 'QUEUED' OR (j.state = 'PREPARED' "
            "AND NOT EXISTS (SELECT 1 FROM reservations r WHERE r.job_id = j.id AND r.attempt = j.attempt)))",
            {"cluster": cluster, "now": self.now},
        )

    def specs(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Return the specifications of jobs, as JSON texts."""
        return dict(select_jobs(self.connection, "j.id, j.spec", job_ids))

    def _reserve(self, job: JobRecord, number: int, placement: Placement) -> None:
        held = {"cluster": job.cluster, "job_id": job.id, "attempt": number, "slots": placement.slots, "at": self.now}
        insert(
            self.connection,
            "reservations",
            *({**held, "host": host, "node": node} for node, host in enumerate(placement.hosts)),
        )

    def record(
        self,
        job: JobRecord,
        *events: Event,
        job_set: Mapping[str, Any] | None = None,
        attempt_set: Mapping[str, Any] | None = None,
        failed_hosts: Sequence[str] = (),
        vacate: bool = False,
    ) -> JobRecord:
        """Append *events* and set columns of the job and of its newest attempt; the job as it is afterwards.

        States follow from the events, and so does what is kept for the attempt: its end gives its hosts back, as does
        *vacate*. *failed_hosts* are hosts to blame for its end. Raises `Conflict` when the job has changed since *job*
        was read, and `IllegalTransition` for an event that the lifecycle forbids; nothing of this job is changed then.
        """
        update = JobUpdate(events, job_set or {}, attempt_set or {}, tuple(failed_hosts), vacate)
        if not (written := self.record_all([(job, update)])):
            raise Conflict(job.id)
        return written[0]

    def record_all(self, updates: Sequence[tuple[JobRecord, JobUpdate]]) -> list[JobRecord]:
        """Record the updates of many jobs, each at most once among them; as `record`, in few statements for all.

        Jobs that have changed since they were read are left as they are, and out of what is returned.
        """
        # As they are now, and stay until this transaction ends: it alone writes.
        revisions = dict(select_jobs(self.connection, "j.id, j.revision", [job.id for job, _ in updates]))
        current = [(job, made) for job, made in updates if revisions.pop(job.id, None) == job.revision]
        after = {job.id: functools.reduce(advance, made.events, job.position) for job, made in current}
        batch = Batch()
        for job, made in current:
            self._update_job(batch, job, {"state": after[job.id].job, **made.job_set})
        for job, made in current:
            position = after[job.id]
            changes = {"state": position.attempt, **made.attempt_set} if job.attempt else {}
            if changes.get("hosts"):
                changes["nodes"] = len(changes["hosts"])
            if changes:
                self._set(batch, "attempts", changes, "job_id = :key_job AND number = :key_number", job.id, job.number)
            if changes and (made.vacate or (position.attempt is not None and position.attempt.terminal)):
                gone = {"job": job.id, "number": job.number}
                batch.add("DELETE FROM reservations WHERE job_id = :job AND attempt = :number", gone)
            for host in dict.fromkeys(made.failed_hosts) if changes else ():
                batch.add(
                    "INSERT INTO culprits (job_id, attempt, host) VALUES (:job, :number, :host)",
                    {"job": job.id, "number": job.number, "host": host},
                )
            if position.job is not None and position.job.terminal:
                batch.add("DELETE FROM sealed_secrets WHERE job_id = :job", {"job": job.id})
        batch.run(self.connection)
        self._append([(job.id, made.events) for job, made in current])
        return self.reload_all([job.id for job, _ in current])

    def find(self, job_id: str) -> JobRecord | None:
        """Return the job as it is now."""
        return next(iter(read_jobs(self.connection, "j.id = :id", {"id": job_id})), None)

    def reload_all(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """Return jobs as they are now, in the order of their ids."""
        found = {job.id: job for job in jobs_of(self.connection, job_ids)}
        return [found[job_id] for job_id in job_ids]

    def _update_job(self, batch: Batch, job: JobRecord, changes: Mapping[str, Any]) -> None:
        values = {**changes, "updated_at": self.now, "revision": job.revision + 1}
        self._set(batch, "jobs", values, "id = :key_job AND revision = :key_number", job.id, job.revision)

    def _set(self, batch: Batch, table: str, changes: Mapping[str, Any], where: str, job_id: str, number: int) -> None:
        values = {name: dump(v) if name in _JSON_COLUMNS and v is not None else v for name, v in changes.items()}
        values = {name: str(v) if name in ("state", "cause") and v is not None else v for name, v in values.items()}
        assignments = ", ".join(f"{name} = :{name}" for name in values)
        batch.add(
            f"UPDATE {table} SET {assignments} WHERE {where}",  # noqa: S608
            {**values, "key_job": job_id, "key_number": number},
        )

    def _append(self, histories: Sequence[tuple[str, Sequence[Event]]], at: Mapping[str, float] | None = None) -> None:
        times = at or {}
        rows = [
            event_row(job_id, event, times.get(job_id, self.now)) for job_id, events in histories for event in events
        ]
        insert(self.connection, "events", *rows)
        announce(self.connection, histories, self.now)


class Batch:
    """Statements of many changes that do not depend on each other: each text is run once, for all its parameters."""

    def __init__(self) -> None:
        self._parameters: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def add(self, sql: str, parameters: Mapping[str, Any]) -> None:
        """Add one statement."""
        self._parameters[sql].append(parameters)

    def run(self, connection: Connection) -> None:
        """Run all, in the order in which their texts came first."""
        for sql, parameters in self._parameters.items():
            connection.executemany(sql, parameters)


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
            put_notification(connection, event_id, job_id, target, words[0], payload, now)


def _listeners(subscriptions: Iterable[Mapping[str, object]], words: Sequence[str]) -> list[str]:
    found = (str(entry["to"]) for entry in subscriptions if not set(map(str, _events(entry))).isdisjoint(words))
    return list(dict.fromkeys(found))


def _events(entry: Mapping[str, object]) -> Sequence[object]:
    events = entry["on"]
    return events if isinstance(events, list) else []


def put_notification(
    connection: Connection, event_id: int, job_id: str, target: str, kind: str, payload: Mapping[str, Any], now: float
) -> None:
    """Store a notification that is due at once, unless *target* has one of this event already."""
    row = {"event_id": event_id, "job_id": job_id, "target": target, "kind": kind, "payload": dump(payload)}
    row |= {"state": "due", "tries": 0, "next_at": now, "last_error": "", "created_at": now}
    insert(connection, "notifications", row, conflict="ON CONFLICT (event_id, target) DO NOTHING")
