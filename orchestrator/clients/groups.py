"""Groups of jobs against the ledger: sweeps, arrays and pipelines are submitted, looked at, and submitted again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.api.call import GroupNotFound
from orc.orchestrator.ledger import groups as table
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.store import JobFilter
from orc.orchestrator.views import TERMINAL, GroupView, JobRow, MemberView

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.groups import LoadedGroup
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.engine.steps import Progress
    from orc.orchestrator.engine.submission import Submission
    from orc.orchestrator.insight.metrics import MeasuredJobs
    from orc.orchestrator.ledger.groups import GroupRecord
    from orc.orchestrator.workspace import Workspace

_MOST = 1_000_000  # jobs of one group


def submit(session: LedgerSession, loaded: LoadedGroup, *, on_progress: Progress | None = None) -> GroupView:
    """Submit all members of a group, or none, as `JobsClient.submit_group`."""
    from orc.launchers.ids import new_job_id
    from orc.orchestrator.engine.steps import silent
    from orc.orchestrator.engine.submission import as_member, new_submission, submit_group

    ws = session.workspace
    snapshots: dict[str, Snapshot] = {}
    source = str(loaded.source_path.absolute())
    described = description({m.number: (m.parameters, m.stage) for m in loaded.members})
    group_id = new_job_id(loaded.name)
    group = table.GroupRecord(group_id, loaded.kind, loaded.name, ws.user, ws.clock(), loaded.max_parallel, described)
    submissions = []
    for member in loaded.members:
        snapshot = _snapshot(ws, member.loaded, snapshots, on_progress or silent)
        new = new_submission(ws, as_member(member.loaded.spec, group), snapshot, source=source)
        submissions.append(replace(new, group=group.id, number=member.number, stage=member.stage))
    ids = submit_group(ws, submissions, group)
    if ws.ledger.page(JobFilter(group=group.id, states=[JobState.QUEUED]), limit=1).rows:
        session.refresh(ids)
    return view(ws, group.id)


def description(members: Mapping[int, tuple[Mapping[str, str], str]]) -> dict[str, Any]:
    """Return the description of *members* in the row of a group: by their numbers, parameters and stages."""
    return {
        "members": {str(number): dict(parameters) for number, (parameters, _) in members.items() if parameters},
        "stages": {str(number): stage for number, (_, stage) in members.items() if stage},
    }


def snapshot_key(spec: JobSpec) -> str:
    """Return a text that is the same for jobs with one snapshot: of a directory and environment, on a cluster."""
    return f"{spec.cluster} {spec.workdir!r} {spec.environment!r}"


def _snapshot(ws: Workspace, loaded: LoadedJob, known: dict[str, Snapshot], progress: Progress) -> Snapshot:
    """Return the snapshot of a member; those with the same directory and environment on a cluster share one."""
    from orc.orchestrator.engine.job_source import check_script, take

    spec = loaded.spec
    key = snapshot_key(spec)
    if key in known:
        check_script(spec, known[key].code)
    else:
        known[key] = take(ws.store, loaded, progress, ws.backend(spec.cluster))
    return known[key]


def resubmit(session: LedgerSession, group_id: str) -> GroupView:
    """Submit the members that have ended without success once more, from the same snapshots, in the same group.

    What has succeeded is not run again: its outputs serve those that take them. Members that wait for a failure which
    has not come stay as they are. Raises `GroupNotFound`, and `LaunchError` where none could be submitted.
    """
    from orc.orchestrator.engine.submission import enqueue

    ws = session.workspace
    records = enqueue(ws, submissions_again(ws, group_id))
    session.refresh([new.id for new in records])
    return view(ws, group_id)


def submissions_again(ws: Workspace, group_id: str) -> list[Submission]:
    """Return the jobs that `resubmit` submits; each has its old id as its stage. Raises what that raises."""
    from orc.orchestrator.engine.attempt_inputs import stored_snapshot, stored_spec
    from orc.orchestrator.engine.submission import new_submission

    shown = view(ws, group_id)
    over = {JobState.FAILED, JobState.CANCELLED}
    again = {member.job.id: member for member in shown.members if member.job.state in over}
    specs = {job_id: stored_spec(ws, job_id) for job_id in again}
    while stuck := [job_id for job_id, spec in specs.items() if not _can_start(ws, spec, specs)]:
        for job_id in stuck:
            del specs[job_id]
    if not specs:
        what = f"no member of {group_id} {'could start now' if again else 'has failed'}"
        raise LaunchError(what, hint=f"`orc {shown.kind} status {group_id}` shows them")
    found = []
    for job_id, spec in specs.items():
        digests = ws.ledger.jobs([job_id])[0].digests
        taken = {text.rpartition(".")[0] for text in spec.inputs.values()}
        snapshot = stored_snapshot(ws, digests)
        if taken & specs.keys():  # what another one has left is left anew
            snapshot = replace(snapshot, inputs={})
        new = new_submission(ws, spec, snapshot, source=f"job:{job_id}")
        found.append(replace(new, group=group_id, number=again[job_id].index, stage=job_id))
    return found


def _can_start(ws: Workspace, spec: Any, submitted: Mapping[str, Any]) -> bool:
    from orc.launchers.spec.relations import requirement
    from orc.orchestrator.engine.admission import is_met

    for text in spec.depends_on:
        wanted = requirement(text)
        job = None if wanted.job in submitted else ws.ledger.job(wanted.job)
        if job is not None and job.state.terminal and not is_met(wanted.condition, job.state):
            return False
    return True


def cancel(session: LedgerSession, group_id: str, *, grace_s: float | None = None) -> GroupView:
    """Cancel the members that have not ended. Raises `GroupNotFound`, `LedgerError`."""
    from orc.orchestrator.clients import ending

    members = view(session.workspace, group_id).members
    if live := [member.job.id for member in members if member.job.state not in TERMINAL]:
        ending.cancel(session, live, grace_s=grace_s)
    return view(session.workspace, group_id)


def view(ws: Workspace, group_id: str) -> GroupView:
    """Return a group and the newest job of each member. Raises `GroupNotFound`."""
    group = record_of(ws, group_id)
    rows = [JobRow(*row) for row in ws.ledger.page(JobFilter(group=group.id), limit=_MOST).rows]
    members: dict[int, MemberView] = {}
    for row in sorted(rows, key=lambda row: row.created_at):
        number = len(members) if row.group_index is None else row.group_index  # runs of a schedule have none
        before = members[number].submissions if number in members else 0
        stage, parameters = (group.spec.get(what, {}).get(str(number)) for what in ("stages", "members"))
        members[number] = MemberView(number, stage, parameters or {}, row, before + 1)
    ordered = tuple(members[number] for number in sorted(members))
    counts = dict(Counter(member.job.state for member in ordered))
    return GroupView.from_record(group, members=ordered, counts=counts)


def newest(ws: Workspace, kinds: Sequence[str], limit: int) -> list[GroupView]:
    """Return the newest groups of these kinds, without their members."""
    with ws.ledger.database.read() as connection:
        found = table.newest(connection, limit, kinds)
        return [GroupView.from_record(group, members=(), counts=table.counts(connection, group.id)) for group in found]


def resolve(ws: Workspace, ref: str, kinds: Sequence[str] = ()) -> str:
    """Return the id of the group that *ref* means: an id, the start of one, a member's job id, or ``@last``.

    Raises `GroupNotFound`.
    """
    with ws.ledger.database.read() as connection:
        if table.find(connection, ref) is not None:
            return ref
        groups = table.newest_ids(connection, 1000, kinds)
    if ref == "@last" and groups:
        return groups[0]
    candidates = [group for group in groups if group.startswith(ref)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise GroupNotFound(f"{ref!r} is not unique", hint=f"it is the start of {', '.join(candidates[:5])}")
    job = ws.ledger.job(ref)
    if job is not None and job.group_id:
        return job.group_id
    from orc.launchers.spec.problems import nearest

    what = f"no such {' or '.join(kinds) or 'group'}: {ref}{nearest(ref, groups)}"
    raise GroupNotFound(what, hint=f"`orc {kinds[0]} list` shows them" if kinds else "`orc list` shows the jobs")


def with_metrics(ws: Workspace, group: GroupView, known: MeasuredJobs) -> GroupView:
    """Return *group* with the newest value of each measurement of its members."""
    until = time.monotonic() + known.seconds
    members = tuple(replace(one, metrics=_last_metrics(ws, one.job.id, known, until)) for one in group.members)
    return replace(group, members=members)


def _last_metrics(ws: Workspace, job_id: str, known: MeasuredJobs, until: float) -> dict[str, float]:
    """Return the newest value of each measurement of a job; nothing where its cluster does not answer in time."""
    from orc.orchestrator.insight.metrics import Curves

    left = until - time.monotonic()
    try:
        found = known.of(job_id).update(ws, job_id, Curves.summaries, left) if left > 0 else {}
    except LaunchError:
        return {}
    return {name: summary["last"] for name, summary in found.items()}


def record_of(ws: Workspace, group_id: str) -> GroupRecord:
    """Return the row of a group. Raises `GroupNotFound`."""
    with ws.ledger.database.read() as connection:
        group = table.find(connection, group_id)
    if group is None:
        raise GroupNotFound(f"no such group: {group_id}")
    return group
