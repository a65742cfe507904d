"""Requests to a service as values: those of the calls of the API, and of contents. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from orc.orchestrator.api.call import PREFIX, SLOW_S, Call, P, R
from orc.orchestrator.schema import encode

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reply:
    """Answer of a service, as far as requests read it."""

    json: Any
    content: bytes


@dataclass(frozen=True)
class Request(Generic[Answer]):
    """Request, and the reading of its answer. Sent twice, it does its work once: an answer that was lost is requested
    again."""

    method: str
    path: str
    read: Callable[[Reply], Answer]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    content: Callable[[], Iterator[bytes]] | None = None  # instead of a body, made anew for every time it is sent
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0


def request_of(call: Call[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Request[R]:
    """Return the request that asks a service for *call*."""
    given = call.bind(*args, **kwargs)
    path = PREFIX + call.path
    places: dict[str, dict[str, Any]] = {"path": {}, "query": {}, "header": {}, "body": {}}
    for parameter in call.parameters:
        if parameter.name not in given:
            continue
        value = encode(given[parameter.name])
        if parameter.name == "limit":  # what is asked for beyond that comes with the next page
            value = min(value, parameter.bounds.limits["le"])
        if parameter.place == "path":
            path = path.replace(f"{{{parameter.name}}}", quote(str(value), safe=""))
        elif parameter.place == "body" or value not in (None, ""):
            places[parameter.place][parameter.bounds.header or parameter.name] = value
    takes_body = any(parameter.place == "body" for parameter in call.parameters)
    body = places["body"].get(call.whole_body) if call.whole_body else places["body"]
    return Request(
        call.method, path, lambda reply: call.read(reply.json), places["query"], body if takes_body else None,
        headers=places["header"], timeout_s=call.timeout_s,
    )  # fmt: skip


def put_contents(content: Callable[[], Iterator[bytes]], size: int) -> Request[None]:
    """Send contents, as a stream of `orc.launchers.transfer.wire`, *size* bytes in all."""
    return Request(
        "PUT",
        f"{PREFIX}/bundles/content",
        lambda _: None,
        content=content,
        headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)},
        timeout_s=SLOW_S,
    )


def put_tree(digest: str, manifest: Mapping[str, Any]) -> Request[list[str]]:
    """Send a manifest, whose contents the service has; the answer has those that it lacks after all."""
    return Request(
        "PUT",
        f"{PREFIX}/bundles/trees/{quote(digest, safe='')}",
        lambda reply: [str(one) for one in reply.json["missing"]],
        body=dict(manifest),
        timeout_s=SLOW_S,
    )


def log_content(job_id: str, params: Mapping[str, Any]) -> Request[bytes]:
    """Return the request for bytes of a log; *params* name the log and the place."""
    return Request("GET", f"{PREFIX}/jobs/{quote(job_id, safe='')}/log", lambda reply: reply.content, params)


def new_key() -> str:
    """Return a key of one submission, which no other has."""
    return uuid.uuid4().hex
