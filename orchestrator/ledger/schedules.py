"""Schedules: jobs that are submitted again and again, by the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orc.orchestrator.ledger.database import Conflict, Connection, insert
from orc.orchestrator.ledger.records import columns_of, decoded, dump


@dataclass(frozen=True)
class ScheduleRecord:
    """Row of a schedule. Times are seconds since the epoch."""

    id: str
    name: str
    owner: str
    cron: str
    timezone: str
    enabled: bool
    next_at: float | None
    last_at: float | None
    last_job: str | None
    spec: Mapping[str, Any]
    digests: Mapping[str, str]
    source: str = ""
    revision: int = 0


_COLUMNS = columns_of(ScheduleRecord)


def create(connection: Connection, schedule: ScheduleRecord) -> None:
    """Store a new schedule."""
    row = {**vars(schedule), "spec": dump(schedule.spec), "digests": dump(schedule.digests)}
    insert(connection, "schedules", row)


def find(connection: Connection, schedule_id: str) -> ScheduleRecord | None:
    """Return the schedule of this id."""
    return next(iter(_read(connection, "id = :id", {"id": schedule_id})), None)


def named(connection: Connection, owner: str, name: str) -> ScheduleRecord | None:
    """Return the schedule of this name and owner."""
    return next(iter(_read(connection, "owner = :owner AND name = :name", {"owner": owner, "name": name})), None)


def all_schedules(connection: Connection) -> list[ScheduleRecord]:
    """Return all schedules, by name."""
    return _read(connection, "1 = 1 ORDER BY name, owner", {})


def due(connection: Connection, now: float) -> list[ScheduleRecord]:
    """Return the enabled schedules whose next run is due, the longest waiting first."""
    return _read(connection, "next_at <= :now AND enabled = :yes ORDER BY next_at", {"now": now, "yes": True})


def update(connection: Connection, schedule: ScheduleRecord, **changes: Any) -> ScheduleRecord:
    """Set columns of the schedule as it was read; the schedule as it is afterwards. Raises `Conflict`."""
    values = {name: dump(value) if name in ("spec", "digests") else value for name, value in changes.items()}
    assignments = ", ".join(f"{name} = :{name}" for name in values)
    done = connection.execute(
        f"UPDATE schedules SET {assignments}, revision = revision + 1 "  # noqa: S608
        "WHERE id = :key AND revision = :seen",
        {**values, "key": schedule.id, "seen": schedule.revision},
    )
    found = find(connection, schedule.id)
    if done != 1 or found is None:
        raise Conflict(schedule.id)
    return found


def remove(connection: Connection, schedule_id: str) -> bool:
    """Forget a schedule; the jobs that it has submitted stay. False where there is none."""
    return connection.execute("DELETE FROM schedules WHERE id = :id", {"id": schedule_id}) == 1


def _read(connection: Connection, condition: str, parameters: Mapping[str, Any]) -> list[ScheduleRecord]:
    rows = connection.tuples(f"SELECT {_COLUMNS} FROM schedules WHERE {condition}", parameters)  # noqa: S608
    found = [decoded(ScheduleRecord, row, "spec", "digests") for row in rows]
    return [replace(schedule, enabled=bool(schedule.enabled)) for schedule in found]  # which SQLite has as a number
