"""Feeds of the ledger's events and of logs: one reader for all who follow, in bounded memory."""

from __future__ import annotations

import asyncio
import codecs
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import anyio.to_thread

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError
from orc.launchers.remote.files import read_range
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.records import EventRecord
from orc.orchestrator.service.ledger_clients import LedgerClients

logger = logging.getLogger("orc.service")
_PAGE = 500
_KEPT_EVENTS = 5000  # newest events in memory; who is further behind reads the ledger


_Result = TypeVar("_Result")


class ClientThreads:
    """Threads that read for a feed: few, so that a slow host leaves the others to requests."""

    def __init__(self, clients: LedgerClients, limit: int) -> None:
        self._clients = clients
        self._limiter = anyio.CapacityLimiter(limit)

    async def run(self, function: Callable[[Client], _Result]) -> _Result:
        """Return the result of *function* on a client."""

        def call() -> _Result:
            with self._clients.client() as client:
                return function(client)

        return await anyio.to_thread.run_sync(call, limiter=self._limiter)


@dataclass(frozen=True)
class FeedEvent(EventRecord):
    """Event with what a follower shows of its job: its state, name and owner when the event was read."""

    state: str
    name: str
    owner: str


class EventFeed:
    """Events of all jobs in the order of their ids, from any id on.

    Followers keep their own positions: a slow one falls behind and is in nobody's way, nothing is queued for it.
    """

    def __init__(self, clients: LedgerClients, poll_s: float) -> None:
        self._threads, self._poll_s = ClientThreads(clients, 2), poll_s
        self._kept: deque[FeedEvent] = deque(maxlen=_KEPT_EVENTS)
        self._position = 0  # id of the newest event that followers may see
        self._news = asyncio.Condition()
        self._followers = 0
        self._poller: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def follow(self, after: int | None = None, job_id: str | None = None) -> AsyncGenerator[FeedEvent]:
        """Yield the events after the id *after* (from now on, without one), of *job_id* if given, and go on."""
        self._followers += 1
        try:
            async with self._starting:
                if not self.is_polling:
                    self._position = await self._threads.run(lambda client: client.workspace.ledger.last_event_id())
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
            self._followers -= 1

    @property
    def is_polling(self) -> bool:
        """True while the ledger is polled: as long as there are followers."""
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
        found = await self._threads.run(lambda client: _events_after(client, position))
        return [event for event in found if event.id <= self._position]

    async def _poll(self) -> None:
        while self._followers:
            try:
                await self._advance()
            except LaunchError as error:  # the ledger is away: followers wait, nothing is lost
                logger.warning("cannot read events: %s", error)
            await asyncio.sleep(self._poll_s)

    async def _advance(self) -> None:
        while True:
            found = await self._threads.run(lambda client: _events_after(client, self._position))
            if found:
                async with self._news:
                    self._kept.extend(found)
                    self._position = found[-1].id
                    self._news.notify_all()
            if len(found) < _PAGE:
                return


def _events_after(client: Client, after: int) -> list[FeedEvent]:
    ledger = client.workspace.ledger
    events = ledger.events_after(after, _PAGE)
    jobs = {job.id: job for job in ledger.jobs(sorted({event.job for event in events}))}
    return [
        FeedEvent(**vars(event), state=str(job.state), name=job.name, owner=job.owner)
        for event in events
        if (job := jobs.get(event.job))
    ]


PIECE = 128 << 10  # bytes of a log that one event brings at most
_KEPT_BYTES = 2 << 20  # newest bytes of a log in memory; who is further behind reads the log
_PAUSE = (0.25, 2.0)  # between two looks at a log that is silent: shorter after it has grown


class LogKey(NamedTuple):
    """Name of one log."""

    job_id: str
    attempt: int
    selector: LogSelector


class Piece(NamedTuple):
    """Piece of a log as text; the next one begins at the byte *end*."""

    text: str
    end: int


