"""Views of jobs, groups and schedules for callers, the same from a ledger and from a service.

They are frozen and JSON-able. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.attempts.records import AttemptExit
from orc.orchestrator.ledger.job_size import share_done
from orc.orchestrator.ledger.records import EventRecord
from orc.orchestrator.schema import View

if TYPE_CHECKING:
    from orc.orchestrator.ledger.records import AttemptRecord, JobRecord
    from orc.orchestrator.ledger.schedules import ScheduleRecord


TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class AttemptView(View):
    """Attempt at running a job."""

    number: int
    marker: str
    state: str
    cause: str | None  # crash, node_failure, preempted, timeout, cancelled, launch
    reason: str
    native_id: str | None  # the backend's own name for it
    hosts: tuple[str, ...]
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    restarts: int  # times the backend itself requeued it
    progress: Mapping[str, Any]
    exit: AttemptExit | None
    failed_hosts: tuple[
        str, ...
    ] = ()  # hosts to blame for its node failure; the job's next attempts keep away from them

    @classmethod
    def of(cls, record: AttemptRecord, failed_hosts: tuple[str, ...] = ()) -> AttemptView:
        """Return the view of records of the ledger."""
        return cls.from_record(
            record,
            state=str(record.state),
            native_id=record.handle["native_id"] if record.handle else None,
            exit=AttemptExit.from_dict(record.exit) if record.exit is not None else None,
            failed_hosts=failed_hosts,
        )


@dataclass(frozen=True)
class JobView(View):
    """A job and all its attempts."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str  # one line: why it waits, why it failed, why nothing can be said
    created_at: float
    updated_at: float
    ended_at: float | None
    next_attempt_at: float | None  # when a retry is due
    cancel_requested_at: float | None
    tags: Mapping[str, str]
    spec: Mapping[str, Any]
    digests: Mapping[str, str]  # {"code": ..., "runtime": ...}
    source: str  # the job file, or "job:<id>" for a resubmission
    attempts: tuple[AttemptView, ...] = field(default=())
    owner: str = ""  # login name of who submitted it
    project: str = ""
    priority: int = 0
    group_id: str | None = None  # sweep, array, pipeline or schedule that it belongs to
    group_index: int | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    seen_at: float | None = None  # when its cluster last said something about it; seconds late at most
    share: float | None = None  # of its training that is done, where its arguments say how long it is

    @property
    def ended(self) -> bool:
        """True when the job will not change any more."""
        return self.state in TERMINAL

    @property
    def attempt(self) -> AttemptView | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @classmethod
    def of(
        cls,
        job: JobRecord,
        attempts: list[AttemptRecord],
        spec: Mapping[str, Any],
        tags: Mapping[str, str],
        failed_hosts: Mapping[int, tuple[str, ...]],
        seen_at: float | None = None,
    ) -> JobView:
        """Return the view of records of the ledger."""
        views = tuple(AttemptView.of(attempt, failed_hosts.get(attempt.number, ())) for attempt in attempts)
        done = share_done(spec, attempts[-1].progress) if attempts else None
        return cls.from_record(
            job, state=str(job.state), tags=tags, spec=spec, attempts=views, seen_at=seen_at, share=done
        )


@dataclass(frozen=True, slots=True)
class JobRow(View):
    """A job in a list. Its fields are in the order of `orc.orchestrator.ledger.queries.read_rows`."""

    id: str
    name: str
    cluster: str
    backend: str
    state: str
    reason: str
    attempts: int
    created_at: float
    updated_at: float
    ended_at: float | None
    hosts: tuple[str, ...]  # of the newest attempt
    tags: Mapping[str, str]
    seen_at: float | None  # when its cluster last said something about it; seconds late at most
    owner: str = ""  # login name of who submitted it
    project: str = ""
    priority: int = 0
    group_id: str | None = None  # sweep, array, pipeline or schedule that it belongs to
    group_index: int | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    started_at: float | None = None  # of the newest attempt
    nodes: int = 1
    gpus: int = 0  # on all nodes
    progress: Mapping[str, Any] = field(default_factory=dict)  # of the newest attempt: epoch, step, loss
    share: float | None = None  # of its training that is done, where its arguments say how long it is

    @property
    def age_from(self) -> float | None:
        """The time of which its state is; `None` where that is now: it has ended, or its cluster has not got it yet."""
        # Not `updated_at`: that its cluster cannot be reached is news of the job, too.
        return (self.seen_at or self.created_at) if self.state in ("PENDING", "RUNNING") else None


@dataclass(frozen=True)
class NotificationView(View):
    """Notification without anything secret."""

    id: int
    job: str
    event: str
    target: str  # of a URL, nothing behind its host
    state: str  # due, sent, dead
    tries: int
    next_at: float | None  # of one that is due
    error: str
    created_at: float


# An event is shown as it is stored.
EventView = EventRecord


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
        odd = {name: record.spec[name] for name in ("missed", "overlap")}
        return cls.from_record(record, next_at=record.next_at if record.enabled else None, **odd)
