"""The asynchronous client does what the synchronous one does."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable

import pytest
from served_ledger import Served

from orc.launchers.attempts.records import LogSelector
from orc.launchers.spec import LoadedJob
from orc.orchestrator import AsyncServiceClient, JobNotFound, ServiceClient
from orc.orchestrator.clients import asynchronous

# Of the ledger's client for commands; a service needs none of them.
_NOT_NEEDED = {"refresh", "refresh_within", "log_file", "entries", "workspace", "log_interval_s", "address"}


def test_a_job_lives_alike(served: Served, project: Callable[..., LoadedJob]) -> None:
    async def live() -> None:
        async with AsyncServiceClient(served.url, served.tokens["grace"]) as client:
            client.sync.log_interval_s = 0.05
            made = await client.submit(project("print('async', flush=True)\n", tags={"kind": "async"}))
            data = b"".join([chunk.data async for chunk in client.follow_log(made.id, LogSelector(rank=0))])
            assert data == b"async\n"
            (done,) = await client.wait([made.id], timeout_s=120)
            assert done.state == "SUCCEEDED"
            assert await client.job(made.id) == done
            clone = await client.resubmit(made.id, overrides=["name=clone"])
            (gone,) = await client.cancel([clone.id], grace_s=0)
            assert gone.cancel_requested_at is not None or gone.ended
            with pytest.raises(JobNotFound, match="no such job"):
                await client.job("nobody-aaaaaa")
            assert await client.metrics(made.id) == []

    asyncio.run(live())


def test_a_call_that_is_cancelled_ends_where_it_would_pause() -> None:
    ended = threading.Event()

    def pauses() -> None:
        try:
            asynchronous._sleep(600)
        finally:
            ended.set()

    async def give_up() -> None:
        async with AsyncServiceClient("http://127.0.0.1:1") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asynchronous._in_thread(client._pool, pauses), 0.05)
            assert await asyncio.to_thread(ended.wait, 60)

    asyncio.run(give_up())


def test_it_has_every_method() -> None:
    def public(cls: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}

    assert public(ServiceClient) - public(AsyncServiceClient) <= _NOT_NEEDED
