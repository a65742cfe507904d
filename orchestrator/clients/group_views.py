"""Views of groups and schedules for callers: frozen values, JSON-able, the same from a ledger and from a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.orchestrator.ledger.schedules import ScheduleRecord
    from orc.orchestrator.views import JobRow


@dataclass(frozen=True)
class MemberView:
    """Member of a group: its newest job, and the values in which it differs from the others."""

    number: int
    stage: str
    parameters: Mapping[str, str]
    job: JobRow
    jobs: int = 1  # how often it was submitted
    metrics: Mapping[str, float] = field(default_factory=dict)  # the newest of each, where they were asked for

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "index": self.number,
            "stage": self.stage or None,
            "parameters": dict(self.parameters),
            "submissions": self.jobs,
            "metrics": dict(self.metrics),
            "job": self.job.to_dict(),
        }


@dataclass(frozen=True)
class GroupView:
    """Group of jobs as the ledger has it."""

    id: str
    kind: str
    name: str
    owner: str
    created_at: float
    max_parallel: int | None
    members: tuple[MemberView, ...] = ()

    @property
    def keys(self) -> list[str]:
        """The keys that its members differ in."""
        return list(dict.fromkeys(key for member in self.members for key in member.parameters))

    @property
    def counts(self) -> dict[str, int]:
        """Number of members in each state, in the order of the members."""
        found: dict[str, int] = {}
        for member in self.members:
            found[member.job.state] = found.get(member.job.state, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "id": self.id,
            "kind": self.kind,
            "name": self.name,
            "owner": self.owner,
            "created_at": self.created_at,
            "max_parallel": self.max_parallel,
            "counts": self.counts,
            "members": [member.to_dict() for member in self.members],
        }


@dataclass(frozen=True)
class ScheduleView:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)
