"""Submission to a service: what is sent, and the upload of what the service lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.api.access import find_missing
from orc.orchestrator.api.groups import get_group, retry_group, submit_group
from orc.orchestrator.api.jobs import get_job, resubmit_job, submit_job
from orc.orchestrator.api.schedules import create_schedule
from orc.orchestrator.api.submissions import Digests, NewMember
from orc.orchestrator.clients.errors import SnapshotMissing
from orc.orchestrator.clients.requests import new_key, put_contents, put_tree, request_of
from orc.orchestrator.clients.uploads import LocalSnapshot

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.clients.http_session import HttpSession
    from orc.orchestrator.clients.requests import Request
    from orc.orchestrator.engine.progress import Progress
    from orc.orchestrator.views import GroupView, JobView, ScheduleView

Answer = TypeVar("Answer")
_UPLOADS = 3  # what was uploaded may be collected before it is used


def send_job(session: HttpSession, loaded: LoadedJob, progress: Progress) -> JobView:
    """Submit a job: one request where the service has its code, else an upload of what it lacks in between."""
    secrets = resolve_secrets(loaded.spec.secrets)  # what is missing is known before a file is read
    snapshot = LocalSnapshot(loaded, progress)
    progress("submit", {})
    request = request_of(
        submit_job,
        _document(loaded.spec),
        Digests(**snapshot.digests),
        str(loaded.source_path.absolute()),
        secrets,
        new_key(),
    )
    return _with_trees(session, request, [snapshot])


def send_again(session: HttpSession, job_id: str, overrides: Sequence[str]) -> JobView:
    """Submit a job like *job_id*, with the values that this machine has for its secrets."""
    from orc.orchestrator.engine.changed_spec import changed

    old = get_job(session, job_id)
    spec = changed(old.spec, overrides, where=old.id)
    return resubmit_job(session, old.id, tuple(overrides), resolve_secrets(spec.secrets), new_key())


def send_group(session: HttpSession, loaded: LoadedGroup, progress: Progress) -> GroupView:
    """Submit a group: one request, and before it an upload of what the service lacks of each distinct snapshot."""
    from orc.orchestrator.clients.groups import snapshot_key

    secrets = resolve_secrets(list(dict.fromkeys(name for spec in loaded.specs for name in spec.secrets)))
    snapshots: dict[str, LocalSnapshot] = {}
    documents = [_document(spec) for spec in loaded.specs]
    first = documents[0]
    shared = {key: first[key] for key in first if all(document.get(key) == first[key] for document in documents)}
    members = []
    for member, document in zip(loaded.members, documents, strict=True):
        key = snapshot_key(member.loaded.spec)
        if key not in snapshots:
            snapshots[key] = LocalSnapshot(member.loaded, progress)
        snapshots[key].check(member.loaded.spec)
        own = {name: value for name, value in document.items() if name not in shared}
        members.append(
            NewMember(member.number, Digests(**snapshots[key].digests), own, member.stage, dict(member.parameters))
        )
    progress("submit", {})
    request = request_of(
        submit_group, loaded.kind, loaded.name, members, loaded.max_parallel, str(loaded.source_path.absolute()),
        shared, secrets, new_key(),
    )  # fmt: skip
    return _with_trees(session, request, list(snapshots.values()))


def send_group_again(session: HttpSession, group_id: str) -> GroupView:
    """Submit what has failed of a group once more, with the values that this machine has for its secrets."""
    found = get_group(session, group_id)
    failed = [member.job.id for member in found.members if member.job.state in ("FAILED", "CANCELLED")]
    names: dict[str, None] = {}
    for job_id in failed if found.kind == "pipeline" else failed[:1]:  # those of a sweep have the same ones
        names |= dict.fromkeys(get_job(session, job_id).spec["secrets"])
    return retry_group(session, found.id, resolve_secrets(list(names)), new_key())


def send_schedule(
    session: HttpSession, loaded: LoadedJob, progress: Progress, cron: str, timezone: str, **more: str
) -> ScheduleView:
    """Store a schedule; its code travels as that of a job does. *more* are its name, and what to do at odd times."""
    from orc.orchestrator.engine.schedules import check

    check(loaded.spec, cron, timezone)
    secrets = resolve_secrets(loaded.spec.secrets)
    snapshot = LocalSnapshot(loaded, progress)
    progress("submit", {})
    name = more.pop("name") or loaded.spec.name
    request = request_of(
        create_schedule, _document(loaded.spec), Digests(**snapshot.digests), name, cron, timezone, **more,
        source=str(loaded.source_path.absolute()), secrets=secrets, idempotency_key=new_key(),
    )  # fmt: skip
    return _with_trees(session, request, [snapshot])


def _document(spec: JobSpec) -> Mapping[str, Any]:
    document: Mapping[str, Any] = spec.model_dump(mode="json")
    return document


def _with_trees(session: HttpSession, request: Request[Answer], snapshots: Sequence[LocalSnapshot]) -> Answer:
    """Send *request*, after an upload of the trees of *snapshots* that the service turns out to lack, each once."""
    for _ in range(_UPLOADS):
        try:
            return session.ask(request)
        except SnapshotMissing as missing:
            left = set(missing.digests)
            for snapshot in snapshots:
                _upload(session, snapshot, sorted(left))
                left -= set(snapshot.digests.values())
    return session.ask(request)


def _upload(session: HttpSession, snapshot: LocalSnapshot, digests: Sequence[str]) -> None:
    for bundle in snapshot.bundles(digests):
        wanted = list(snapshot.contents(bundle))
        for _ in range(_UPLOADS):
            lacking = find_missing(session, wanted)
            for content, size in snapshot.uploads(bundle, lacking.missing, lacking.limit):
                session.ask(put_contents(content, size))
            wanted = session.ask(put_tree(bundle.digest, bundle.to_dict()))
            if not wanted:
                break
