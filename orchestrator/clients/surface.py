"""Methods of the clients, the same against a ledger and against a service.

Most are a call of the API (`orc.orchestrator.api`) in the client's session, which carries it out: in this process, or
by a request. What needs files or passes of this machine, `Client` and `ServiceClient` do each in its way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import Self

    from orc.launchers.backends.base import LogChunk, LogSelector, NodeEntry, QueueReport
    from orc.launchers.errors import LaunchError
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.api.call import Session
    from orc.orchestrator.engine.steps import Progress
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.views import EventView, GroupView, JobRow, JobView, NotificationView, ScheduleView

_ALL = 1 << 40  # rows; a service gives a page of them at a time


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
        """Hosts that the last call could not reach, with the reasons."""
        ...

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first. Raises `LaunchError`."""
        ...


class JobsClient(ABC):
    """Client of a ledger (`Client`) or of a service (`ServiceClient`). All methods raise `LaunchError`.

    The reference of the Python client (docs/reference/python-client.md) has examples. Where a method has them,
    *on_progress* is called with steps (bytes hashed and sent, findings), and *grace_s* are the seconds between SIGTERM
    and SIGKILL, by default the job's own.
    """

    session: Session  # where its calls are carried out
    log_interval_s: float  # between two looks at a log that is followed
    address: str = ""  # URL of the service; empty for the ledger of this machine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the ledger, or the connection."""

    @abstractmethod
    def submit(self, loaded: LoadedJob, *, on_progress: Progress | None = None) -> JobView:
        """Submit the job *loaded* (`orc.launchers.spec.load_job`), exactly once whatever happens to this process.

        Returns the job as it is now; *on_progress*: see `JobsClient`. Raises `LaunchError`: it certainly does not run.
        """

    @abstractmethod
    def resubmit(self, job_id: str, *, overrides: Sequence[str] = (), on_progress: Progress | None = None) -> JobView:
        """Submit a new job like *job_id*, which stays as it is, with *overrides* as after ``--set``.

        Returns the new job; *on_progress* as of `submit`. Raises `JobNotFound`, and `SpecError` for a wrong override.
        """

    @abstractmethod
    def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel the jobs *job_ids*; those that have ended stay as they are.

        *on_unreachable* is called with the clusters that did not answer, and why; later passes ask them again. Returns
        the jobs, in the order of *job_ids*. Raises `JobNotFound`. *grace_s*: see `JobsClient`.
        """

    @abstractmethod
    def submit_group(self, loaded: LoadedGroup, *, on_progress: Progress | None = None) -> GroupView:
        """Submit all members of a sweep, an array or a pipeline (`orc.launchers.spec.groups.load_jobs`), or none.

        Returns the group *loaded* with its jobs; *on_progress* as of `submit`. Raises `LaunchError`: no member runs.
        """

    def groups(self, *, kinds: Sequence[str] = ("sweep", "array", "pipeline"), limit: int = 20) -> list[GroupView]:
        """Return the newest groups of these *kinds*, *limit* of them at most."""
        from orc.orchestrator.api.groups import list_groups

        return list_groups(self.session, kind=tuple(kinds), limit=limit).groups

    def group(self, ref: str, *, kinds: Sequence[str] = (), metrics: bool = False) -> GroupView:
        """Return a group and the newest job of each member, with *metrics* also the last measurements of each.

        *ref* is its id, the unambiguous start of it, or ``@last``; with *kinds* only groups of these are meant. Raises
        `GroupNotFound` where no group, or more than one, is meant.
        """
        from orc.orchestrator.api.groups import get_group

        return get_group(self.session, ref, kind=tuple(kinds), metrics=metrics)

    def cancel_group(self, group_id: str, *, grace_s: float | None = None) -> GroupView:
        """Cancel the members of the group *group_id* that have not ended; return the group after the call.

        Raises `GroupNotFound`. *grace_s*: see `JobsClient`.
        """
        from orc.orchestrator.api.groups import cancel_group

        return cancel_group(self.session, group_id, grace_s=grace_s)

    @abstractmethod
    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members of the group *group_id* that have ended without success once more.

        Returns the group after the call. Raises `GroupNotFound`.
        """

    @abstractmethod
    def create_schedule(
        self,
        loaded: LoadedJob,
        cron: str,
        *,
        name: str = "",
        timezone: str = "UTC",
        missed: str = "skip",
        overlap: str = "skip",
        on_progress: Progress | None = None,
    ) -> ScheduleView:
        """Submit a job again and again, from the snapshot that is taken now. Returns the new schedule.

        Args:
            loaded: The job, from `orc.launchers.spec.load_job`.
            cron: Five fields of cron: minute, hour, day, month, day of the week.
            name: Name of the schedule; the job's unless given.
            timezone: Time zone of *cron*, like ``Europe/Berlin``.
            missed: What a time that has passed unattended becomes: ``skip`` or ``run_once``.
            overlap: What happens while the job before still runs: ``skip`` or ``allow``.
            on_progress: As of `submit`.

        Raises:
            SpecError: One of the values is wrong.
        """

    def schedules(self) -> list[ScheduleView]:
        """Return all schedules, by name."""
        from orc.orchestrator.api.groups import list_schedules

        return list_schedules(self.session).schedules

    def enable_schedule(self, schedule_id: str, *, enabled: bool) -> ScheduleView:
        """Resume the schedule *schedule_id* where *enabled* is True, or pause it; return it after the call."""
        from orc.orchestrator.api.groups import change_schedule

        return change_schedule(self.session, schedule_id, enabled=enabled)

    def delete_schedule(self, schedule_id: str) -> None:
        """Forget the schedule *schedule_id*; its jobs stay, and those that run go on."""
        from orc.orchestrator.api.groups import delete_schedule

        delete_schedule(self.session, schedule_id)

    def set_tags(self, job_id: str, tags: Mapping[str, str | None]) -> JobView:
        """Set *tags* of the job *job_id*; `None` removes one, others stay. Return the job after the call.

        Raises `JobNotFound`, and `SpecError` for a tag that no job file could have.
        """
        from orc.orchestrator.api.jobs import change_tags

        return change_tags(self.session, job_id, tags)

    @abstractmethod
    def refresh(self, job_ids: Sequence[str] | None = None, *, patience_s: float = 0.0) -> Refreshed:
        """Poll the clusters of the jobs *job_ids* (of all live ones unless given) and store what they report.

        For another process that is polling the same cluster it waits *patience_s* seconds. Returns the clusters that
        did not answer.
        """

    @abstractmethod
    def refresh_within(self, job_ids: Sequence[str], seconds: float) -> None:
        """Poll the clusters of *job_ids*, for *seconds* at most."""

    def job(self, job_id: str) -> JobView:
        """Return the job *job_id*. Raises `JobNotFound`."""
        from orc.orchestrator.api.jobs import get_job

        return get_job(self.session, job_id)

    def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        group: str | None = None,
        limit: int | None = 50,
    ) -> list[JobRow]:
        """Return jobs, newest first: of one of these *states*, of this *name*, with all these *tags*, of this *group*.

        A group is a sweep, an array, a pipeline or a schedule. It is *limit* jobs at most, with `None` all.
        """
        from orc.orchestrator.api.jobs import list_jobs

        if states is not None and not states:
            return []
        state = tuple(map(str, states or ()))
        tag = tuple(f"{key}={value}" for key, value in (tags or {}).items())
        rows: list[JobRow] = []
        cursor: str | None = None
        while limit is None or len(rows) < limit:
            size = _ALL if limit is None else limit - len(rows)
            page = list_jobs(self.session, state=state, name=name, tag=tag, group=group, limit=size, cursor=cursor)
            rows += page.jobs
            cursor = page.next
            if cursor is None:
                break
        return rows

    def events(self, job_id: str) -> list[EventView]:
        """Return the history of the job *job_id*, oldest first. Raises `JobNotFound`."""
        from orc.orchestrator.api.jobs import list_events

        return list_events(self.session, job_id).events

    def resolve(self, ref: str) -> str:
        """Return the job id that *ref* means: an id, the unambiguous start of one, or ``@last``."""
        from orc.orchestrator.api.jobs import resolve_job

        return resolve_job(self.session, ref).id

    @abstractmethod
    def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Wait until the jobs *job_ids* have ended, *timeout_s* seconds at most: without limit unless given.

        *on_change* is called with a job whenever its state changes. Returns the jobs, in the order of *job_ids*; after
        the timeout some have not ended. Raises `JobNotFound`.
        """

    def log_selectors(self, job_id: str, attempt: int | None = None) -> list[LogSelector]:
        """Return the logs of an *attempt* (by its number; the newest unless given) of *job_id* that exist so far."""
        from orc.orchestrator.api.logs import list_logs

        return list_logs(self.session, job_id, attempt).logs

    @abstractmethod
    def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log of *job_id* as it is now, from the byte *offset* on.

        *selector* names the log: of a rank, a node or the launcher; *attempt* as of `log_selectors`. Raises
        `LaunchError` where there is no such log.
        """

    def follow_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> Iterator[LogChunk]:
        """Yield the content of one log as it grows, until its attempt has ended.

        *job_id*, *selector*, *attempt* and *offset* are those of `read_log`.
        """
        while True:
            view = self.job(job_id)
            number = attempt or len(view.attempts)
            # An attempt whose end was seen before its log was read has been read completely.
            ended = view.ended or (0 < number <= len(view.attempts) and view.attempts[number - 1].ended_at is not None)
            if number:
                attempt = number
                for chunk in self.read_log(job_id, selector, number, offset):
                    yield chunk
                    offset = chunk.end
            if ended:
                return
            self.session.sleep(self.log_interval_s)
            self.refresh([job_id])

    @abstractmethod
    def log_file(self, job_id: str, selector: LogSelector, attempt: int | None = None) -> str | None:
        """Return the path of a log on this machine; `None` where it has to be read.

        *job_id*, *selector* and *attempt* are those of `read_log`.
        """

    @abstractmethod
    def metrics(self, job_id: str) -> MetricsReader:
        """Return a reader of what the training of the job *job_id* measures."""

    def notifications(
        self, *, job_id: str | None = None, states: Sequence[str] = (), limit: int = 100
    ) -> list[NotificationView]:
        """Return the notifications that were sent, newest first, *limit* at most.

        They are those about the job *job_id*, in one of the *states* ``due``, ``sent`` and ``dead``, where given.
        """
        from orc.orchestrator.api.insight import list_notifications

        return list_notifications(self.session, job=job_id, state=tuple(states), limit=limit).notifications

    def retry_notifications(self, job_id: str) -> int:
        """Make the notifications about the job *job_id* that were given up due again; return how many there were."""
        from orc.orchestrator.api.insight import retry_notifications

        return retry_notifications(self.session, job_id).due

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences between the jobs *a* and *b*."""
        from orc.orchestrator.api.insight import diff_jobs

        return diff_jobs(self.session, a, b).to_dict()

    def costs(
        self,
        *,
        by: str = "job",
        job_ids: Sequence[str] | None = None,
        owner: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Return hours of nodes and GPUs, and what they cost: of the jobs *job_ids*, or of those of the user *owner*.

        They are grouped *by* ``job``, ``user``, ``project``, ``cluster``, ``day`` or ``tag:KEY``. What ran before
        *since* or after *until* (seconds since the epoch) is left out.
        """
        from orc.orchestrator.api.insight import add_up_costs

        if job_ids is not None and not job_ids:
            job_ids = [""]  # of no job
        found = add_up_costs(self.session, by=by, job=tuple(job_ids or ()), owner=owner, since=since, until=until)
        return found.to_dict()

    @abstractmethod
    def entries(self, job_id: str, attempt: int | None = None) -> list[NodeEntry]:
        """Return the ways to the nodes of an *attempt* (the newest unless given) of the job *job_id*.

        Raises `NeedsLedger` through a service.
        """

    @abstractmethod
    def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that are configured wrongly."""

    def queue(self, cluster: str) -> QueueReport:
        """Return a cluster's own queue, and our jobs in it: of *cluster*, by its name."""
        from orc.orchestrator.api.clusters import read_queue

        return read_queue(self.session, cluster)
