"""Asynchronous client of a service: the methods of `ServiceClient`, each made in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from orc.orchestrator.clients.service import ServiceClient as Sync

if TYPE_CHECKING:
    from orc.orchestrator.insight.metrics import Line

P = ParamSpec("P")
R = TypeVar("R")
# Set when nobody waits for a call any more: its thread ends where it would pause.
_abandoned = contextvars.ContextVar("abandoned", default=threading.Event())  # noqa: B039 - the default is never set


def _sleep(seconds: float) -> None:
    if _abandoned.get().wait(seconds):
        raise asyncio.CancelledError


async def _in_thread(pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
    context, over = contextvars.copy_context(), threading.Event()
    context.run(_abandoned.set, over)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, context.run, work)
    finally:
        over.set()


def _awaited(method: Callable[Concatenate[Sync, P], R]) -> Callable[Concatenate[AsyncServiceClient, P], Awaitable[R]]:
    @functools.wraps(method)
    async def call(self: AsyncServiceClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await _in_thread(self._pool, lambda: method(self.sync, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[Sync, P], Iterator[R]],
) -> Callable[Concatenate[AsyncServiceClient, P], AsyncIterator[R]]:
    @functools.wraps(method)
    async def call(self: AsyncServiceClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        values, end = method(self.sync, *args, **kwargs), object()
        while (value := await _in_thread(self._pool, lambda: next(values, end))) is not end:
            yield value  # type: ignore[misc]

    return call


class AsyncServiceClient:
    """Submit jobs to a service, follow them, end them, from a program that uses asyncio.

    Use it as an asynchronous context manager or `close` it. Methods, arguments, values and errors are those of
    `ServiceClient`, and so are *url*, *token* and *options*. Each call is made in a thread, and calls back there.
    """

    def __init__(self, url: str, token: str = "", **options: Any) -> None:
        self.sync = Sync(url, token, sleep=_sleep, **options)
        self._pool = ThreadPoolExecutor(1000, thread_name_prefix="orc-client")

    async def __aenter__(self) -> AsyncServiceClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self.sync.close()
        self._pool.shutdown(wait=False)

    async def metrics(self, job_id: str) -> list[Line]:
        """Return the metrics of the training of the job *job_id* so far, oldest first."""
        return await _in_thread(self._pool, self.sync.metrics(job_id).read)

    me, resolve, wait, cancel = _awaited(Sync.me), _awaited(Sync.resolve), _awaited(Sync.wait), _awaited(Sync.cancel)
    ask, submit, resubmit = _awaited(Sync.ask), _awaited(Sync.submit), _awaited(Sync.resubmit)
    job, jobs, events, costs = _awaited(Sync.job), _awaited(Sync.jobs), _awaited(Sync.events), _awaited(Sync.costs)
    submit_group, groups, group = _awaited(Sync.submit_group), _awaited(Sync.groups), _awaited(Sync.group)
    cancel_group, retry_group = _awaited(Sync.cancel_group), _awaited(Sync.retry_group)
    create_schedule, schedules = _awaited(Sync.create_schedule), _awaited(Sync.schedules)
    enable_schedule, delete_schedule = _awaited(Sync.enable_schedule), _awaited(Sync.delete_schedule)
    queueing_clusters, diff = _awaited(Sync.queueing_clusters), _awaited(Sync.diff)
    log_selectors, queue, set_tags = _awaited(Sync.log_selectors), _awaited(Sync.queue), _awaited(Sync.set_tags)
    read_log, follow_log = _iterated(Sync.read_log), _iterated(Sync.follow_log)
    notifications, retry_notifications = _awaited(Sync.notifications), _awaited(Sync.retry_notifications)
