"""Requests of the REST interface as values: method, path, body, and a reader of the answer. No I/O.

The synchronous and the asynchronous client send the same ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

from orc.launchers.attempts.logs import LogChunk, LogSelector
from orc.orchestrator.clients import wire

if TYPE_CHECKING:
    from orc.launchers.backends.base import QueueReport
    from orc.launchers.errors import LaunchError
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.views import EventView, JobRow, JobView

API = "/api/v1"
PAGE = 500  # rows of one answer
LOG_BYTES = 1 << 20  # of one answer
IDEMPOTENCY_KEY = "Idempotency-Key"
# Of a request that does something at a cluster, which may have to be reached first.
SLOW_S = 300.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reply:
    """Answer of a service, as far as requests read it."""

    json: Any
    content: bytes
    headers: Mapping[str, str]


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


def job_path(job_id: str, rest: str = "") -> str:
    """Return the path of a job, whatever *job_id* holds."""
    return f"{API}/jobs/{quote(job_id, safe='')}{rest}"


def job(job_id: str) -> Request[JobView]:
    """Return the request for a job."""
    return Request("GET", job_path(job_id), lambda reply: wire.job_view(reply.json))


def resolve(ref: str) -> Request[str]:
    """Return the request for the id of the job that *ref* means."""
    return Request("GET", f"{API}/resolve", lambda reply: str(reply.json["id"]), {"ref": ref})


def jobs(
    states: Sequence[str] | None,
    name: str | None,
    tags: Mapping[str, str] | None,
    limit: int,
    cursor: str | None = None,
    group: str | None = None,
) -> Request[tuple[list[JobRow], str | None]]:
    """Return the request for a page of jobs; the answer has the cursor of the next one."""
    params: dict[str, Any] = {"limit": limit}
    if states is not None:
        params["state"] = list(states)
    if name is not None:
        params["name"] = name
    if tags:
        params["tag"] = [f"{key}={value}" for key, value in tags.items()]
    if group is not None:
        params["group"] = group
    if cursor:
        params["cursor"] = cursor
    return Request(
        "GET",
        f"{API}/jobs",
        lambda reply: ([wire.job_row(row) for row in reply.json["jobs"]], reply.json.get("next")),
        params,
    )


def events(job_id: str, after: int = 0) -> Request[list[EventView]]:
    """Return the request for the history of a job, after the event of that id."""
    return Request(
        "GET",
        job_path(job_id, "/events"),
        lambda reply: [wire.event_view(one) for one in reply.json["events"]],
        {"after": after},
    )


def submit(
    spec: Mapping[str, Any], digests: Mapping[str, str], source: str, secrets: Mapping[str, str], key: str
) -> Request[JobView]:
    """Submit a job; the same *key* is the same job, so the request may be repeated."""
    body = {"spec": dict(spec), "digests": dict(digests), "source": source, "secrets": dict(secrets)}
    return Request(
        "POST",
        f"{API}/jobs",
        lambda reply: wire.job_view(reply.json),
        body=body,
        headers={IDEMPOTENCY_KEY: key},
        timeout_s=SLOW_S,
    )


def resubmit(job_id: str, overrides: Sequence[str], secrets: Mapping[str, str], key: str) -> Request[JobView]:
    """Submit a job like another one."""
    return Request(
        "POST",
        job_path(job_id, "/resubmit"),
        lambda reply: wire.job_view(reply.json),
        body={"set": list(overrides), "secrets": dict(secrets)},
        headers={IDEMPOTENCY_KEY: key},
        timeout_s=SLOW_S,
    )


def new_key() -> str:
    """Return a key of one submission, which no other has."""
    return uuid.uuid4().hex


def cancel(job_id: str, grace_s: float | None) -> Request[tuple[JobView, dict[str, str]]]:
    """Cancel a job; the answer has the clusters that could not be reached. Doing that twice is the same."""
    return Request(
        "POST",
        job_path(job_id, "/cancel"),
        lambda reply: (wire.job_view(reply.json), dict(reply.json.get("unreachable") or {})),
        body={} if grace_s is None else {"grace_s": grace_s},
        timeout_s=SLOW_S,
    )


def set_tags(job_id: str, tags: Mapping[str, str | None]) -> Request[JobView]:
    """Set and remove tags of a job."""
    return Request("PATCH", job_path(job_id, "/tags"), lambda reply: wire.job_view(reply.json), body=dict(tags))


def log_selectors(job_id: str, attempt: int | None) -> Request[list[LogSelector]]:
    """Return the request for the list of an attempt's logs."""
    params = {} if attempt is None else {"attempt": attempt}
    return Request(
        "GET", job_path(job_id, "/logs"), lambda reply: [wire.selector(one) for one in reply.json["logs"]], params
    )


