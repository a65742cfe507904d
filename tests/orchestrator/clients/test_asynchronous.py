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
from orc.launchers.spec.groups import LoadedGroup, load_jobs
from orc.orchestrator import AsyncServiceClient, JobNotFound, ServiceClient
from orc.orchestrator.clients import asynchronous

# Of the ledger's client for commands; a service needs none of them.
_NOT_NEEDED = {"refresh", "refresh_within", "log_file", "entries", "workspace", "log_interval_s", "address"}


def test_a_job_lives_alike(served: Served, project: Callable[..., LoadedJob]) -> None:
    def several(name: str) -> LoadedGroup:
        file = project("import time\ntime.sleep(600)\n").base_dir / "sweep.yaml"
        file.write_text(f"{{name: {name}, script: train.py, launcher: python, sweep: {{grid: {{env.LR: [1, 2]}}}}}}")
        loaded = load_jobs(file)
        assert isinstance(loaded, LoadedGroup)
        return loaded

    async def live() -> None:
        async with AsyncServiceClient(served.url, served.tokens["grace"]) as client:
            client.sync.log_interval_s = 0.05
            made = await client.submit(project("print('async', flush=True)\n", tags={"kind": "async"}))
            data = b"".join([chunk.data async for chunk in client.follow_log(made.id, LogSelector(rank=0))])
            assert data == b"async\n"
            (done,) = await client.wait([made.id], timeout_s=120)
            assert done.state == "SUCCEEDED"
            assert await client.job(made.id) == done
            assert await client.resolve(made.id[:-1]) == made.id
            assert [row.id for row in await client.jobs(tags={"kind": "async"})] == [made.id]
            assert (await client.events(made.id))[-1].kind == "job_succeeded"
            assert (await client.set_tags(made.id, {"kind": None})).tags == {}
            clone = await client.resubmit(made.id, overrides=["name=clone"])
            (gone,) = await client.cancel([clone.id], grace_s=0)
            assert gone.cancel_requested_at is not None or gone.ended
            with pytest.raises(JobNotFound, match="no such job"):
                await client.job("nobody-aaaaaa")
            assert (await client.me())["user"] == "grace"
            assert await client.metrics(made.id) == []
            group = await client.submit_group(several(made.name))
            assert (await client.group(group.id)).keys == ["env.LR"]
            assert group.id in [one.id for one in await client.groups(kinds=("sweep",))]
            assert (await client.cancel_group(group.id, grace_s=0)).id == group.id
            await client.wait([member.job.id for member in group.members], timeout_s=120)
            assert [member.submissions for member in (await client.retry_group(group.id)).members] == [2, 2]
            schedule = await client.create_schedule(project(), "0 3 * * *", name="async")
            assert not (await client.enable_schedule(schedule.id, enabled=False)).enabled
            await client.delete_schedule(schedule.id)
            assert schedule.id not in [one.id for one in await client.schedules()]

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
