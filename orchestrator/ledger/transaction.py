"""Writing to the ledger: every change goes through the lifecycle and leaves an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.orchestrator.ledger import sealed_secrets
from orc.orchestrator.ledger.database import Connection, insert
from orc.orchestrator.ledger.errors import Conflict
from orc.orchestrator.ledger.lifecycle import Event, IllegalTransition, Kind, Position, advance
from orc.orchestrator.ledger.outbox import announce
from orc.orchestrator.ledger.queries import read_failed_hosts, read_jobs, read_reservations
from orc.orchestrator.ledger.records import JobRecord, NewJob, Reservation, dump

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement

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
        row = {name: value for name, value in vars(job).items() if name not in ("origin", "tags")}
        row |= {"digests": dump(job.digests), "spec": dump(job.spec), "state": "QUEUED", "reason": reason}
        row |= {"attempt": 0, "revision": 0, "created_at": self.now, "updated_at": self.now}
        row |= {"claim_owner": owner, "claim_expires_at": claim_expires_at}
        insert(self.connection, "jobs", row)
        tags = ({"job_id": job.id, "key": key, "value": value} for key, value in job.tags.items())
        insert(self.connection, "job_tags", *tags)
        position = advance(Position(), Event(Kind.QUEUED))
        data = {"cluster": job.cluster, "source": job.source, "origin": job.origin}
        if request:
            data["request"] = request
        if ciphertext:
            sealed_secrets.put(self.connection, job.id, ciphertext, self.now)
        events = [Event(Kind.QUEUED, None, data)]
        if reason:
            events.append(Event(Kind.WAITING, None, {"reason": reason}))
        self._append(job.id, events)
        created = self._reload(job.id)
        if created.position != position:
            raise IllegalTransition(f"a new job is {created.position}")
        return created

    def prepare(self, job: JobRecord, marker: str, plan_digest: str, placement: Placement | None = None) -> JobRecord:
        """Return the next attempt of *job*, durable before anything is sent, with the hosts of *placement* kept for it.

        Raises `Conflict`, `IllegalTransition`.
        """
        number = job.number + 1
        hosts = list(placement.hosts) if placement else []
        data = {"marker": marker, "plan": plan_digest, "trees": dict(job.digests)}
        event = Event(Kind.PREPARED, number, {**data, "hosts": hosts} if hosts else data)
        after = advance(job.position, event)
        self._update_job(job, {"state": after.job, "attempt": number, "reason": "", "next_attempt_at": None})
        row = {"job_id": job.id, "number": number, "marker": marker, "state": str(after.attempt), "reason": ""}
        row |= {"plan_digest": plan_digest, "prepared_at": self.now, "restarts": 0}
        insert(self.connection, "attempts", {**row, "hosts": dump(hosts), "progress": "{}"})
        self._append(job.id, [event])
        if placement:
            self._reserve(job, number, placement)
        return self._reload(job.id)

    def place(self, job: JobRecord, placement: Placement) -> JobRecord:
        """Keep the hosts of *placement* for the PREPARED attempt of *job*, instead of those it may have had."""
        hosts = list(placement.hosts)
        changed = {"reason": "", "next_attempt_at": None}
        event = Event(Kind.PLACED, job.number, {"hosts": hosts})
        placed = self.record(job, event, job_set=changed, attempt_set={"hosts": hosts}, vacate=True)
        self._reserve(placed, placed.number, placement)
        return placed

    def lock(self, cluster: str) -> None:
        """Block all other transactions that place jobs on *cluster* until this one ends."""
        self.connection.lock(f"place:{cluster}")

    def reservations(self, cluster: str) -> list[Reservation]:
        """Return the hosts of *cluster* that attempts hold."""
        return read_reservations(self.connection, cluster, None)

    def failed_hosts(self, job_id: str) -> dict[int, tuple[str, ...]]:
        """Hosts that were to blame for node failures of the job, by attempt."""
        return read_failed_hosts(self.connection, job_id)

    def unplaced(self, cluster: str) -> list[tuple[JobRecord, str]]:
        """Return the jobs of *cluster* that have no hosts and want some, oldest first, with their specifications.

        These are the JSON text: most callers look at the first few only.
        """
        jobs = read_jobs(
            self.connection,
            "j.cluster = :cluster AND j.cancel_requested_at IS NULL AND (j.state = 'QUEUED' OR (j.state = 'PREPARED' "
            "AND NOT EXISTS (SELECT 1 FROM reservations r WHERE r.job_id = j.id AND r.attempt = j.attempt)))",
            {"cluster": cluster},
        )
        query = "SELECT id, spec FROM jobs WHERE cluster = :cluster AND state IN ('QUEUED', 'PREPARED')"
        specs = dict(self.connection.tuples(query, {"cluster": cluster})) if jobs else {}
        return [(job, specs[job.id]) for job in sorted(jobs, key=lambda job: (job.created_at, job.id))]

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
        after = job.position
        for event in events:
            after = advance(after, event)
        self._update_job(job, {"state": after.job, **(job_set or {})})
        changes = {"state": after.attempt, **(attempt_set or {})} if job.attempt else {}
        if changes:
            self._set("attempts", changes, "job_id = :key_job AND number = :key_number", job.id, job.number)
            if vacate or (after.attempt is not None and after.attempt.terminal):
                self.connection.execute(
                    "DELETE FROM reservations WHERE job_id = :job AND attempt = :number",
                    {"job": job.id, "number": job.number},
                )
            blamed = ({"job_id": job.id, "attempt": job.number, "host": host} for host in dict.fromkeys(failed_hosts))
            insert(self.connection, "culprits", *blamed)
        self._append(job.id, events)
        if after.job is not None and after.job.terminal:
            sealed_secrets.remove(self.connection, job.id)
        return self._reload(job.id)

    def find(self, job_id: str) -> JobRecord | None:
        """Return the job as it is now."""
        return next(iter(read_jobs(self.connection, "j.id = :id", {"id": job_id})), None)

    def reload(self, job: JobRecord) -> JobRecord:
        """Return the job as it is now."""
        return self._reload(job.id)

    def _reload(self, job_id: str) -> JobRecord:
        (job,) = read_jobs(self.connection, "j.id = :id", {"id": job_id})
        return job

    def _update_job(self, job: JobRecord, changes: Mapping[str, Any]) -> None:
        values = {**changes, "updated_at": self.now, "revision": job.revision + 1}
        # The first write of a change, and the only one that can find somebody else was faster.
        if self._set("jobs", values, "id = :key_job AND revision = :key_number", job.id, job.revision) != 1:
            raise Conflict(job.id)

    def _set(self, table: str, changes: Mapping[str, Any], where: str, job_id: str, number: int) -> int:
        values = {name: dump(v) if name in _JSON_COLUMNS and v is not None else v for name, v in changes.items()}
        values = {name: str(v) if name in ("state", "cause") and v is not None else v for name, v in values.items()}
        assignments = ", ".join(f"{name} = :{name}" for name in values)
        return self.connection.execute(
            f"UPDATE {table} SET {assignments} WHERE {where}",  # noqa: S608
            {**values, "key_job": job_id, "key_number": number},
        )

    def _append(self, job_id: str, events: Sequence[Event]) -> None:
        insert(self.connection, "events", *(event_row(job_id, event, self.now) for event in events))
        announce(self.connection, job_id, events, self.now)
