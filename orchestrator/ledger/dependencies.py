"""Dependencies between jobs: what has to have ended, and how, before a job may start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orc.orchestrator.ledger.database import Connection, insert
from orc.orchestrator.ledger.lifecycle import ACTIVE_JOB, JobState
from orc.orchestrator.ledger.queries import conditions


class Dependency(NamedTuple):
    """Condition on the end of another job."""

    job_id: str
    on_job: str
    condition: str  # success, any, failure


def add(connection: Connection, dependencies: Sequence[Dependency]) -> None:
    """Store *dependencies*; both jobs of each must be in the ledger already."""
    insert(connection, "dependencies", *(dependency._asdict() for dependency in dependencies))


def of_jobs(connection: Connection, job_ids: Sequence[str] | None = None) -> list[tuple[Dependency, JobState]]:
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
