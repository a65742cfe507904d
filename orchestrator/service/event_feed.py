"""Feed of the ledger's events: one poller in a process, however many listen."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger.records import EventRecord
from orc.orchestrator.service.ledger_clients import LedgerClients

logger = logging.getLogger("orc.service")
_PAGE = 500
_KEPT = 5000  # newest events in memory; who is further behind reads the ledger


@dataclass(frozen=True)
class FeedEvent(EventRecord):
    """Event with what a listener shows of its job: its state, name and owner when the event was read."""

    state: str
    name: str
    owner: str


class EventFeed:
    """Events of all jobs in the order of their ids, from any id on.

    Listeners keep their own positions: a slow one falls behind and is in nobody's way, nothing is queued for it.
    """

    def __init__(self, clients: LedgerClients, poll_s: float) -> None:
        self._clients, self._poll_s = clients, poll_s
        self._kept: deque[FeedEvent] = deque(maxlen=_KEPT)
        self._position = 0  # id of the newest event that listeners may see
        self._news = asyncio.Condition()
        self._listeners = 0
        self._poller: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._threads = anyio.CapacityLimiter(2)

    async def listen(self, after: int | None = None, job_id: str | None = None) -> AsyncGenerator[FeedEvent]:
        """Yield the events after the id *after* (from now on, without one), of *job_id* if given, and go on."""
        self._listeners += 1
        try:
            async with self._starting:
                if not self.is_polling:
                    self._position = await self._thread(self._newest)
                    self._kept.clear()
                    self._poller = asyncio.create_task(self._poll())
            position = self._position if after is None else after
            while True:
                for event in await self._after(position):
                    position = event.id
                    if job_id is None or event.job == job_id:
                        yield event
                async with self._news:
                    await self._news.wait_for(lambda: self._position > position)  # noqa: B023 - awaited right here
        finally:
            self._listeners -= 1

    @property
    def is_polling(self) -> bool:
        """True while the ledger is polled: as long as there are listeners."""
        return self._poller is not None and not self._poller.done()

    def close(self) -> None:
        """Stop the poller."""
        if self._poller is not None:
            self._poller.cancel()

    async def _after(self, position: int) -> Sequence[FeedEvent]:
        if position >= self._position:
            return ()
        if self._kept and self._kept[0].id <= position + 1:
            return [event for event in self._kept if event.id > position]
        found = await self._thread(self._read, position)
        return [event for event in found if event.id <= self._position]

    async def _poll(self) -> None:
        while self._listeners:
            try:
                await self._advance()
            except LaunchError as error:  # the ledger is away: listeners wait, nothing is lost
                logger.warning("cannot read events: %s", error)
            await asyncio.sleep(self._poll_s)

    async def _advance(self) -> None:
        while True:
            found = await self._thread(self._read, self._position)
            if found:
                async with self._news:
                    self._kept.extend(found)
                    self._position = found[-1].id
                    self._news.notify_all()
            if len(found) < _PAGE:
                return

    async def _thread(self, function: Any, *arguments: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)

    def _newest(self) -> int:
        with self._clients.client() as client:
            return client.workspace.ledger.last_event_id()

    def _read(self, after: int) -> list[FeedEvent]:
        with self._clients.client() as client:
            ledger = client.workspace.ledger
            events = ledger.events_after(after, _PAGE)
            jobs = {job.id: job for job in ledger.jobs(sorted({event.job for event in events}))}
        return [
            FeedEvent(**vars(event), state=str(job.state), name=job.name, owner=job.owner)
            for event in events
            if (job := jobs.get(event.job))
        ]
