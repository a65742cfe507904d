"""The ledger: what is known about all jobs, and transactions that change it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from orc.orchestrator.ledger.database import Database
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.lifecycle import Kind
from orc.orchestrator.ledger.queries import conditions, read_failed_hosts, read_jobs, read_reservations
from orc.orchestrator.ledger.records import AttemptRecord, EventRecord, JobRecord, Reservation
from orc.orchestrator.ledger.transaction import Transaction


class Ledger:
    """Jobs, attempts and events. One instance per thread."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.database = database
        self._clock = clock

    def close(self) -> None:
        """Give up the connection."""
        self.database.close()

    @property
    def volatile(self) -> str:
        """Why this is a copy in memory whose changes are forgotten; empty when it is the ledger itself."""
        return getattr(self.database, "volatile", "")

    # -- reading

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job as it is now."""
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """These jobs, oldest first; unknown ids are left out."""
        return self._select(job_ids, active_only=False)

    def active(self, job_ids: Sequence[str] | None = None) -> list[JobRecord]:
        """Return the jobs (of *job_ids*, if given) that have not ended, oldest first."""
        return self._select(job_ids, active_only=True)

    def any_active(self) -> bool:
        """Return True when a job has not ended."""
        ((condition, parameters),) = conditions(None, active_only=True)
        with self.database.read() as connection:
            return bool(connection.tuples(f"SELECT 1 FROM jobs j WHERE {condition} LIMIT 1", parameters))  # noqa: S608

    def _select(self, job_ids: Sequence[str] | None, *, active_only: bool) -> list[JobRecord]:
        found: list[JobRecord] = []
        with self.database.read() as connection:
            for condition, parameters in conditions(job_ids, active_only=active_only):
                found += read_jobs(connection, condition, parameters)
        return sorted(found, key=lambda job: (job.created_at, job.id))

    def spec(self, job_id: str) -> dict[str, Any]:
        """Return the job's specification in its JSON form."""
        with self.database.read() as connection:
            ((text,),) = connection.tuples("SELECT spec FROM jobs WHERE id = :id", {"id": job_id})
        spec: dict[str, Any] = json.loads(text)
        return spec

    def tags(self, job_id: str) -> dict[str, str]:
        """Return the job's tags."""
        with self.database.read() as connection:
            rows = connection.tuples("SELECT key, value FROM job_tags WHERE job_id = :id ORDER BY key", {"id": job_id})
        return dict(rows)

    def attempts(self, job_id: str) -> list[AttemptRecord]:
        """All attempts of the job, oldest first."""
        with self.database.read() as connection:
            rows = connection.tuples(
                f"SELECT {AttemptRecord.COLUMNS} FROM attempts WHERE job_id = :id ORDER BY number",  # noqa: S608
                {"id": job_id},
            )
        return [AttemptRecord.from_row(row) for row in rows]

    def rows(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        limit: int | None = None,
    ) -> list[tuple[Any, ...]]:
        """``(id, name, cluster, backend, state, reason, attempts, created_at, updated_at, ended_at, hosts, tags,
        seen_at)`` of jobs, newest first, *limit* at most. One indexed query for each of the tables."""
        parts, parameters = ["1 = 1"], {}
        if states is not None:
            parameters = {f"s{i}": str(state) for i, state in enumerate(states)}
            parts.append(f"state IN ({', '.join(f':{n}' for n in parameters)})" if states else "1 = 0")
        if name is not None:
            parts.append("name = :name")
            parameters["name"] = name
        for i, (key, value) in enumerate((tags or {}).items()):
            parts.append(f"id IN (SELECT job_id FROM job_tags WHERE key = :k{i} AND value = :v{i})")  # noqa: S608
            parameters |= {f"k{i}": key, f"v{i}": value}
        bound = "" if limit is None else f" LIMIT {int(limit)}"
        chosen = f"FROM jobs WHERE {' AND '.join(parts)} ORDER BY created_at DESC, id{bound}"
        with self.database.read() as connection:
            rows = connection.tuples(
                f"SELECT id, name, cluster, backend, state, reason, attempt, created_at, updated_at, ended_at {chosen}",
                parameters,
            )
            tag_rows = connection.tuples(
                f"SELECT job_id, key, value FROM job_tags WHERE job_id IN (SELECT id {chosen})",  # noqa: S608
                parameters,
            )
            host_rows = connection.tuples(
                "SELECT a.job_id, a.hosts FROM attempts a JOIN "  # noqa: S608
                f"(SELECT id, attempt {chosen}) j ON a.job_id = j.id AND a.number = j.attempt WHERE a.hosts <> '[]'",
                parameters,
            )
            seen = dict(
                connection.tuples(
                    f"SELECT job_id, at FROM sightings WHERE job_id IN (SELECT id {chosen})",  # noqa: S608
                    parameters,
                )
            )
        tags_of: dict[str, dict[str, str]] = {}
        for job_id, key, value in tag_rows:
            tags_of.setdefault(job_id, {})[key] = value
        none: dict[str, str] = {}
        hosts_of = {job_id: tuple(json.loads(hosts)) for job_id, hosts in host_rows}
        return [(*row, hosts_of.get(row[0], ()), tags_of.get(row[0], none), seen.get(row[0])) for row in rows]

    def events(self, job_id: str) -> list[EventRecord]:
        """Return the job's history, oldest first."""
        with self.database.read() as connection:
            rows = connection.tuples(
                "SELECT id, job_id, attempt, at, kind, data FROM events WHERE job_id = :id ORDER BY id", {"id": job_id}
            )
        return [
            EventRecord(id_, job, attempt, at, kind, json.loads(data)) for id_, job, attempt, at, kind, data in rows
        ]

    def origin(self, job_id: str) -> str:
        """Host and state directory of the process that made the job; empty for jobs of older versions."""
        return next((str(e.data.get("origin", "")) for e in self.events(job_id) if e.kind == Kind.QUEUED), "")

    def reservations(self, cluster: str | None = None, job_id: str | None = None) -> list[Reservation]:
        """Return the hosts that attempts hold, by cluster and host; the hosts of one attempt in node order."""
        with self.database.read() as connection:
            return read_reservations(connection, cluster, job_id)

    def failed_hosts(self, job_id: str) -> dict[int, tuple[str, ...]]:
        """Hosts that were to blame for node failures of the job, by attempt."""
        with self.database.read() as connection:
            return read_failed_hosts(connection, job_id)

    def matching_ids(self, prefix: str, limit: int) -> list[str]:
        """Ids that start with *prefix*, newest first, *limit* at most."""
        with self.database.read() as connection:
            rows = connection.tuples(
                "SELECT id FROM jobs WHERE substr(id, 1, :length) = :prefix ORDER BY created_at DESC, id LIMIT :limit",
                {"length": len(prefix), "prefix": prefix, "limit": limit},
            )
        return [row[0] for row in rows]

    # -- writing

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Transaction]:
        """Open a transaction, durable when it is left. No I/O belongs inside.

        Raises `LedgerError` where it could not be; what need not be *durable* changes a copy in memory then.
        """
        if durable:
            self._must_last()
        with self.database.write() as connection:
            yield Transaction(connection, self._clock())

    def _must_last(self) -> None:
        if self.volatile:
            raise LedgerError(
                f"the ledger can only be read now: {self.volatile}",
                where=self.database.url.removeprefix("sqlite:///"),
                hint="free some space and try again; `orc status`, `list`, `logs` and `cancel` work meanwhile",
            )

    def note_seen(self, job_ids: Sequence[str]) -> None:
        """Record that the clusters of these jobs have reported them now."""
        now = self._clock()
        with self.database.write() as connection:
            connection.executemany(
                "INSERT INTO sightings (job_id, at) VALUES (:id, :now) "
                "ON CONFLICT (job_id) DO UPDATE SET at = excluded.at",
                [{"id": job_id, "now": now} for job_id in job_ids],
            )

    def claim(self, job: JobRecord, owner: str, ttl_s: float) -> bool:
        """Take the job for *owner* if its claim is still what *job* shows. False when another owner was faster."""
        self._must_last()
        claim = "UPDATE jobs SET claim_owner = :owner, claim_expires_at = :expires WHERE id = :id AND "
        parameters = {"id": job.id, "owner": owner, "expires": self._clock() + ttl_s}
        if job.claim_owner is None:
            claim += "claim_owner IS NULL"
        else:
            claim += "claim_owner = :seen AND claim_expires_at = :seen_expires"
            parameters |= {"seen": job.claim_owner, "seen_expires": job.claim_expires_at}
        with self.database.write() as connection:
            taken = connection.execute(claim, parameters)
        return taken == 1

    def release(self, job_id: str, owner: str) -> None:
        """Give the job back, if it is still *owner*'s."""
        with self.database.write() as connection:
            connection.execute(
                "UPDATE jobs SET claim_owner = NULL, claim_expires_at = NULL WHERE id = :id AND claim_owner = :owner",
                {"id": job_id, "owner": owner},
            )
