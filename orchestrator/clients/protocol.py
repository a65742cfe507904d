"""Protocol of the clients: what can be done with jobs, the same against a ledger and against a service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from orc.launchers.backends.base import LogChunk, LogSelector, NodeEntry, QueueReport
    from orc.launchers.errors import LaunchError
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.notifications.calls import NotificationView
    from orc.orchestrator.views import EventView, JobRow, JobView

ProgressCallback = Callable[[str, Mapping[str, Any]], None]


class Refreshed(Protocol):
    """Report of a look at clusters."""

    @property
    def unreachable(self) -> dict[str, str]:
        """Clusters that did not answer, and why."""
        ...


class MetricsReader(Protocol):
    """Reader of a job's measurements that goes on from where it stopped."""

    @property
    def unreachable(self) -> Mapping[str, LaunchError]:
        """Hosts that could not be asked by the last call, and why."""
        ...

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first. Raises `LaunchError`."""
        ...


class JobsClient(Protocol):
    """Client of a ledger (`Client`) or of a service (`ServiceClient`). All methods raise `LaunchError`.

    What a method does is said in the reference of the Python client (docs/reference/python-client.md).
    """

    @property
    def address(self) -> str:
        """URL of the service; empty for the ledger of this machine."""
        ...

    @property
    def log_interval_s(self) -> float:
        """Seconds between two looks at a log that is followed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def close(self) -> None:
        """Close the ledger, or the connection."""
        ...

    def submit(self, loaded: LoadedJob, *, on_progress: ProgressCallback | None = None) -> JobView:
        """Submit a job, exactly once whatever happens to this process."""
        ...

    def resubmit(
        self, job_id: str, *, overrides: Sequence[str] = (), on_progress: ProgressCallback | None = None
    ) -> JobView:
        """Submit a new job like *job_id*, with *overrides* (``resources.nodes=4``) of its specification."""
        ...

    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs; those that have ended stay as they are."""
        ...

    def submit_group(self, loaded: LoadedGroup, *, on_progress: ProgressCallback | None = None) -> GroupView:
        """Submit all members of a group, or none."""
        ...

    def groups(self, *, kinds: Sequence[str] = ("sweep", "array", "pipeline"), limit: int = 20) -> list[GroupView]:
        """Return the newest groups of these kinds."""
        ...

    def group(self, ref: str, *, kinds: Sequence[str] = (), metrics: bool = False) -> GroupView:
        """Return a group and the newest job of each member."""
        ...

    def cancel_group(self, group_id: str, *, grace_s: float | None = None) -> GroupView:
        """Cancel the members that have not ended."""
        ...

    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more."""
        ...

    def create_schedule(
        self,
        loaded: LoadedJob,
        cron: str,
        *,
        name: str = "",
        timezone: str = "UTC",
        missed: str = "skip",
        overlap: str = "skip",
        on_progress: ProgressCallback | None = None,
    ) -> ScheduleView:
        """Submit a job again and again, from the snapshot that is taken now."""
        ...

    def schedules(self) -> list[ScheduleView]:
        """Return all schedules, by name."""
        ...

    def enable_schedule(self, schedule_id: str, *, enabled: bool) -> ScheduleView:
        """Resume a schedule, or pause it."""
        ...

    def delete_schedule(self, schedule_id: str) -> None:
        """Forget a schedule; its jobs stay, and those that run go on."""
        ...

    def set_tags(self, job_id: str, tags: Mapping[str, str | None]) -> JobView:
        """Set tags of a job; `None` removes one."""
        ...

    def refresh(self, job_ids: Sequence[str] | None = None, *, patience_s: float = 0.0) -> Refreshed:
        """Make what is known of jobs as new as can be."""
        ...

    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Make what is known of jobs as new as can be within *seconds*."""
        ...

    def job(self, job_id: str) -> JobView:
        """Return a job."""
        ...

    def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        group: str | None = None,
        limit: int | None = 50,
    ) -> list[JobRow]:
        """Return jobs, newest first."""
        ...

    def events(self, job_id: str) -> list[EventView]:
        """Return the history of a job, oldest first."""
        ...

    def resolve(self, ref: str) -> str:
        """Return the job id that *ref* means: an id, the unambiguous start of one, or ``@last``."""
        ...

    def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Wait until all jobs have ended, *timeout_s* seconds at most."""
        ...

    def log_selectors(self, job_id: str, attempt: int | None = None) -> list[LogSelector]:
        """Return the logs of an attempt that exist so far."""
        ...

    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it is now, from *offset* on."""
        ...

    def follow_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it grows, until its attempt has ended."""
        ...

    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return the path of a log on this machine; `None` where it has to be read."""
        ...

    def metrics(self, job_id: str) -> MetricsReader:
        """Return a reader of what the training of a job measures."""
        ...

    def notifications(
        self, *, job_id: str | None = None, states: Sequence[str] = (), limit: int = 100
    ) -> list[NotificationView]:
        """Return what was told to whom, newest first."""
        ...

    def retry_notifications(self, job_id: str) -> int:
        """Make the notifications about a job that were given up due again; return how many there were."""
        ...

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Return what differs between two jobs."""
        ...

    def costs(
        self,
        *,
        by: str = "job",
        job_ids: Sequence[str] | None = None,
        owner: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Return hours of nodes and GPUs, and what they cost."""
        ...

    def entries(self, job_id: str, attempt: int | None = None) -> list[NodeEntry]:
        """Return the ways to the nodes of an attempt. Raises `NeedsLedger` through a service."""
        ...

    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that are configured wrongly."""
        ...

    def queue(self, cluster: str) -> QueueReport:
        """Return a cluster's own queue, and our jobs in it."""
        ...
