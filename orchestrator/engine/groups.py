"""Groups of jobs: their submission, all or none of it, and what has become of their members."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.engine import artefacts, job_files, job_secrets, submission
from orc.orchestrator.engine.array_submission import start_array
from orc.orchestrator.engine.dependencies import job_named, required, waiting_reason
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.limits import is_limited
from orc.orchestrator.engine.placement import PlacementPlanner, Progress
from orc.orchestrator.ledger import dependencies, groups
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.records import NewJob

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.relations import Requirement
    from orc.orchestrator.ledger.groups import GroupRecord
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.workspace import Workspace

# What the jobs of one array of a cluster may differ in.
_OF_PROGRAM = frozenset({"name", "script", "module", "command", "args", "env", "tags", "runtime", "checkpoint"})
_APART_S = 1e-6  # between the times of two members: whose turn it is follows from the time, and theirs in their order


@dataclass(frozen=True)
class Entry:
    """Job that is to be submitted, and its place in a group."""

    spec: JobSpec
    snapshot: Snapshot
    number: int | None = None
    stage: str = ""  # name by which others of the same submission refer to it
    source: str = ""


def new_group(ws: Workspace, kind: str, name: str, max_parallel: int | None, spec: Mapping[str, Any]) -> GroupRecord:
    """Return a group that `enqueue` can store."""
    return groups.GroupRecord(new_job_id(name), kind, name, ws.user, ws.clock(), max_parallel, spec)


def enqueue(
    ws: Workspace,
    entries: Sequence[Entry],
    *,
    group: GroupRecord | None = None,
    known: bool = False,
    given: Mapping[str, str] | None = None,
    not_before: float | None = None,
) -> list[JobRecord]:
    """Store new jobs in one transaction, all or none; passes send those whose turn it is.

    Args:
        ws: The workspace.
        entries: The jobs. Their `depends_on` and `inputs` may name the stages of others among them.
        group: The group that they belong to.
        known: The group is in the ledger already.
        given: Values of their secrets, beside those of the environment.
        not_before: When they may be sent at the earliest; seconds since the epoch.

    Returns:
        The jobs, QUEUED, in the order of *entries*.

    Raises:
        LaunchError: None of them was stored.
    """
    ids = [ws.new_job_id(entry.spec.name) for entry in entries]
    stages = {entry.stage: job_id for entry, job_id in zip(entries, ids, strict=True) if entry.stage}
    array = group.id if group is not None and group.kind in ("sweep", "array") else ""
    new: list[NewJob] = []
    needs: list[list[Requirement]] = []
    secrets: list[Mapping[str, str]] = []
    for entry, job_id in zip(entries, ids, strict=True):
        ws.backend(entry.spec.cluster)
        spec = as_member(_with_ids(ws, entry.spec, stages), array)
        artefacts.check(ws, spec, {key: one.spec for key, one in zip(ids, entries, strict=True)})
        needs.append(required(ws, spec, ids))
        secrets.append(resolve_secrets(spec.secrets, {**os.environ, **(given or {})}))
        attempt = AttemptId(job_id, 1)
        PlacementPlanner(ws, spec, entry.snapshot, attempt).render(None)  # what can never be sent is refused now
        made = submission.new_job(ws, spec, entry.snapshot, attempt, entry.source)
        group_id = group.id if group else None
        new.append(replace(made, group_id=group_id, group_index=entry.number, not_before=not_before))
    reasons = [_reason(ws, wanted, ids) for wanted in needs]
    with job_secrets.until_recorded(ws, *ids):
        for job, values in zip(new, secrets, strict=True):
            job_secrets.keep_for(ws, job.id, values)
        with ws.ledger.transaction() as tx:
            if group is not None and not known:
                groups.create(tx.connection, group)
            records = []
            for job, reason in zip(new, reasons, strict=True):
                records.append(tx.enqueue(job, reason))
                tx.now += _APART_S
            pairs = [(job.id, one) for job, wanted in zip(new, needs, strict=True) for one in wanted]
            dependencies.add(
                tx.connection, [dependencies.Dependency(job_id, one.job, one.condition) for job_id, one in pairs]
            )
    fault_point("enqueued")
    for job, record in zip(new, records, strict=True):
        job_files.keep(ws.state_dir, job, record.created_at)
    ws.on_live_job()
    return records


def enqueue_stages(
    ws: Workspace, entries: Sequence[Entry], group: GroupRecord, given: Mapping[str, str] | None = None
) -> list[JobRecord]:
    """Submit the jobs of a pipeline. Raises `LaunchError` when certainly none of them runs."""
    return enqueue(ws, entries, group=group, given=given)


def submit_members(
    ws: Workspace, entries: Sequence[Entry], group: GroupRecord, given: Mapping[str, str] | None = None
) -> list[JobRecord]:
    """Submit the members of a sweep or an array: as one array of the cluster where that can be, else one by one.

    Raises `LaunchError` when certainly none of them runs.
    """
    from orc.launchers.backends.base import SupportsArrays

    specs = [entry.spec for entry in entries]
    backend = ws.backend(specs[0].cluster)
    waits = bool(specs[0].depends_on or specs[0].inputs) or is_limited(ws, specs[0].cluster)
    apart = any(entry.snapshot.digests != entries[0].snapshot.digests for entry in entries)
    if not isinstance(backend, SupportsArrays) or len(specs) == 1 or waits or apart or not _alike(specs):
        return enqueue(ws, entries, group=group, given=given)
    return start_array(
        ws,
        [as_member(spec, group.id) for spec in specs],
        entries[0].snapshot,
        source=entries[0].source,
        at_once=group.max_parallel,
        given=given,
        group=group,
        numbers=[entry.number or 0 for entry in entries],
    )


def _alike(specs: Sequence[JobSpec]) -> bool:
    first, *others = ({k: v for k, v in spec.model_dump().items() if k not in _OF_PROGRAM} for spec in specs)
    return all(other == first for other in others)


def as_member(spec: JobSpec, array: str) -> JobSpec:
    """Return *spec* as a job by itself, with the group *array* as what Slurm calls the job of an array."""
    changes: dict[str, Any] = {"sweep": None, "array": None, "max_parallel": None}
    if array:
        changes["env"] = {**spec.env, "ORC_ARRAY_JOB_ID": array}
    return spec.model_copy(update=changes)


def _with_ids(ws: Workspace, spec: JobSpec, stages: Mapping[str, str]) -> JobSpec:
    """Return *spec* with the ids of the jobs that it names as stages, and of all whose artefacts it takes."""
    from orc.launchers.spec.relations import artefact, requirement

    if not (spec.depends_on or spec.inputs):
        return spec
    waits = [(text, requirement(text)) for text in spec.depends_on]
    taken = {name: artefact(text) for name, text in spec.inputs.items()}
    return spec.model_copy(
        update={
            "depends_on": [f"{stages[one.job]}:{one.condition}" if one.job in stages else text for text, one in waits],
            "inputs": {
                name: f"{stages.get(one.job) or job_named(ws, one.job)}.{one.output}" for name, one in taken.items()
            },
        }
    )


def _reason(ws: Workspace, wanted: Sequence[Requirement], ids: Sequence[str]) -> str:
    states = {job.id: job.state for job in ws.ledger.jobs([one.job for one in wanted if one.job not in ids])}
    found = [
        (dependencies.Dependency("", one.job, one.condition), states.get(one.job, JobState.QUEUED)) for one in wanted
    ]
    return waiting_reason(found)


def start_job(
    ws: Workspace,
    job: JobSpec,
    snapshot: Snapshot,
    *,
    source: str,
    progress: Progress = submission.silent,
    given: Mapping[str, str] | None = None,
) -> JobRecord:
    """Submit one new job: at once, or when what it depends on has ended. Raises what `submission.start` raises."""
    if job.depends_on or set(job.inputs) - set(snapshot.inputs):
        ws.backend(job.cluster)  # one that is not configured is the cheapest mistake
        return enqueue(ws, [Entry(job, snapshot, source=source)], given=given)[0]
    return submission.start(ws, job, snapshot, source=source, progress=progress, given=given)
