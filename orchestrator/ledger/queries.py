"""Queries of the ledger that reads and transactions share; lists of jobs, page by page."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger.database import Connection, batches, one_of
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB, JobState
from orc.orchestrator.ledger.records import (
    AttemptRecord,
    EventRecord,
    JobRecord,
    JobSize,
    Reservation,
    share_done,
)

_JOB_COLUMNS = JobRecord.COLUMNS.split(", ")
_COLUMNS = ", ".join([*(f"j.{c}" for c in _JOB_COLUMNS), *(f"a.{c}" for c in AttemptRecord.COLUMNS.split(", "))])


def conditions(
    job_ids: Sequence[str] | None, states: Collection[JobState] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """SQL conditions, each with its parameters, that together choose these jobs (all of them without *job_ids*) in one
    of *states* (in any without)."""
    in_state, parameters = one_of("j.state", map(str, sorted(states))) if states else ("1 = 1", {})
    if job_ids is None:
        yield in_state, parameters
        return
    for some in batches(job_ids):
        chosen, ids = one_of("j.id", some)
        yield f"{in_state} AND {chosen}", parameters | ids


def read_jobs(connection: Connection, condition: str, parameters: Mapping[str, Any]) -> list[JobRecord]:
    """Return the jobs of ``j`` (with their newest attempts ``a``) that meet *condition*."""
    # One statement, so that the job and its attempt belong together on every database and isolation level. Only
    # column names and placeholders are put into the text; all values are parameters.
    rows = connection.tuples(
        f"SELECT {_COLUMNS} FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.number = j.attempt "  # noqa: S608
        f"WHERE {condition}",
        parameters,
    )
    split = len(_JOB_COLUMNS)
    return [
        JobRecord.from_row(row[:split], AttemptRecord.from_row(row[split:]) if row[split] is not None else None)
        for row in rows
    ]


def jobs_of(connection: Connection, job_ids: Sequence[str]) -> list[JobRecord]:
    """Return these jobs, in no order; unknown ids are left out."""
    found: list[JobRecord] = []
    for condition, parameters in conditions(job_ids):
        found += read_jobs(connection, condition, parameters)
    return found


def select_jobs(connection: Connection, columns: str, job_ids: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return *columns* of these jobs ``j``, in no order."""
    found: list[tuple[Any, ...]] = []
    for condition, parameters in conditions(job_ids):
        found += connection.tuples(f"SELECT {columns} FROM jobs j WHERE {condition}", parameters)  # noqa: S608
    return found


def read_events(connection: Connection, condition: str, parameters: Mapping[str, Any]) -> list[EventRecord]:
    """Return the events that meet *condition*, in its order."""
    rows = connection.tuples(
        f"SELECT id, job_id, attempt, at, kind, data FROM events WHERE {condition}",  # noqa: S608
        parameters,
    )
    return [EventRecord(id_, job, attempt, at, kind, json.loads(data)) for id_, job, attempt, at, kind, data in rows]


def read_reservations(connection: Connection, cluster: str | None, job_id: str | None) -> list[Reservation]:
    """Reservations of a cluster, of a job, or all; those of a job by attempt and node."""
    wanted = {"cluster": cluster, "job_id": job_id}
    chosen = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = :{name}" for name in chosen) or "1 = 1"
    order = "attempt, node" if job_id is not None else "cluster, host, at, job_id, node"
    rows = connection.tuples(
        "SELECT cluster, host, job_id, attempt, node, slots, at FROM reservations "  # noqa: S608
        f"WHERE {where} ORDER BY {order}",
        chosen,
    )
    return [Reservation(*row) for row in rows]


def read_failed_hosts(connection: Connection, job_id: str) -> dict[int, tuple[str, ...]]:
    """Hosts to blame for node failures of the job, by attempt."""
    found: dict[int, tuple[str, ...]] = {}
    query = "SELECT attempt, host FROM culprits WHERE job_id = :id ORDER BY attempt, host"
    for number, host in connection.tuples(query, {"id": job_id}):
        found[number] = (*found.get(number, ()), host)
    return found


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