def log_params(selector: LogSelector, attempt: int | None, offset: int) -> dict[str, Any]:
    """Return the parameters that name a place in a log."""
    named = {key: "true" if value is True else value for key, value in wire.selector_dict(selector).items()}
    return {**named, **({} if attempt is None else {"attempt": attempt}), "offset": offset}


def log(job_id: str, selector: LogSelector, attempt: int | None, offset: int) -> Request[LogChunk]:
    """Return the request for the next piece of a log; an empty one is its end for now."""
    params = {**log_params(selector, attempt, offset), "limit": LOG_BYTES}
    return Request("GET", job_path(job_id, "/log"), lambda reply: LogChunk(selector, offset, reply.content), params)


class MeasuredPart(NamedTuple):
    """Part of the lines of a job's metrics, and the hosts that could not be reached."""

    lines: list[Line]
    unreachable: dict[str, str]
    complete: bool
    next: str  # from where the next part goes on


def metrics(job_id: str, after: str) -> Request[MeasuredPart]:
    """Return the request for a part of what a job has measured, beyond *after*."""
    return Request(
        "GET",
        job_path(job_id, "/metrics"),
        lambda reply: MeasuredPart(**{name: reply.json[name] for name in MeasuredPart._fields}),
        {"after": after},
    )


def queueing_clusters() -> Request[tuple[list[str], dict[str, LaunchError]]]:
    """Return the request for the clusters of the service that have a queue of their own."""
    return Request(
        "GET",
        f"{API}/clusters",
        lambda reply: ([str(one["name"]) for one in reply.json["clusters"] if one["has_queue"]], {}),
    )


def queue(cluster: str) -> Request[QueueReport]:
    """Return the request for the queue of a cluster."""
    return Request(
        "GET", f"{API}/clusters/{quote(cluster, safe='')}/queue", lambda reply: wire.queue_report(reply.json)
    )


def me() -> Request[Mapping[str, Any]]:
    """Return the request for the caller's identity."""
    return Request("GET", f"{API}/me", lambda reply: dict(reply.json))


def missing_contents(hashes: Sequence[str]) -> Request[tuple[list[str], int]]:
    """Return the request for the contents that the service lacks; the answer has the limit of one upload."""
    return Request(
        "POST",
        f"{API}/bundles/missing",
        lambda reply: ([str(one) for one in reply.json["missing"]], int(reply.json["limit"])),
        body={"hashes": list(hashes)},
    )


def put_contents(content: Callable[[], Iterator[bytes]], size: int) -> Request[None]:
    """Send contents, framed by `orc.orchestrator.clients.content_stream`, *size* bytes in all."""
    return Request(
        "PUT",
        f"{API}/bundles/content",
        lambda _: None,
        content=content,
        headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)},
        timeout_s=SLOW_S,
    )


def put_tree(digest: str, manifest: Mapping[str, Any]) -> Request[list[str]]:
    """Send a manifest, whose contents the service has; the answer has those that it lacks after all."""
    return Request(
        "PUT",
        f"{API}/bundles/trees/{quote(digest, safe='')}",
        lambda reply: [str(one) for one in reply.json["missing"]],
        body=dict(manifest),
        timeout_s=SLOW_S,
    )
