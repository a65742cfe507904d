"""The ledger: what is known about all jobs, lists of them page by page, and transactions that change it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.ledger import leases
from orc.orchestrator.ledger.database import Connection, Database, LedgerError, batches, insert, one_of
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB, JobState, Kind
from orc.orchestrator.ledger.records import (
    AttemptRecord,
    EventRecord,
    JobRecord,
    JobSize,
    Reservation,
    columns_of,
    conditions,
    read_events,
    read_failed_hosts,
    read_jobs,
    read_reservations,
    select_jobs,
    share_done,
)
from orc.orchestrator.ledger.transaction import Transaction

# Newest first. The id makes the order total: a page ends between two jobs, never inside some of the same moment.
_ORDER = "ORDER BY created_at DESC, id DESC"
_SHOWN = "id, name, cluster, backend, state, reason, attempt, created_at, updated_at, ended_at"
_MORE = "owner, project, priority, group_id, group_index, not_before, deadline_at"
_SEARCHED = "lower(id || ' ' || name || ' ' || owner || ' ' || cluster || ' ' || project)"


class InvalidCursor(LaunchError):
    """A cursor that no page has given."""


@dataclass(frozen=True)
class JobFilter:
    """Filter of a list of jobs: all that is given has to hold."""

    states: Sequence[str] | None = None
    name: str | None = None
    owner: str | None = None
    cluster: str | None = None
    project: str | None = None
    group: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    q: str | None = None  # part of its id, name, owner, cluster or project, whatever the case
    ended_since: float | None = None  # seconds since the epoch


class Page(NamedTuple):
    """Page of a list: rows as `JobRow` takes them, and the cursor of the next page, `None` after the last."""

    rows: list[tuple[Any, ...]]
    next: str | None


def encode_cursor(created_at: float, job_id: str) -> str:
    """Return the cursor of the page that begins after this job."""
    return base64.urlsafe_b64encode(json.dumps([created_at, job_id]).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> tuple[float, str]:
    """Return the time and the id of the last job before the page. Raises `InvalidCursor`."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        created_at, job_id = json.loads(text)
        if not isinstance(job_id, str) or not job_id.isascii() or not job_id.isprintable():
            raise TypeError
        return float(created_at), job_id
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise InvalidCursor("the cursor is not one of a page", hint="use `next` of the page before, as it is") from None


def read_rows(
    connection: Connection, wanted: JobFilter, *, after: tuple[float, str] | None = None, limit: int | None = None
) -> list[tuple[Any, ...]]:
    """Return ``(id, name, cluster, backend, state, reason, attempts, created_at, updated_at, ended_at, hosts, tags,
    seen_at, owner, project, priority, group_id, group_index, not_before, deadline_at, started_at, nodes, gpus,
    progress, share)`` of jobs, newest first."""
    chosen, parameters = _chosen(wanted, after, limit)
    rows = connection.tuples(f"SELECT {_SHOWN}, {_MORE} FROM {chosen}", parameters)  # noqa: S608
    if not rows:
        return []
    tags: dict[str, dict[str, str]] = {}
    seen: dict[str, float] = {}
    latest: dict[str, tuple[Any, ...]] = {}
    # By their ids: the search for them, which may read all jobs, is not made again.
    for some in batches([row[0] for row in rows]):
        these, ids = one_of("job_id", some)
        for job_id, key, value in connection.tuples(f"SELECT job_id, key, value FROM job_tags WHERE {these}", ids):  # noqa: S608
            tags.setdefault(job_id, {})[key] = value
        seen |= dict(connection.tuples(f"SELECT job_id, at FROM sightings WHERE {these}", ids))  # noqa: S608
        these, ids = one_of("j.id", some)
        for job_id, text, hosts, started_at, progress in connection.tuples(
            "SELECT j.id, j.spec, a.hosts, a.started_at, a.progress FROM jobs j LEFT JOIN attempts a "  # noqa: S608
            f"ON a.job_id = j.id AND a.number = j.attempt WHERE {these}",
            ids,
        ):
            spec, reached = _json(text), _json(progress or "{}")
            size = JobSize.of(spec)
            of_attempt = (started_at, size.nodes, size.gpus, reached, share_done(spec, reached))
            latest[job_id] = (tuple(_json(hosts or "[]")), of_attempt)
    none: dict[str, str] = {}
    found = []
    for row in rows:
        hosts, of_attempt = latest[row[0]]
        found.append((*row[:10], hosts, tags.get(row[0], none), seen.get(row[0]), *row[10:], *of_attempt))
    return found


