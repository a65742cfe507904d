"""Methods of `ServiceClient` for groups of jobs and for schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from orc.orchestrator.clients import group_requests
from orc.orchestrator.clients.uploads import silent

if TYPE_CHECKING:
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView
    from orc.orchestrator.clients.protocol import ProgressCallback
    from orc.orchestrator.clients.service import ServiceClient


class ServiceGroupCalls:
    """Methods of `ServiceClient` for groups and schedules: those of `Client`, with the same arguments and errors."""

    @property
    def _service(self) -> ServiceClient:
        return cast("ServiceClient", self)

    def submit_group(self, loaded: LoadedGroup, *, on_progress: ProgressCallback | None = None) -> GroupView:
        """Submit all members of a group, or none."""
        return self._service.lead(group_requests.submit_group(loaded, on_progress or silent))

    def groups(self, *, kinds: Sequence[str] = ("sweep", "array", "pipeline"), limit: int = 20) -> list[GroupView]:
        """Return the newest groups of these kinds."""
        return self._service.ask(group_requests.groups(kinds, limit))

    def group(self, ref: str, *, kinds: Sequence[str] = (), metrics: bool = False) -> GroupView:
        """Return a group and the newest job of each member."""
        return self._service.ask(group_requests.group(ref, kinds, metrics=metrics))

    def cancel_group(self, group_id: str, *, grace_s: float | None = None) -> GroupView:
        """Cancel the members that have not ended."""
        return self._service.ask(group_requests.cancel_group(group_id, grace_s))

    def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more; their secrets are looked up here."""
        return self._service.lead(group_requests.retry_group(group_id))

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
        progress = on_progress or silent
        return self._service.lead(
            group_requests.create_schedule(loaded, cron, name, timezone, missed, overlap, progress)
        )

    def schedules(self) -> list[ScheduleView]:
        """Return all schedules, by name."""
        return self._service.ask(group_requests.schedules())

    def enable_schedule(self, schedule_id: str, *, enabled: bool) -> ScheduleView:
        """Resume a schedule, or pause it."""
        return self._service.ask(group_requests.enable_schedule(schedule_id, enabled=enabled))

    def delete_schedule(self, schedule_id: str) -> None:
        """Forget a schedule; its jobs stay, and those that run go on."""
        self._service.ask(group_requests.delete_schedule(schedule_id))
