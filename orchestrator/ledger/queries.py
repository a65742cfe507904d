"""Queries of the ledger that reads and transactions share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orc.orchestrator.ledger.database import Connection
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB
from orc.orchestrator.ledger.records import AttemptRecord, EventRecord, JobRecord, Reservation

_JOB_COLUMNS = JobRecord.COLUMNS.split(", ")
_COLUMNS = ", ".join([*(f"j.{c}" for c in _JOB_COLUMNS), *(f"a.{c}" for c in AttemptRecord.COLUMNS.split(", "))])
_IDS_PER_QUERY = 500  # databases bound the number of parameters of one statement


def conditions(job_ids: Sequence[str] | None, *, active_only: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """SQL conditions, each with its parameters, that together choose these jobs (all of them without *job_ids*)."""
    parts: list[str] = []
    fixed: dict[str, Any] = {}
    if active_only:
        fixed = {f"s{i}": str(state) for i, state in enumerate(sorted(ACTIVE_JOB))}
        parts.append(f"j.state IN ({', '.join(f':{name}' for name in fixed)})")
    if job_ids is None:
        yield " AND ".join(parts), fixed
        return
    for start in range(0, len(job_ids), _IDS_PER_QUERY):
        chosen = {f"i{i}": job_id for i, job_id in enumerate(job_ids[start : start + _IDS_PER_QUERY])}
        yield " AND ".join([*parts, f"j.id IN ({', '.join(f':{name}' for name in chosen)})"]), fixed | chosen


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
