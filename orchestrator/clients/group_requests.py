"""Requests about groups of jobs and schedules, and the conversations that submit them. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from orc.orchestrator.clients import wire
from orc.orchestrator.clients.flows import Flow, Work, with_trees
from orc.orchestrator.clients.group_views import GroupView, ScheduleView
from orc.orchestrator.clients.requests import API, IDEMPOTENCY_KEY, SLOW_S, Request, new_key

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.protocol import ProgressCallback
    from orc.orchestrator.clients.uploads import LocalSnapshot


def _at(kind: str, name: str, rest: str = "") -> str:
    return f"{API}/{kind}/{quote(name, safe='')}{rest}"


def _new(path: str, body: Any) -> Request[GroupView]:
    headers = {IDEMPOTENCY_KEY: new_key()}
    read = wire.group_view
    return Request("POST", path, lambda reply: read(reply.json), body=body, headers=headers, timeout_s=SLOW_S)


def groups(kinds: Sequence[str], limit: int) -> Request[list[GroupView]]:
    """Return the request for the newest groups."""
    return Request(
        "GET",
        f"{API}/groups",
        lambda reply: [wire.group_view(one) for one in reply.json["groups"]],
        {"kind": list(kinds), "limit": min(limit, 100)},
        timeout_s=SLOW_S,
    )


def group(ref: str, kinds: Sequence[str], *, metrics: bool) -> Request[GroupView]:
    """Return the request for a group."""
    params = {"kind": list(kinds), "metrics": str(metrics).lower()}
    path = _at("groups", ref)
    return Request("GET", path, lambda reply: wire.group_view(reply.json), params, timeout_s=SLOW_S)


def cancel_group(group_id: str, grace_s: float | None) -> Request[GroupView]:
    """Cancel what has not ended of a group."""
    path, body = _at("groups", group_id, "/cancel"), {} if grace_s is None else {"grace_s": grace_s}
    return Request("POST", path, lambda reply: wire.group_view(reply.json), body=body, timeout_s=SLOW_S)


def schedules() -> Request[list[ScheduleView]]:
    """Return the request for all schedules."""
    return Request(
        "GET", f"{API}/schedules", lambda reply: [wire.schedule_view(one) for one in reply.json["schedules"]]
    )


def enable_schedule(schedule_id: str, *, enabled: bool) -> Request[ScheduleView]:
    """Resume or pause a schedule."""
    path = _at("schedules", schedule_id)
    return Request("PATCH", path, lambda reply: wire.schedule_view(reply.json), body={"enabled": enabled})


def delete_schedule(schedule_id: str) -> Request[None]:
    """Return the request that deletes a schedule."""
    return Request("DELETE", _at("schedules", schedule_id), lambda _: None)


def _values(specs: Sequence[JobSpec]) -> dict[str, str]:
    """Return the values that this machine has for the secrets of all *specs*."""
    from orc.launchers.secrets import resolve_secrets

    return resolve_secrets(list(dict.fromkeys(name for spec in specs for name in spec.secrets)))


def submit_group(loaded: LoadedGroup, progress: ProgressCallback) -> Flow[GroupView]:
    """Submit a group: one request, and before it an upload of what the service lacks of each distinct snapshot."""
    from orc.orchestrator.clients.groups import snapshot_key
    from orc.orchestrator.clients.uploads import LocalSnapshot

    secrets = _values(loaded.specs)
    snapshots: dict[str, LocalSnapshot] = {}
    documents = [spec.model_dump(mode="json") for spec in loaded.specs]
    first = documents[0]
    shared = {key: first[key] for key in first if all(document.get(key) == first[key] for document in documents)}
    members = []
    for member, document in zip(loaded.members, documents, strict=True):
        key = snapshot_key(member.loaded.spec)
        if key not in snapshots:
            snapshots[key] = yield Work(lambda one=member.loaded: LocalSnapshot(one, progress))  # type: ignore[misc]
        snapshots[key].check(member.loaded.spec)
        members.append(
            {
                "index": member.number,
                "stage": member.stage,
                "parameters": dict(member.parameters),
                "spec": {name: value for name, value in document.items() if name not in shared},
                "digests": snapshots[key].digests,
            }
        )
    progress("submit", {})
    body = {
        "kind": loaded.kind,
        "name": loaded.name,
        "max_parallel": loaded.max_parallel,
        "source": str(loaded.source_path.absolute()),
        "shared": shared,
        "members": members,
        "secrets": secrets,
    }
    return (yield from with_trees(_new(f"{API}/groups", body), list(snapshots.values())))


def retry_group(group_id: str) -> Flow[GroupView]:
    """Submit what has failed of a group once more, with the values that this machine has for its secrets."""
    from orc.launchers.secrets import resolve_secrets
    from orc.orchestrator.clients import requests
    from orc.orchestrator.views import JobView

    found: GroupView = yield group(group_id, (), metrics=False)
    failed = [member.job.id for member in found.members if member.job.state in ("FAILED", "CANCELLED")]
    names: dict[str, None] = {}
    for job_id in failed if found.kind == "pipeline" else failed[:1]:  # those of a sweep have the same ones
        job: JobView = yield requests.job(job_id)
        names |= dict.fromkeys(job.spec["secrets"])
    body = {"secrets": resolve_secrets(list(names))}
    again: GroupView = yield _new(_at("groups", found.id, "/retry"), body)
    return again


def create_schedule(
    loaded: LoadedJob, cron: str, name: str, timezone: str, missed: str, overlap: str, progress: ProgressCallback
) -> Flow[ScheduleView]:
    """Store a schedule; its code travels as that of a job does."""
    from orc.orchestrator.clients.uploads import LocalSnapshot
    from orc.orchestrator.engine.schedules import check

    check(loaded.spec, cron, timezone)
    secrets = _values([loaded.spec])
    snapshot: LocalSnapshot = yield Work(lambda: LocalSnapshot(loaded, progress))
    progress("submit", {})
    body: Mapping[str, Any] = {
        "spec": loaded.spec.model_dump(mode="json"),
        "digests": snapshot.digests,
        "source": str(loaded.source_path.absolute()) if loaded.source_path else "",
        "secrets": secrets,
        "name": name or loaded.spec.name,
        "cron": cron,
        "timezone": timezone,
        "missed": missed,
        "overlap": overlap,
    }
    headers = {IDEMPOTENCY_KEY: new_key()}
    request = Request(
        "POST",
        f"{API}/schedules",
        lambda reply: wire.schedule_view(reply.json),
        body=body,
        headers=headers,
        timeout_s=SLOW_S,
    )
    return (yield from with_trees(request, [snapshot]))