def _json(text: str) -> Any:
    """Return the value of *text*; most are empty in a long list."""
    return {} if text == "{}" else [] if text == "[]" else json.loads(text)


def count_rows(connection: Connection, wanted: JobFilter) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Return how many jobs are in each state, and of those that have not ended how many on each cluster."""
    where, parameters = _conditions(wanted, None)
    states = dict(connection.tuples(f"SELECT state, count(*) FROM jobs WHERE {where} GROUP BY state", parameters))  # noqa: S608
    live, chosen = one_of("state", map(str, sorted(ACTIVE_JOB)))
    clusters: dict[str, dict[str, int]] = {}
    for cluster, state, count in connection.tuples(
        f"SELECT cluster, state, count(*) FROM jobs WHERE {live} AND {where} GROUP BY cluster, state",  # noqa: S608
        parameters | chosen,
    ):
        clusters.setdefault(cluster, {})[state] = count
    return states, clusters


def _chosen(wanted: JobFilter, after: tuple[float, str] | None, limit: int | None) -> tuple[str, dict[str, Any]]:
    """Return what follows FROM in a query of the jobs, in their order, and its parameters."""
    where, parameters = _conditions(wanted, after)
    bound = "" if limit is None else f" LIMIT {int(limit)}"
    states = list(dict.fromkeys(str(state) for state in wanted.states)) if wanted.states is not None else None
    if states is None:
        return f"jobs WHERE {where} {_ORDER}{bound}", parameters
    if not states:
        return f"jobs WHERE 1 = 0 {_ORDER}", {}
    parameters |= {f"s{i}": state for i, state in enumerate(states)}
    # One after the other: for several states at once, databases sort all their jobs before they take the first.
    parts = [
        f"SELECT * FROM (SELECT {_SHOWN}, {_MORE} FROM jobs WHERE state = :s{i} AND {where} {_ORDER}{bound}) u{i}"  # noqa: S608
        for i in range(len(states))
    ]
    return f"({' UNION ALL '.join(parts)}) u {_ORDER}{bound}", parameters


def _conditions(wanted: JobFilter, after: tuple[float, str] | None) -> tuple[str, dict[str, Any]]:
    parts: list[str] = ["1 = 1"]
    parameters: dict[str, Any] = {}
    columns = {"name": "name", "owner": "owner", "cluster": "cluster", "project": "project", "group": "group_id"}
    for given, column in columns.items():
        value = getattr(wanted, given)
        if value is not None:
            parts.append(f"{column} = :{given}")
            parameters[given] = value
    for i, (key, value) in enumerate(wanted.tags.items()):
        parts.append(f"id IN (SELECT job_id FROM job_tags WHERE key = :k{i} AND value = :v{i})")  # noqa: S608
        parameters |= {f"k{i}": key, f"v{i}": value}
    if wanted.q:
        parts.append(f"{_SEARCHED} LIKE :q ESCAPE '!'")
        escaped = "".join(f"!{c}" if c in "!%_" else c for c in wanted.q.lower())
        parameters["q"] = f"%{escaped}%"
    if wanted.ended_since is not None:
        parts.append("ended_at >= :ended_since")
        parameters["ended_since"] = wanted.ended_since
    if after is not None:
        parts.append("(created_at, id) < (:after_at, :after_id)")
        parameters |= {"after_at": after[0], "after_id": after[1]}
    return " AND ".join(parts), parameters


_NEAR = 200  # newest jobs that a mistyped id is compared with


class _Moment:
    """Database at one moment, of which all is read in one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self) -> AbstractContextManager[Connection]:
        return nullcontext(self._connection)


