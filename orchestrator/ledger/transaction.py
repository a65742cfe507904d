"""Writing to the ledger: every change goes through the lifecycle and leaves an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.orchestrator.ledger import sealed_secrets
from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.errors import Conflict
from orc.orchestrator.ledger.lifecycle import Event, IllegalTransition, Kind, Position, advance
from orc.orchestrator.ledger.outbox import announce
from orc.orchestrator.ledger.queries import read_failed_hosts, read_jobs, read_reservations
from orc.orchestrator.ledger.records import JobRecord, NewJob, Reservation, dump

if TYPE_CHECKING:
    from orc.launchers.backends.base import Placement

_JSON_COLUMNS = frozenset({"handle", "hosts", "progress", "exit", "sent_to"})


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
        self.connection.execute(
            "INSERT INTO jobs (id, name, cluster, backend, state, reason, attempt, revision, created_at, updated_at, "
            "claim_owner, claim_expires_at, owner, project, priority, group_id, group_index, not_before, deadline_at, "
            "source, digests, spec) VALUES (:id, :name, :cluster, :backend, 'QUEUED', :reason, 0, 0, :now, :now, "
            ":claim_owner, :expires, :owner, :project, :priority, :group_id, :group_index, :not_before, :deadline_at, "
            ":source, :digests, :spec)",
            {
                "id": job.id,
                "name": job.name,
                "cluster": job.cluster,
                "backend": job.backend,
                "reason": reason,
                "now": self.now,
                "claim_owner": owner,
                "expires": claim_expires_at,
                "owner": job.owner,
                "project": job.project,
                "priority": job.priority,
                "group_id": job.group_id,
                "group_index": job.group_index,
                "not_before": job.not_before,
                "deadline_at": job.deadline_at,
                "source": job.source,
                "digests": dump(job.digests),
                "spec": dump(job.spec),
            },
        )
        self.connection.executemany(
            "INSERT INTO job_tags (job_id, key, value) VALUES (:id, :key, :value)",
            [{"id": job.id, "key": key, "value": value} for key, value in job.tags.items()],
        )
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
        self.connection.execute(
            "INSERT INTO attempts (job_id, number, marker, state, reason, plan_digest, prepared_at, restarts, hosts, "
            "progress) VALUES (:job, :number, :marker, :state, '', :plan, :now, 0, :hosts, '{}')",
            {
                "job": job.id,
                "number": number,
                "marker": marker,
                "state": str(after.attempt),
                "plan": plan_digest,
                "now": self.now,
                "hosts": dump(hosts),
            },
        )
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
        self.connection.executemany(
            "INSERT INTO reservations (cluster, host, job_id, attempt, node, slots, at) "
            "VALUES (:cluster, :host, :job, :attempt, :node, :slots, :at)",
            [
                {
                    "cluster": job.cluster,
                    "host": host,
                    "job": job.id,
                    "attempt": number,
                    "node": node,
                    "slots": placement.slots,
                    "at": self.now,
                }
                for node, host in enumerate(placement.hosts)
            ],
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
            self.connection.executemany(
                "INSERT INTO culprits (job_id, attempt, host) VALUES (:job, :number, :host)",
                [{"job": job.id, "number": job.number, "host": host} for host in dict.fromkeys(failed_hosts)],
            )
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
        self.connection.executemany(
            "INSERT INTO events (job_id, attempt, at, kind, data) VALUES (:job, :attempt, :at, :kind, :data)",
            [
                {"job": job_id, "attempt": e.attempt, "at": self.now, "kind": str(e.kind), "data": dump(e.data)}
                for e in events
            ],
        )
        announce(self.connection, job_id, events, self.now)
