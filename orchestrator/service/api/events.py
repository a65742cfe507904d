"""Server-sent events: a response that ends when the service does, and the stream of what happens to all jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from orc.launchers.errors import LaunchError
from orc.orchestrator.api import access
from orc.orchestrator.api.call import Kind, Principal, shows, without_places
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.errors import ApiError
from orc.orchestrator.service.request_limits import too_many

PING_S = 15.0  # so often a stream shows that it lives, and the token it was opened with is looked at again
RETRY_MS = 2000  # a client comes again after so long; with its last id nothing is lost


class EventStream(StreamingResponse):
    """Response of server-sent events."""

    media_type = "text/event-stream"


def sse_text(data: Any, *, event_id: int | None = None, event: str | None = None) -> str:
    """Return one event as text; *data* becomes one line of JSON."""
    lines = [f"id: {event_id}"] if event_id is not None else []
    if event is not None:
        lines.append(f"event: {event}")
    return "\n".join([*lines, f"data: {json.dumps(data, separators=(',', ':'))}", "", ""])


def last_id(header: str | None, parameter: int | None) -> int | None:
    """Return where a stream goes on: the Last-Event-ID that a client sends again, else the *parameter*."""
    if header is not None and header.isascii() and header.isdigit() and len(header) < 19:
        return int(header)
    return parameter


def event_stream(service: Service, texts: AsyncGenerator[str], principal: Principal) -> EventStream:
    """Return a response of *texts*, with a sign of life while there are none; it ends when the service stops.

    It ends as well when the token of *principal* does.

    Raises:
        ApiError: The service is stopping, or too many streams are open.
    """
    if service.stopping.is_set():
        raise ApiError(503, "the service is stopping", headers={"Retry-After": "2"})
    if service.metrics.streams_open >= service.settings.max_streams:
        raise ApiError(503, "too many event streams are open", headers={"Retry-After": "10"})
    if service.metrics.streams_of[principal.token_id] >= service.settings.max_streams_per_token:
        raise too_many(10, "too many event streams of this token are open")
    return EventStream(
        _living(service, texts, principal),
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _counts(service: Service, principal: Principal) -> bool:
    try:
        with service.clients.client() as client:
            return access.still_counts(client.workspace.ledger, principal.token_id, service.clock())
    except LaunchError:
        return True  # a ledger that does not answer for a moment ends no stream


async def _living(service: Service, texts: AsyncGenerator[str], principal: Principal) -> AsyncIterator[str]:
    looked = time.monotonic()
    stopped = asyncio.ensure_future(service.stopping.wait())
    upcoming: asyncio.Future[str] | None = None
    with service.metrics.stream(principal.token_id):
        try:
            yield f"retry: {RETRY_MS}\n\n"
            while True:
                upcoming = upcoming or asyncio.ensure_future(anext(texts))
                waited: set[asyncio.Future[Any]] = {upcoming, stopped}
                await asyncio.wait(waited, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() - looked >= PING_S:
                    looked = time.monotonic()
                    if not await anyio.to_thread.run_sync(_counts, service, principal):
                        return
                if stopped.done():
                    yield f"retry: {RETRY_MS}\n: the service stops\n\n"
                    return
                if not upcoming.done():
                    yield ": still here\n\n"
                    continue
                try:
                    text = upcoming.result()
                except StopAsyncIteration:
                    return
                upcoming = None
                yield text
        finally:
            stopped.cancel()
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            await texts.aclose()


logger = logging.getLogger("orc.service")
router = APIRouter(tags=["events"])


@router.get("/events/stream", response_class=EventStream)
@shows(Kind.STATE, parts=(Kind.PLACES,))
async def stream_events(
    service: ServiceDep,
    principal: PrincipalDep,
    after: Annotated[int | None, Query(ge=0, description="Id of the last event that is known")] = None,
    job: Annotated[str | None, Query(max_length=64, description="Events of this job alone")] = None,
    last_event_id: Annotated[str | None, Header(description="Sent by a client that connects again")] = None,
) -> Any:
    """Stream the events of jobs as server-sent events: from now on, or after the one that is known.

    The id of each is the event's. Its data is the event with ``state``, ``name`` and ``owner`` of the job.
    """
    return event_stream(service, _texts(service, principal, last_id(last_event_id, after), job), principal)


async def _texts(service: Service, principal: Principal, after: int | None, job: str | None) -> AsyncGenerator[str]:
    try:
        async with aclosing(service.events.follow(after, job)) as events:
            async for event in events:
                whole = principal.may_see(Kind.PLACES, event.owner)
                yield sse_text(event.to_dict() if whole else without_places(event.to_dict()), event_id=event.id)
    except LaunchError as error:  # the stream ends, and its client comes again with the last id
        logger.warning("a stream of events has ended: %s", error)