def whole_characters(data: bytes) -> tuple[str, int]:
    """Return *data* as text, and how many bytes that was: a character cut at the end is left for the next time.

    Bytes that are no UTF-8 become replacement characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, len(data) - len(decoder.getstate()[0])


def read_at(client: Client, key: LogKey, offset: int, limit: int) -> bytes:
    """Return the bytes of a log from *offset* on, *limit* bytes at most."""
    job = client.workspace.ledger.job(key.job_id)
    if job is not None and job.number < key.attempt:
        return b""  # it is waited for
    if path := client.log_file(key.job_id, key.selector, key.attempt):
        try:
            return read_range(str(path), offset, limit)
        except FileNotFoundError:
            return b""
    chunk = next(iter(client.read_log(key.job_id, key.selector, key.attempt, offset)), None)
    return chunk.data[:limit] if chunk else b""


def has_ended(client: Client, key: LogKey) -> bool:
    """Return True when nothing is written to the log any more."""
    job = client.workspace.ledger.job(key.job_id)
    if job is None or job.number > key.attempt or job.state.terminal:
        return True
    return job.number == key.attempt and job.attempt is not None and job.attempt.state.terminal


class LogFeed:
    """Reader of one log, shared by all its followers."""

    def __init__(self, key: LogKey, thread: ClientThreads) -> None:
        self.key = key
        self.followers = 0
        self._thread = thread
        self._kept: deque[tuple[int, bytes]] = deque()
        self._begin = self._end = -1  # of what is kept; -1 before the first look
        self._ended = False
        self._error: LaunchError | None = None
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """True when the log is not read any further: it has ended, or could not be read."""
        return self._ended or self._error is not None

    async def follow(self, offset: int) -> AsyncGenerator[Piece]:
        """Yield the log from the byte *offset* on until it has ended. Raises `LaunchError`."""
        self.followers += 1
        try:
            while True:
                data = await self._read(offset)
                text, used = whole_characters(data)
                if used:
                    offset += used
                    yield Piece(text, offset)
                    continue
                # Nothing more, or the begin of a character.
                if self._reader is None or self._reader.done():
                    if self._error is not None:
                        raise self._error
                    if self._ended and offset + len(data) >= self._end:
                        if data:
                            yield Piece(data.decode("utf-8", "replace"), offset + len(data))
                        return
                    self._begin = self._end = offset + len(data)
                    self._kept.clear()
                    self._reader = asyncio.create_task(self._follow_file())
                seen = offset + len(data)
                async with self._news:
                    await self._news.wait_for(
                        lambda: self._end > seen or self._ended or self._error is not None  # noqa: B023
                    )
        finally:
            self.followers -= 1

    async def _read(self, offset: int) -> bytes:
        """Return the bytes at *offset*: what is kept of them, else what the log has."""
        if self._kept and self._begin <= offset:
            found = bytearray()
            for start, data in self._kept:
                if offset + len(found) < start + len(data) and len(found) < PIECE:
                    found += data[offset + len(found) - start :]
            return bytes(found[:PIECE])
        if offset == self._end:
            return b""
        return await self._thread.run(lambda client: read_at(client, self.key, offset, PIECE))

    async def _follow_file(self) -> None:
        pause = _PAUSE[0]
        while self.followers:
            try:
                ended = await self._thread.run(lambda client: has_ended(client, self.key))  # before the last look
                grown = False
                while data := await self._thread.run(lambda client: read_at(client, self.key, self._end, PIECE)):
                    grown = True
                    await self._keep(data)
            except LaunchError as error:
                async with self._news:
                    self._error = error
                    self._news.notify_all()
                return
            if ended:
                async with self._news:
                    self._ended = True
                    self._news.notify_all()
                return
            pause = _PAUSE[0] if grown else min(pause * 1.3, _PAUSE[1])
            await asyncio.sleep(pause)

    async def _keep(self, data: bytes) -> None:
        async with self._news:
            self._kept.append((self._end, data))
            self._end += len(data)
            while self._end - self._kept[0][0] > _KEPT_BYTES:
                self._kept.popleft()
            self._begin = self._kept[0][0]
            self._news.notify_all()


class LogFeeds:
    """Logs that are followed now."""

    def __init__(self, clients: LedgerClients, threads: int) -> None:
        self.threads = ClientThreads(clients, threads)
        self._feeds: dict[LogKey, LogFeed] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    async def follow(self, key: LogKey, offset: int) -> AsyncGenerator[Piece]:
        """Yield the log *key* from the byte *offset* on until it has ended. Raises `LaunchError`."""
        feed = self._feeds.get(key)
        if feed is None or feed.is_over:
            feed = self._feeds[key] = LogFeed(key, self.threads)
        try:
            async with aclosing(feed.follow(offset)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if not feed.followers and self._feeds.get(key) is feed:
                del self._feeds[key]
