"""Routes that read logs: bytes of one, a stream of it, lines that contain a text."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import JSONResponse, Response

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import Kind, shows
from orc.orchestrator.client import Client, JobNotFound
from orc.orchestrator.service.api.events import EventStream, event_stream, last_id, sse_text
from orc.orchestrator.service.auth import PrincipalDep
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.errors import ApiError
from orc.orchestrator.service.feeds import LogKey, read_at
from orc.orchestrator.service.request_limits import asks_clusters

_BYTES = 1 << 20
_SHOWN = 2000  # bytes of a line around what was found
_SECONDS = 5.0  # of one request; the next one goes on


def search_log(
    client: Client, key: LogKey, text: str, *, offset: int, limit: int, ignore_case: bool = False
) -> dict[str, Any]:
    """Return ``{"matches": [{"offset", "text"}], "next"}``: lines with *text* from the byte *offset* on.

    The text is taken literally. A pattern of the caller's could take exponential time.
    """
    pattern = re.compile(re.escape(text.encode("utf-8", "surrogatepass")), re.IGNORECASE if ignore_case else 0)
    until = time.monotonic() + _SECONDS
    matches: list[dict[str, Any]] = []
    begin, rest = offset, b""  # *begin* is the position of rest[0]
    while data := read_at(client, key, begin + len(rest), _BYTES):
        rest += data
        whole = rest.rfind(b"\n") + 1
        if not whole and len(rest) < _BYTES:
            continue  # the rest of the line comes with the next piece
        # A line without an end is looked through in parts that overlap by what a match can be cut to.
        whole = whole or len(rest) - len(text.encode("utf-8", "surrogatepass")) + 1
        if (following := _look(rest[:whole], begin, pattern, matches, limit)) is not None:
            return {"matches": matches, "next": following}
        begin, rest = begin + whole, rest[whole:]
        if time.monotonic() > until:
            return {"matches": matches, "next": begin}
    following = _look(rest, begin, pattern, matches, limit)
    return {"matches": matches, "next": following}


def _look(data: bytes, begin: int, pattern: re.Pattern[bytes], matches: list[dict[str, Any]], limit: int) -> int | None:
    """Add the lines of *data* that match; return where the next would begin when there are *limit*."""
    position = 0
    while found := pattern.search(data, position):
        start = data.rfind(b"\n", 0, found.start()) + 1
        end = data.find(b"\n", found.end())
        end = len(data) if end < 0 else end
        shown = data[max(start, found.start() - _SHOWN // 2) : min(end, found.start() + _SHOWN)]
        matches.append({"offset": begin + start, "text": shown.decode("utf-8", "replace")})
        position = min(end + 1, len(data))
        if len(matches) >= limit:
            return begin + position
        if position >= len(data):
            return None
    return None


router = APIRouter(tags=["logs"])


@dataclass(frozen=True)
class LogMatch:
    """Line that was found; *offset* is where it begins, in bytes."""

    offset: int
    text: str


@dataclass(frozen=True)
class LogSearch:
    """Lines that were found; ``next`` is where to go on, `None` at the end of the log."""

    matches: list[LogMatch]
    next: int | None


_MOST_BYTES = 4 << 20
JobId = Annotated[str, Path(min_length=1, max_length=64, description="Id of the job")]
Attempt = Annotated[int | None, Query(ge=1, le=1 << 30, description="Number of the attempt; the newest by default")]
Offset = Annotated[int, Query(ge=0, lt=1 << 62, description="First byte")]


def _selector(
    rank: Annotated[int | None, Query(ge=0, le=1 << 30, description="What this rank prints")] = None,
    node: Annotated[int | None, Query(ge=0, le=1 << 30, description="What this node's agent prints")] = None,
    launcher: Annotated[bool, Query(description="What the cluster's own launcher prints")] = False,
) -> LogSelector:
    given = (rank is not None) + (node is not None) + launcher
    if given > 1:
        raise ApiError(422, "rank, node and launcher name one log: give one of them", where="query")
    return LogSelector(rank=rank, node=node, launcher=launcher) if given else LogSelector(rank=0)


Selector = Annotated[LogSelector, Depends(_selector)]


def _key(client: Client, job_id: str, attempt: int | None, selector: LogSelector) -> LogKey:
    """Return the name of a log. Raises `JobNotFound`."""
    job = client.workspace.ledger.job(job_id)
    if job is None:
        raise JobNotFound(f"no such job: {job_id}", hint="GET /api/v1/jobs lists the jobs")
    if attempt is not None and attempt > job.number:
        raise JobNotFound(f"{job_id} has no attempt {attempt}", hint=f"it has {job.number}")
    return LogKey(job_id, attempt or job.number or 1, selector)


@router.get(
    "/jobs/{job_id}/log",
    response_class=Response,
    responses={
        200: {
            "description": "Bytes of the log",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            "headers": {"X-Orc-Next-Offset": {"schema": {"type": "integer"}, "description": "where the next begins"}},
        }
    },
)
@shows(Kind.LOGS)
@asks_clusters
def read_log(
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    selector: Selector,
    attempt: Attempt = None,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=_MOST_BYTES, description="Bytes at most")] = 1 << 20,
    tail: Annotated[int | None, Query(ge=1, le=_MOST_BYTES, description="Last bytes, whatever the offset")] = None,
) -> Any:
    """Return bytes of a log as they are; none where it does not go so far (yet)."""
    with service.clients.client() as client:
        key = _key(client, job_id, attempt, selector)
        if tail is not None:
            offset = max(0, _size(client, key) - tail)
            limit = tail
        data = bytearray()
        while len(data) < limit and (piece := read_at(client, key, offset + len(data), limit - len(data))):
            data += piece
    headers = {"X-Orc-Offset": str(offset), "X-Orc-Next-Offset": str(offset + len(data))}
    return Response(bytes(data), media_type="application/octet-stream", headers=headers)


def _size(client: Client, key: LogKey) -> int:
    """Return the bytes of a log; one on another machine is read for that."""
    if path := client.log_file(key.job_id, key.selector, key.attempt):
        try:
            return pathlib.Path(path).stat().st_size
        except OSError:
            return 0
    end = 0
    for chunk in client.read_log(key.job_id, key.selector, key.attempt):
        end = chunk.end
    return end


@router.get("/jobs/{job_id}/log/stream", response_class=EventStream)
@shows(Kind.LOGS)
def stream_log(
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    selector: Selector,
    attempt: Attempt = None,
    offset: Offset = 0,
    last_event_id: Annotated[str | None, Header(description="Sent by a client that connects again")] = None,
) -> Any:
    """Stream a log as server-sent events until its attempt has ended.

    The id of each is the byte at which the next begins, its data ``{"text"}``. The last one is an event `end`, or
    `failed` with what went wrong.
    """
    with service.clients.client() as client:
        key = _key(client, job_id, attempt, selector)
    begin = last_id(last_event_id, offset) or 0
    return event_stream(service, _texts(service, key, begin), principal)


async def _texts(service: Service, key: LogKey, offset: int) -> AsyncGenerator[str]:
    try:
        async with aclosing(service.logs.follow(key, offset)) as pieces:
            async for piece in pieces:
                yield sse_text({"text": piece.text}, event_id=piece.end)
    except LaunchError as error:
        yield sse_text({"what": error.what, "where": error.where, "hint": error.hint}, event="failed")
    else:
        yield sse_text({"attempt": key.attempt}, event="end")


@router.get("/jobs/{job_id}/log/search", response_model=LogSearch)
@shows(Kind.LOGS)
@asks_clusters
def find_in_log(
    service: ServiceDep,
    principal: PrincipalDep,
    job_id: JobId,
    selector: Selector,
    q: Annotated[str, Query(min_length=1, max_length=200, description="Text that lines contain, as it is")],
    attempt: Attempt = None,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Lines at most")] = 100,
    ignore_case: bool = False,
) -> Any:
    """Return lines that contain a text. A long log takes several requests: `next` is the offset of the next one."""
    with service.clients.client() as client:
        key = _key(client, job_id, attempt, selector)
        found = search_log(client, key, q, offset=offset, limit=limit, ignore_case=ignore_case)
    return JSONResponse(found)