class Ledger:
    """Jobs, attempts and events. One instance per thread."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.database = database
        self._clock = clock

    def close(self) -> None:
        """Give up the connection."""
        self.database.close()

    def now(self) -> float:
        """Return the time by the ledger's clock, in seconds since the epoch."""
        return self._clock()

    @property
    def volatile(self) -> str:
        """The reason why this is a copy in memory whose changes are forgotten; empty when it is the ledger itself."""
        return getattr(self.database, "volatile", "")

    # -- reading

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Let what is read in this context belong together: it is read in one transaction."""
        plain = self.database
        with plain.read() as connection:
            self.database = cast(Database, _Moment(connection))
            try:
                yield
            finally:
                self.database = plain

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job as it is now."""
        return next(iter(self.jobs([job_id])), None)

    def jobs(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """These jobs, oldest first; unknown ids are left out."""
        return self._select(job_ids)

    def active(
        self,
        job_ids: Sequence[str] | None = None,
        cluster: str | None = None,
        states: Collection[JobState] = ACTIVE_JOB,
    ) -> list[JobRecord]:
        """Return the jobs (of *job_ids*, at *cluster*, in *states*, if given) that have not ended, oldest first."""
        return self._select(job_ids, cluster, states)

    def any_active(self) -> bool:
        """Return True when a job has not ended."""
        ((condition, parameters),) = conditions(None, ACTIVE_JOB)
        with self.database.read() as connection:
            return bool(connection.tuples(f"SELECT 1 FROM jobs j WHERE {condition} LIMIT 1", parameters))  # noqa: S608

    def any_due(self) -> bool:
        """Return True when there is work without a live job: a message, the look for an orphan, a schedule."""
        with self.database.read() as connection:
            return bool(
                connection.tuples(
                    "SELECT 1 FROM notifications WHERE state = 'due' AND next_at <= :now UNION ALL "
                    "SELECT 1 FROM late_copies UNION ALL SELECT 1 FROM schedules WHERE enabled = :yes LIMIT 1",
                    {"now": self._clock(), "yes": True},
                )
            )

    def _select(
        self, job_ids: Sequence[str] | None, cluster: str | None = None, states: Collection[JobState] = ()
    ) -> list[JobRecord]:
        found: list[JobRecord] = []
        at = "" if cluster is None else " AND j.cluster = :cluster"
        with self.database.read() as connection:
            for condition, parameters in conditions(job_ids, states):
                found += read_jobs(connection, condition + at, parameters | ({"cluster": cluster} if at else {}))
        return sorted(found, key=lambda job: (job.created_at, job.id))

    def specs(self, job_ids: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield these jobs' ids and specifications, as of `spec`, in no order."""
        for condition, parameters in conditions(job_ids):
            with self.database.read() as connection:
                rows = connection.tuples(f"SELECT j.id, j.spec FROM jobs j WHERE {condition}", parameters)  # noqa: S608
            for job_id, text in rows:
                yield job_id, json.loads(text)

    def spec(self, job_id: str) -> dict[str, Any]:
        """Return the job's specification in its JSON form."""
        ((_, spec),) = self.specs([job_id])
        return spec

    def seen_at(self, job_id: str) -> float | None:
        """Return the time of the cluster's last answer about the job."""
        with self.database.read() as connection:
            rows = connection.tuples("SELECT at FROM sightings WHERE job_id = :id", {"id": job_id})
        return rows[0][0] if rows else None

    def tags(self, job_id: str) -> dict[str, str]:
        """Return the job's tags."""
        with self.database.read() as connection:
            rows = connection.tuples("SELECT key, value FROM job_tags WHERE job_id = :id ORDER BY key", {"id": job_id})
        return dict(rows)

    def attempts(self, job_id: str) -> list[AttemptRecord]:
        """All attempts of the job, oldest first."""
        with self.database.read() as connection:
            rows = connection.tuples(
                f"SELECT {columns_of(AttemptRecord)} FROM attempts WHERE job_id = :id ORDER BY number",  # noqa: S608
                {"id": job_id},
            )
        return [AttemptRecord.from_row(row) for row in rows]

    def page(self, wanted: JobFilter, after: str | None = None, limit: int = 50) -> Page:
        """Return the page of *limit* jobs that begins after the cursor *after*, newest first.

        Costs the same wherever it begins. A job that comes meanwhile moves nothing: it is before the first page.
        Raises `InvalidCursor`.
        """
        begin = decode_cursor(after) if after is not None else None
        with self.database.read() as connection:
            rows = read_rows(connection, wanted, after=begin, limit=limit + 1)
        last = rows[limit - 1] if len(rows) > limit else None
        return Page(rows[:limit], encode_cursor(last[7], last[0]) if last else None)

    def counts(self, wanted: JobFilter) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
        """Return the numbers of jobs by state, and of those that have not ended by cluster and state."""
        with self.database.read() as connection:
            return count_rows(connection, wanted)

    def events(self, job_id: str) -> list[EventRecord]:
        """Return the job's history, oldest first."""
        with self.database.read() as connection:
            return read_events(connection, "job_id = :id ORDER BY id", {"id": job_id})

    def events_after(self, event_id: int, limit: int) -> list[EventRecord]:
        """Return the events after the event *event_id*, in their order, *limit* at most.

        Ids grow in the order in which changes become visible, so that nothing comes late behind an id that was seen.
        """
        with self.database.read() as connection:
            return read_events(connection, f"id > :after ORDER BY id LIMIT {int(limit)}", {"after": event_id})

    def last_event_id(self) -> int:
        """Return the id of the newest event, 0 without one."""
        with self.database.read() as connection:
            ((newest,),) = connection.tuples("SELECT max(id) FROM events")
        return newest or 0

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
                "SELECT id FROM jobs WHERE substr(id, 1, :length) = :prefix "
                "ORDER BY created_at DESC, id DESC LIMIT :limit",
                {"length": len(prefix), "prefix": prefix, "limit": limit},
            )
        return [row[0] for row in rows]

    def resolve(self, ref: str, where: str = "") -> str:
        """Return the job id that *ref* means: an id, the unambiguous start of one, or ``@last``. Raises `SpecError`."""
        if ref == "@last":
            if newest := self.matching_ids("", 1):
                return newest[0]
            raise SpecError("there is no job yet", where=where, hint="submit one: orc submit job.yaml")
        if self.job(ref) is not None:
            return ref
        candidates = self.matching_ids(ref, 6) if ref else []
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            shown = ", ".join(candidates[:5]) + (", ..." if len(candidates) > 5 else "")
            raise SpecError(f"{ref!r} is not unique", where=where, hint=f"it is the start of {shown}")
        import difflib

        near = difflib.get_close_matches(ref, self.matching_ids("", _NEAR), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`orc list` shows the jobs"
        raise SpecError(f"no such job: {ref}", where=where, hint=hint)

    # -- writing

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[Transaction]:
        """Open a transaction, durable when it is left. No I/O belongs inside.

        Raises `LedgerError` where it could not be; what need not be *durable* changes a copy in memory then.
        """
        if durable:
            self._must_last()
        with self._write() as connection:
            yield Transaction(connection, self._clock())

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """Open a transaction of the only writer, as in SQLite.

        So the ids of events are given in the order in which they become visible, and no two wait for each other.
        """
        with self.database.write() as connection:
            connection.lock("write")
            yield connection

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
        with self._write() as connection:
            rows = ({"job_id": job_id, "at": now} for job_id in job_ids)
            insert(connection, "sightings", *rows, conflict="ON CONFLICT (job_id) DO UPDATE SET at = excluded.at")

    def claim(self, job_ids: Sequence[str], owner: str) -> bool:
        """Take all of the jobs for *owner*, or none; False while another owner has one of them."""
        self._must_last()
        with self._write() as connection:
            return leases.claim(connection, job_ids, owner, self._clock())

    def release(self, job_ids: Sequence[str], owner: str) -> None:
        """Give the jobs back that are still *owner*'s; most were, with the last that was written about them."""
        with self.database.read() as connection:
            kept = [job for job, held in select_jobs(connection, "j.id, j.claim_owner", job_ids) if held == owner]
        if kept:
            with self._write() as connection:
                leases.release(connection, kept, owner)
