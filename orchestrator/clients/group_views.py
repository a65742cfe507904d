"""Views of groups and schedules for callers: frozen values, JSON-able, the same from a ledger and from a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.orchestrator.schema import View
from orc.orchestrator.views import JobRow

if TYPE_CHECKING:
    from orc.orchestrator.ledger.schedules import ScheduleRecord


@dataclass(frozen=True)
class MemberView(View):
    """Member of a group: its newest job, and the values in which it differs from the others."""

    index: int
    stage: str | None  # of a pipeline
    parameters: Mapping[str, str]
    job: JobRow
    submissions: int = 1  # how often it was submitted
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest of each, where they were asked for


@dataclass(frozen=True)
class GroupView(View):
    """Group of jobs as the ledger has it."""

    id: str
    kind: str
    name: str
    owner: str
    created_at: float
    max_parallel: int | None
    members: tuple[MemberView, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # of members in each state, in the order of the members

    @property
    def keys(self) -> list[str]:
        """The keys that its members differ in."""
        return list(dict.fromkeys(key for member in self.members for key in member.parameters))


@dataclass(frozen=True)
class ScheduleView(View):
    """Schedule of a job. Times are seconds since the epoch."""

    id: str
    name: str
    owner: str
    cron: str
    timezone: str
    enabled: bool
    next_at: float | None  # None while it is paused
    last_at: float | None
    last_job: str | None
    missed: str
    overlap: str
    source: str

    @classmethod
    def of(cls, record: ScheduleRecord) -> ScheduleView:
        """Return the view of a row."""
        return cls(
            record.id,
            record.name,
            record.owner,
            record.cron,
            record.timezone,
            record.enabled,
            record.next_at if record.enabled else None,
            record.last_at,
            record.last_job,
            record.spec["missed"],
            record.spec["overlap"],
            record.source,
        )
