"""Asynchronous client of a service: the methods of `ServiceClient` as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.errors import LaunchError
from orc.orchestrator.clients import flows, group_requests, reports, requests, transport
from orc.orchestrator.clients.logins import Login, checked_url
from orc.orchestrator.clients.uploads import silent

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from orc.launchers.backends.base import LogChunk, LogSelector, QueueReport
    from orc.launchers.spec import LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.flows import Flow
    from orc.orchestrator.clients.group_views import GroupView, ScheduleView
    from orc.orchestrator.clients.protocol import ProgressCallback
    from orc.orchestrator.clients.requests import Request
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.notifications.calls import NotificationView
    from orc.orchestrator.views import EventView, JobRow, JobView

Answer = TypeVar("Answer")


class AsyncServiceClient:
    """Submit jobs to a service, follow them, end them, from a program that uses asyncio.

    Use it as an asynchronous context manager or `close` it. Methods, arguments, values and errors are those of
    `ServiceClient`; files are read in threads, so the event loop goes on. *url*, *token*, *ca* (a file of certificates
    to trust) and *insecure_http* (a token may travel in the clear) are those of `ServiceClient`.
    """

    log_interval_s = 1.0

    def __init__(self, url: str, token: str = "", *, ca: str = "", insecure_http: bool = False) -> None:
        import httpx

        self._login = Login(checked_url(url), token, ca, insecure_http)
        self._http = httpx.AsyncClient(**transport.options(self._login))

    @property
    def address(self) -> str:
        """URL of the service."""
        return self._login.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, request: Request[Answer]) -> Answer:
        """Return the answer to *request*, sent again when it was lost. Raises `LaunchError`."""
        import httpx

        transport.refuse_clear_secrets(self._login, request)
        attempt = 0
        while True:
            attempt += 1
            response, lost = None, None
            try:
                content: dict[str, Any] = {} if request.content is None else {"content": _in_threads(request.content())}
                response = await self._http.request(
                    request.method, request.path, **transport.arguments(request), **content
                )
            except httpx.TransportError as error:
                lost = error
            wait = transport.pause(attempt, response)
            if wait is not None:
                await asyncio.sleep(wait)
            elif response is None:
                assert lost is not None
                raise transport.unreachable(lost, self.address) from lost
            else:
                return transport.answer(response, request, self.address)

    async def lead(self, flow: Flow[Answer]) -> Answer:
        """Return what *flow* returns, after doing what it requests."""
        step = next(flow)
        try:
            while True:
                try:
                    given = await self._do(step)
                except LaunchError as error:  # the flow's to handle, or to let through
                    step = flow.throw(error)
                else:
                    step = flow.send(given)
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    async def _do(self, step: flows.Step) -> Any:
        if isinstance(step, flows.Pause):
            return await asyncio.sleep(step.seconds)
        if isinstance(step, flows.Work):
            return await asyncio.to_thread(step.do)
        return await self.ask(step)

    async def me(self) -> Mapping[str, Any]:
        """Return the user that the service identifies this client as: ``{"user", "role", ...}``."""
        return await self.ask(requests.me())

    async def submit(self, loaded: LoadedJob, *, on_progress: ProgressCallback | None = None) -> JobView:
        """Submit a job, exactly once whatever is lost on the way; *on_progress* is called in a thread."""
        return await self.lead(flows.submit(loaded, on_progress or silent))

    async def resubmit(self, job_id: str, *, overrides: Sequence[str] = ()) -> JobView:
        """Submit a new job like *job_id*, with *overrides* of its specification."""
        return await self.lead(flows.resubmit(job_id, overrides))

    async def cancel(
        self,
        job_ids: Sequence[str],
        *,
        grace_s: float | None = None,
        on_unreachable: Callable[[Mapping[str, str]], None] | None = None,
    ) -> list[JobView]:
        """Cancel jobs; those that have ended stay as they are."""
        return await self.lead(flows.cancel(job_ids, grace_s, on_unreachable))

    async def submit_group(self, loaded: LoadedGroup, *, on_progress: ProgressCallback | None = None) -> GroupView:
        """Submit all members of a group, or none."""
        return await self.lead(group_requests.submit_group(loaded, on_progress or silent))

    async def groups(
        self, *, kinds: Sequence[str] = ("sweep", "array", "pipeline"), limit: int = 20
    ) -> list[GroupView]:
        """Return the newest groups of these kinds."""
        return await self.ask(group_requests.groups(kinds, limit))

    async def group(self, ref: str, *, kinds: Sequence[str] = (), metrics: bool = False) -> GroupView:
        """Return a group and the newest job of each member."""
        return await self.ask(group_requests.group(ref, kinds, metrics=metrics))

    async def cancel_group(self, group_id: str, *, grace_s: float | None = None) -> GroupView:
        """Cancel the members that have not ended."""
        return await self.ask(group_requests.cancel_group(group_id, grace_s))

    async def retry_group(self, group_id: str) -> GroupView:
        """Submit the members that have ended without success once more."""
        return await self.lead(group_requests.retry_group(group_id))

    async def create_schedule(
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
        return await self.lead(group_requests.create_schedule(loaded, cron, name, timezone, missed, overlap, progress))

    async def schedules(self) -> list[ScheduleView]:
        """Return all schedules, by name."""
        return await self.ask(group_requests.schedules())

    async def enable_schedule(self, schedule_id: str, *, enabled: bool) -> ScheduleView:
        """Resume a schedule, or pause it."""
        return await self.ask(group_requests.enable_schedule(schedule_id, enabled=enabled))

    async def delete_schedule(self, schedule_id: str) -> None:
        """Forget a schedule; its jobs stay, and those that run go on."""
        await self.ask(group_requests.delete_schedule(schedule_id))

    async def set_tags(self, job_id: str, tags: Mapping[str, str | None]) -> JobView:
        """Set tags of a job; `None` removes one."""
        return await self.ask(requests.set_tags(job_id, tags))

    async def job(self, job_id: str) -> JobView:
        """Return a job. Raises `JobNotFound`."""
        return await self.ask(requests.job(job_id))

    async def jobs(
        self,
        *,
        states: Sequence[str] | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        group: str | None = None,
        limit: int | None = 50,
    ) -> list[JobRow]:
        """Return jobs, newest first."""
        return await self.lead(flows.jobs(states, name, tags, limit, group))

    async def events(self, job_id: str) -> list[EventView]:
        """Return the history of a job, oldest first."""
        return await self.lead(flows.events(job_id))

    async def resolve(self, ref: str) -> str:
        """Return the job id that *ref* means: an id, the unambiguous start of one, or ``@last``."""
        return await self.ask(requests.resolve(ref))

    async def wait(
        self,
        job_ids: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_change: Callable[[JobView], None] | None = None,
    ) -> list[JobView]:
        """Wait until all jobs have ended, *timeout_s* seconds at most."""
        return await self.lead(flows.wait(job_ids, timeout_s, on_change))

    async def log_selectors(self, job_id: str, attempt: int | None = None) -> list[LogSelector]:
        """Return the logs of an attempt (the newest by default) that exist so far."""
        return await self.ask(requests.log_selectors(job_id, attempt))

    async def read_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> AsyncIterator[LogChunk]:
        """Yield the content of one log as it is now, from *offset* on."""
        while (chunk := await self.ask(requests.log(job_id, selector, attempt, offset))).data:
            yield chunk
            offset = chunk.end

    async def follow_log(
        self, job_id: str, selector: LogSelector, attempt: int | None = None, offset: int = 0
    ) -> AsyncIterator[LogChunk]:
        """Yield the content of one log as it grows, until its attempt has ended."""
        while True:
            view = await self.job(job_id)
            number = attempt or len(view.attempts)
            ended = view.ended or (0 < number <= len(view.attempts) and view.attempts[number - 1].ended_at is not None)
            if number:
                attempt = number
                async for chunk in self.read_log(job_id, selector, number, offset):
                    yield chunk
                    offset = chunk.end
            if ended:
                return
            await asyncio.sleep(self.log_interval_s)

    async def metrics(self, job_id: str) -> list[Line]:
        """Return the metrics of a job's training so far, oldest first."""
        return (await self.lead(flows.metrics(job_id))).lines

    async def notifications(
        self, *, job_id: str | None = None, states: Sequence[str] = (), limit: int = 100
    ) -> list[NotificationView]:
        """Return the notifications that were sent, newest first. Arguments as of `Client.notifications`."""
        return await self.ask(reports.notifications(job_id, states, limit))

    async def retry_notifications(self, job_id: str) -> int:
        """Make the notifications about a job that were given up due again; return how many there were."""
        return await self.ask(reports.retry_notifications(job_id))

    async def diff(self, a: str, b: str) -> dict[str, Any]:
        """Return the differences between two jobs, as `Client.diff` does."""
        return await self.ask(reports.diff(a, b))

    async def costs(
        self,
        *,
        by: str = "job",
        job_ids: Sequence[str] | None = None,
        owner: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Return hours of nodes and GPUs, and what they cost. Arguments as of `Client.costs`."""
        return await self.ask(reports.costs(by, job_ids, owner, since, until))

    async def queueing_clusters(self) -> tuple[list[str], dict[str, LaunchError]]:
        """Return the clusters with a queue of their own, and the errors of those that are configured wrongly."""
        return await self.ask(requests.queueing_clusters())

    async def queue(self, cluster: str) -> QueueReport:
        """Return a cluster's own queue, and the jobs of the service in it."""
        return await self.ask(requests.queue(cluster))


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield *pieces*, each of which is read from a disk."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
