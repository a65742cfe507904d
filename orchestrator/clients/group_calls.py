"""Methods of `Client` for groups of jobs and for schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.client import Client
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView

ProgressCallback = Callable[[str, Mapping[str, Any]], None]


class GroupCalls:
    """Methods of `Client` for groups and schedules."""

    @property
    def _client(self) -> Client:
        return cast("Client", self)

    def submit_group(self, loaded: LoadedGroup, *, on_progress: ProgressCallback | None = None) -> GroupView:
        """Submit all members of a group, or none.

        Args:
            loaded: The group, from `orc.launchers.spec.groups.load_jobs`.
            on_progress: As of `Client.submit`.

        Raises:
            LaunchError: Certainly none of its jobs runs.
        """
        from orc.orchestrator.clients import groups

        return groups.submit(self._client, loaded, on_progress=on_progress)

    def groups(self, *, kinds: Sequence[str] = ("sweep", "array", "pipeline"), limit: int = 20) -> list[GroupView]:
        """Return the newest groups of these kinds."""
        from orc.orchestrator.clients import groups

        return groups.newest(self._client.workspace, kinds, limit)

    def group(self, ref: str, *, kinds: Sequence[str] = (), metrics: bool = False) -> GroupView:
        """Return a group and the newest job of each member.

        Args:
            ref: Id of the group, the start of one, a job of it, or ``@last``.
            kinds: Only a group of one of these.
            metrics: With the newest of what each member measures, for which its cluster is asked.

        Raises:
            GroupNotFound: No group, or more than one, is meant.
        """
        from orc.orchestrator.clients import groups

        ws = self._client.workspace
        found = groups.view(ws, groups.resolve(ws, ref, kinds))
        return groups.with_metrics(ws, found, self._client.measured) if metrics else found

    def cancel_group(self, group_id: str, *, grace_s: float | None = None) -> GroupView:
        """Cancel the members that have not ended. Raises `GroupNotFound`."""
        from orc.orchestrator.clients import groups

        return groups.cancel(self._client, group_id, grace_s=grace_s)

    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more, from the same snapshots.

        Raises:
            GroupNotFound: There is no such group.
            LaunchError: None of them could be submitted, or there are none.
        """
        from orc.orchestrator.clients import groups

        return groups.resubmit(self._client, group_id)

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
        """Submit a job again and again, from the snapshot that is taken now.

        Args:
            loaded: The job.
            cron: When: five fields, like ``0 3 * * mon-fri``.
            name: What people call the schedule; the job's name unless given.
            timezone: An IANA name.
            missed: What becomes of times at which nothing of orc ran: ``skip``, or ``run_once`` for all of them.
            overlap: What becomes of a time at which the last job has not ended: ``skip`` or ``allow``.
            on_progress: As of `Client.submit`.

        Raises:
            SpecError: It is no time, or no job that can be scheduled.
        """
        from orc.orchestrator.clients.group_views import ScheduleView
        from orc.orchestrator.engine import schedules, snapshots
        from orc.orchestrator.engine.submission import silent

        schedules.check(loaded.spec, cron, timezone)
        ws = self._client.workspace
        snapshot = snapshots.take(ws.store, loaded, on_progress or silent, ws.backend(loaded.spec.cluster))
        record = schedules.create(
            ws,
            loaded.spec,
            snapshot,
            name=name or loaded.spec.name,
            expression=cron,
            zone=timezone,
            missed=missed,
            overlap=overlap,
            source=str(loaded.source_path.absolute()) if loaded.source_path else "",
        )
        return ScheduleView.of(record)

    def schedules(self) -> list[ScheduleView]:
        """Return all schedules, by name."""
        from orc.orchestrator.clients.group_views import ScheduleView
        from orc.orchestrator.engine import schedules

        return [ScheduleView.of(record) for record in schedules.all_schedules(self._client.workspace)]

    def enable_schedule(self, schedule_id: str, *, enabled: bool) -> ScheduleView:
        """Resume a schedule, or pause it: what was due meanwhile is not made up for. Raises `LaunchError`."""
        from orc.orchestrator.clients.group_views import ScheduleView
        from orc.orchestrator.engine import schedules

        return ScheduleView.of(schedules.change(self._client.workspace, schedule_id, enabled=enabled))

    def delete_schedule(self, schedule_id: str) -> None:
        """Forget a schedule; its jobs stay, and those that run go on."""
        from orc.orchestrator.engine import schedules

        schedules.remove(self._client.workspace, schedule_id)
