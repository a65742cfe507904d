"""Groups of jobs (sweeps, arrays, pipelines, the runs of a schedule), and dependencies between jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orc.orchestrator.ledger.database import Connection, insert, one_of
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB, JobState
from orc.orchestrator.ledger.records import columns_of, conditions, decoded, dump


@dataclass(frozen=True)
class GroupRecord:
    """Row of a group."""

    id: str
    kind: str  # sweep, array, pipeline, schedule
    name: str
    owner: str
    created_at: float
    max_parallel: int | None = None  # live jobs at a time; any number without one
    spec: Mapping[str, Any] = field(default_factory=dict)


_COLUMNS = columns_of(GroupRecord)


def create(connection: Connection, group: GroupRecord) -> None:
    """Store a new group; its jobs name it as `NewJob.group_id`."""
    insert(connection, "groups", {**vars(group), "spec": dump(group.spec)})


def find(connection: Connection, group_id: str) -> GroupRecord | None:
    """Return the group of this id."""
    rows = connection.tuples(f"SELECT {_COLUMNS} FROM groups WHERE id = :id", {"id": group_id})  # noqa: S608
    return decoded(GroupRecord, rows[0], "spec") if rows else None


def newest(connection: Connection, limit: int, kinds: Sequence[str] = ()) -> list[GroupRecord]:
    """Return the newest groups (of *kinds*, if given), *limit* at most."""
    return [decoded(GroupRecord, row, "spec") for row in _newest(connection, _COLUMNS, limit, kinds)]


def newest_ids(connection: Connection, limit: int, kinds: Sequence[str] = ()) -> list[str]:
    """Return the ids of what `newest` returns, without reading what describes the members of each."""
    return [group_id for (group_id,) in _newest(connection, "id", limit, kinds)]


def _newest(connection: Connection, columns: str, limit: int, kinds: Sequence[str]) -> list[tuple[Any, ...]]:
    of_kinds, parameters = one_of("kind", kinds) if kinds else ("1 = 1", {})
    return connection.tuples(
        f"SELECT {columns} FROM groups WHERE {of_kinds} ORDER BY created_at DESC, id DESC LIMIT {int(limit)}",  # noqa: S608
        parameters,
    )


def counts(connection: Connection, group_id: str) -> dict[str, int]:
    """Return how many members of a group are in each state, by the newest job of each, in the order of the members."""
    rows = connection.tuples(
        "SELECT state, COUNT(*) FROM jobs j WHERE group_id = :id AND NOT EXISTS (SELECT 1 FROM jobs n WHERE "
        "n.group_id = :id AND n.group_index = j.group_index AND (n.created_at > j.created_at "
        "OR (n.created_at = j.created_at AND n.id > j.id))) GROUP BY state ORDER BY MIN(group_index), MIN(created_at)",
        {"id": group_id},
    )
    return dict(rows)


def under_way(connection: Connection, group_id: str, waiting: Collection[JobState] = (JobState.QUEUED,)) -> int:
    """Return the number of jobs of a group that have not ended, without those in a state of *waiting*."""
    in_state, parameters = one_of("state", sorted(ACTIVE_JOB.difference(waiting)))
    rows = connection.tuples(
        f"SELECT COUNT(*) FROM jobs WHERE group_id = :id AND {in_state}",  # noqa: S608
        {"id": group_id, **parameters},
    )
    return int(rows[0][0])


def owners(connection: Connection, group_id: str) -> set[str]:
    """Return the owners of the jobs of a group."""
    rows = connection.tuples("SELECT DISTINCT owner FROM jobs WHERE group_id = :id", {"id": group_id})
    return {owner for (owner,) in rows}


def has_job_of(connection: Connection, group_id: str, request: str) -> bool:
    """Return True where the request with this digest has made a job of the group."""
    rows = connection.tuples(
        "SELECT 1 FROM events WHERE kind = 'queued' AND data LIKE :request "
        "AND job_id IN (SELECT id FROM jobs WHERE group_id = :id) LIMIT 1",
        {"id": group_id, "request": f"%{request}%"},
    )
    return bool(rows)


class Dependency(NamedTuple):
    """Condition on the end of another job."""

    job_id: str
    on_job: str
    condition: str  # success, any, failure


def add_dependencies(connection: Connection, dependencies: Sequence[Dependency]) -> None:
    """Store *dependencies*; both jobs of each must be in the ledger already."""
    insert(connection, "dependencies", *(dependency._asdict() for dependency in dependencies))


def dependencies_of(connection: Connection, job_ids: Sequence[str] | None = None) -> list[tuple[Dependency, JobState]]:
    """Return the dependencies of these jobs (of all live ones unless given), each with the state of `on_job`."""
    found: list[tuple[Dependency, JobState]] = []
    for condition, parameters in conditions(job_ids, ACTIVE_JOB if job_ids is None else ()):
        rows = connection.tuples(
            "SELECT d.job_id, d.on_job, d.condition, o.state FROM jobs j "  # noqa: S608
            "JOIN dependencies d ON d.job_id = j.id JOIN jobs o ON o.id = d.on_job "
            f"WHERE {condition} ORDER BY d.job_id, d.on_job",
            parameters,
        )
        found += [(Dependency(*row[:3]), JobState(row[3])) for row in rows]
    return found
