"""Conversations with a service, written once: generators that yield requests and are given their answers.

`ServiceClient` and `AsyncServiceClient` lead them, each in its own way. A `Pause` is a request to wait. Work with files
of this machine is a `Work`, which the asynchronous client does in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from orc.orchestrator.clients import requests
from orc.orchestrator.clients.errors import SnapshotMissing
from orc.orchestrator.clients.requests import Request

if TYPE_CHECKING:
    from orc.launchers.spec import LoadedJob
    from orc.orchestrator.clients.protocol import ProgressCallback
    from orc.orchestrator.clients.requests import MeasuredPart
    from orc.orchestrator.clients.uploads import LocalSnapshot
    from orc.orchestrator.insight.metrics import Line
    from orc.orchestrator.views import EventView, JobRow, JobView

# Between two looks of `wait`: a twentieth of the time since something changed, within these bounds (seconds).
_INTERVAL_S = (0.2, 3.0)
_UPLOADS = 3  # what was uploaded may be collected before it is used


@dataclass(frozen=True)
class Pause:
    """Wish to wait."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Wish to have something done that reads and writes files here."""

    do: Callable[[], Any]


Answer = TypeVar("Answer")
Step = Request[Any] | Pause | Work
Flow = Generator[Step, Any, Answer]


def metrics(job_id: str, after: str = "") -> Flow[MeasuredPart]:
    """Return what a job has measured beyond *after*, which takes as many requests as there is of it."""
    lines: list[Line] = []
    while True:
        part: MeasuredPart = yield requests.metrics(job_id, after)
        lines += part.lines
        if part.complete or part.next == after:
            return part._replace(lines=lines)
        after = part.next


def submit(loaded: LoadedJob, progress: ProgressCallback) -> Flow[JobView]:
    """Submit a job: one request where the service has its code, else an upload of what it lacks in between."""
    from orc.launchers.secrets import resolve_secrets
    from orc.orchestrator.clients.uploads import LocalSnapshot

    secrets = resolve_secrets(loaded.spec.secrets)  # what is missing is known before a file is read
    snapshot: LocalSnapshot = yield Work(lambda: LocalSnapshot(loaded, progress))
    source = str(loaded.source_path.absolute()) if loaded.source_path else ""
    progress("submit", {})
    spec = loaded.spec.model_dump(mode="json")
    request = requests.submit(spec, snapshot.digests, source, secrets, requests.new_key())
    return (yield from with_trees(request, [snapshot]))


def with_trees(request: Request[Answer], snapshots: Sequence[LocalSnapshot]) -> Flow[Answer]:
    """Send *request*, after an upload of the trees of *snapshots* that the service turns out to lack, each once."""
    for _ in range(_UPLOADS):
        try:
            answer: Answer = yield request
            return answer
        except SnapshotMissing as missing:
            left = set(missing.digests)
            for snapshot in snapshots:
                yield from _upload(snapshot, sorted(left))
                left -= set(snapshot.digests.values())
    answer = yield request
    return answer


def _upload(snapshot: LocalSnapshot, digests: Sequence[str]) -> Flow[None]:
    for bundle in snapshot.bundles(digests):
        wanted = list(snapshot.contents(bundle))
        for _ in range(_UPLOADS):
            lacking, limit = yield requests.missing_contents(wanted)
            for content, size in snapshot.uploads(bundle, lacking, limit):
                yield requests.put_contents(content, size)
            wanted = yield requests.put_tree(bundle.digest, bundle.to_dict())
            if not wanted:
                break


def resubmit(job_id: str, overrides: Sequence[str]) -> Flow[JobView]:
    """Submit a job like *job_id*, with the values that this machine has for its secrets."""
    from orc.launchers.secrets import resolve_secrets
    from orc.orchestrator.engine.changed_spec import changed

    old: JobView = yield requests.job(job_id)
    spec = changed(old.spec, overrides, where=old.id)
    secrets = resolve_secrets(spec.secrets)
    view: JobView = yield requests.resubmit(old.id, overrides, secrets, requests.new_key())
    return view


def cancel(
    job_ids: Sequence[str],
    grace_s: float | None,
    on_unreachable: Callable[[Mapping[str, str]], None] | None,
) -> Flow[list[JobView]]:
    """Cancel jobs, all of which must exist before one is cancelled."""
    if len(job_ids) > 1:
        for job_id in job_ids:
            yield requests.job(job_id)
    views: list[JobView] = []
    untold: dict[str, str] = {}
    for job_id in job_ids:
        view, unreachable = yield requests.cancel(job_id, grace_s)
        views.append(view)
        untold |= unreachable
    if untold and on_unreachable:
        on_unreachable(untold)
    return views


def jobs(
    states: Sequence[str] | None,
    name: str | None,
    tags: Mapping[str, str] | None,
    limit: int | None,
    group: str | None = None,
) -> Flow[list[JobRow]]:
    """Return jobs, newest first, page by page."""
    found: list[JobRow] = []
    cursor: str | None = None
    while limit is None or len(found) < limit:
        size = requests.PAGE if limit is None else min(requests.PAGE, limit - len(found))
        page, cursor = yield requests.jobs(states, name, tags, size, cursor, group)
        found += page
        if not cursor:
            break
    return found


def events(job_id: str) -> Flow[list[EventView]]:
    """Return the history of a job, page by page."""
    found: list[EventView] = []
    while page := (yield requests.events(job_id, found[-1].id if found else 0)):
        if found and page[0].id <= found[-1].id:
            break  # a service that sends the whole history at once
        found += page
    return found


def wait(
    job_ids: Sequence[str],
    timeout_s: float | None,
    on_change: Callable[[JobView], None] | None,
    clock: Callable[[], float] = time.monotonic,
) -> Flow[list[JobView]]:
    """Look at jobs until all have ended; their last views in the order of *job_ids*."""
    began = last_change = clock()
    views: dict[str, JobView] = {}
    while True:
        for job_id in job_ids:
            if job_id in views and views[job_id].ended:
                continue
            view: JobView = yield requests.job(job_id)
            if views.get(job_id) != view:
                views[job_id] = view
                last_change = clock()
                if on_change is not None:
                    on_change(view)
        now = clock()
        if all(view.ended for view in views.values()) or (timeout_s is not None and now - began >= timeout_s):
            return [views[job_id] for job_id in job_ids]
        pause = min(max(_INTERVAL_S[0], (now - last_change) / 20), _INTERVAL_S[1])
        yield Pause(pause if timeout_s is None else min(pause, max(began + timeout_s - now, 0.0)))
