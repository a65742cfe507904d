"""Submission of new jobs: one value for each, and one transaction for all. A pass of the reconciler sends them.

What can never be sent is refused before anything is recorded. From the transaction on the jobs will run, whoever has to
finish the work (docs/explanation/exactly-once.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import SpecError
from orc.launchers.ids import AttemptId, new_job_id
from orc.launchers.secrets import resolve_secrets
from orc.orchestrator.engine import attempt_inputs, delivery, dispatch, job_secrets
from orc.orchestrator.engine.admission import required, waiting_reason
from orc.orchestrator.engine.job_copies import keep_copy
from orc.orchestrator.engine.placement import RenderedPlan, render_anywhere
from orc.orchestrator.engine.steps import PassReport, Progress, fault_point, silent
from orc.orchestrator.engine.updates import deadline_at
from orc.orchestrator.ledger import groups, leases
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.ledger.lifecycle import JobState
from orc.orchestrator.ledger.records import JobRecord, NewJob, QueueEntry

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.relations import Requirement
    from orc.orchestrator.ledger.groups import GroupRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


@dataclass(frozen=True)
class Submission:
    """Job that is to be submitted, with all that the ledger will know of it."""

    spec: JobSpec
    snapshot: Snapshot  # which is in the local store
    owner: str  # login name of who submits it
    id: str
    source: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)  # values, beside those of the environment
    encrypted: bool = False  # they are kept as ciphertext in the ledger, not in a file
    request: str = ""  # digest of the key of the request that makes it
    group: str | None = None
    number: int | None = None  # its place in the group
    stage: str = ""  # name by which others that are submitted with it refer to it
    not_before: float | None = None  # when it may be sent at the earliest; seconds since the epoch


def new_submission(
    ws: Workspace, spec: JobSpec, snapshot: Snapshot, *, source: str, secrets: Mapping[str, str] | None = None
) -> Submission:
    """Return the submission of a job by itself for the user of *ws*."""
    return Submission(spec, snapshot, ws.user, new_job_id(spec.name), source, secrets or {})


@dataclass(frozen=True)
class CheckedJob:
    """New job that can be recorded."""

    entry: QueueEntry
    secrets: Mapping[str, str] = field(default_factory=dict)  # to be kept in a file
    needs: Sequence[Requirement] = ()
    rendered: Mapping[str, RenderedPlan] = field(default_factory=dict)  # its first attempt, by marker


def submit(
    ws: Workspace,
    submissions: Sequence[Submission],
    *,
    within: Callable[[Transaction], object] | None = None,
    progress: Progress = silent,
) -> list[str]:
    """Submit new jobs, and send them at once; return their ids. Where there is no room for one, it is QUEUED then.

    Those that wait for other jobs are left to later passes. *within* is as of `enqueue`.

    Raises `LaunchError` when none of them certainly runs. What no cluster has to be asked for leaves no record; what
    its cluster refuses is in the ledger as FAILED then. A submission that was cut off raises nothing: the job will be
    found or sent.
    """
    for cluster in {one.spec.cluster for one in submissions}:
        ws.backend(cluster).check_installed()
    waits = any(one.spec.depends_on or set(one.spec.inputs) - set(one.snapshot.inputs) for one in submissions)
    checked = check(ws, submissions)
    fault_point("snapshot-taken")
    records = record(ws, checked, within=within, claimed=not waits)
    ids = [record.id for record in records]
    if waits:
        return ids
    report = PassReport()
    rendered = {marker: plan for job in checked for marker, plan in job.rendered.items()}
    try:
        try:
            dispatch.dispatch(ws, records, report, dispatch.NewJobs(progress, rendered))
        except KeyboardInterrupt:
            for current in ws.ledger.jobs(ids):
                delivery.abandon(ws, current)
            raise
        finally:
            ws.give_back(*ids)
    except LedgerError as error:
        # Too late to undo: the intent is durable, and to submit again would make two jobs.
        raise _recorded(error, ids) from error
    fault_point("claim-released")
    if ids and all(job_id in report.errors for job_id in ids):
        raise report.errors[ids[0]]
    return ids


def _recorded(error: LedgerError, ids: Sequence[str]) -> LedgerError:
    if len(ids) == 1:
        what = f"the job {ids[0]} is recorded, and runs or will run"
        hint = f"`orc status {ids[0]}`; do not submit it again"
    else:
        what = f"the jobs {', '.join(ids)} are recorded, and run or will run"
        hint = "do not submit them again; `orc list` shows them"
    hint = "; then ".join(filter(None, [error.hint, hint]))
    return LedgerError(f"{error.what}; {what}", where=error.where, hint=hint)


def enqueue(
    ws: Workspace,
    submissions: Sequence[Submission],
    *,
    within: Callable[[Transaction], object] | None = None,
) -> list[JobRecord]:
    """Record new jobs in one transaction, all or none, and return them in their order, QUEUED; passes send them.

    Their `depends_on` and `inputs` may name the stages of others among them. *within* writes what belongs to them in
    the same transaction, before them. Raises `LaunchError` where none of them was recorded.
    """
    checked = check(ws, submissions)
    fault_point("snapshot-taken")
    return record(ws, checked, within=within)


def check(ws: Workspace, submissions: Sequence[Submission]) -> list[CheckedJob]:
    """Return what is recorded of *submissions*, asking no cluster. Raises `LaunchError` for what can never be sent."""
    ids = {one.stage: one.id for one in submissions if one.stage}
    specs = {one.id: one.spec for one in submissions}
    subscribed, environment = ws.subscriptions(), dict(os.environ)
    checked = []
    for one in submissions:
        backend = ws.backend(one.spec.cluster)  # one that is not configured is the cheapest mistake
        if one.spec.sweep is not None or one.spec.array is not None:
            raise SpecError(
                "describes several jobs, and one is submitted", where=one.spec.name, hint="submit it as a group"
            )
        spec = _with_ids(ws, one.spec, ids)
        attempt_inputs.check(ws, spec, specs)
        needs = required(ws, spec, specs)
        secrets = resolve_secrets(spec.secrets, {**environment, **one.secrets})
        attempt = AttemptId(one.id, 1)
        rendered = {attempt.marker: render_anywhere(ws, spec, one.snapshot, attempt, one.owner)}
        ciphertext = job_secrets.encrypt(ws.state_dir, one.id, secrets) if one.encrypted and secrets else ""
        row = row_of(
            subscribed(spec).model_dump(mode="json"), ws.clock(), id=one.id, backend=backend.kind,
            source=one.source, digests=one.snapshot.digests, origin=ws.origin, owner=one.owner, group_id=one.group,
            group_index=one.number, not_before=one.not_before,
        )  # fmt: skip
        entry = QueueEntry(row, _reason(ws, needs, specs), ciphertext, one.request)
        checked.append(CheckedJob(entry, {} if one.encrypted else secrets, needs, rendered))
    return checked


def row_of(spec: Mapping[str, Any], now: float, **columns: Any) -> NewJob:
    """Return the new job of a specification as it is stored, submitted *now*; *columns* are what does not follow."""
    named = {name: spec[name] for name in ("name", "cluster", "tags")}
    return NewJob(
        spec=spec, **named, project=spec.get("project") or "", priority=spec.get("priority", 0),
        deadline_at=deadline_at(spec.get("deadline"), now), **columns,
    )  # fmt: skip


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
                name: f"{stages.get(one.job) or ws.ledger.resolve(one.job, f'inputs.{name}')}.{one.output}"
                for name, one in taken.items()
            },
        }
    )


def _reason(ws: Workspace, needs: Sequence[Requirement], new: Mapping[str, object]) -> str:
    if not needs:
        return ""
    states = {job.id: job.state for job in ws.ledger.jobs([one.job for one in needs if one.job not in new])}
    return waiting_reason(
        (groups.Dependency("", one.job, one.condition), states.get(one.job, JobState.QUEUED)) for one in needs
    )


def record(
    ws: Workspace,
    jobs: Sequence[CheckedJob],
    *,
    within: Callable[[Transaction], object] | None = None,
    claimed: bool = False,
) -> list[JobRecord]:
    """Record *jobs* in one transaction; see `enqueue`. *claimed* ones are sent by this process, which gives them back.

    Raises what *within* raises, `LedgerError`.
    """
    with job_secrets.until_recorded(ws, *(job.entry.job.id for job in jobs)):
        for job in jobs:
            job_secrets.keep(ws.state_dir, job.entry.job.id, job.secrets)
        fault_point("secrets-kept")
        with ws.ledger.transaction() as tx:
            if within is not None:
                within(tx)
            owner, expires = (ws.owner, tx.now + leases.CLAIM_S) if claimed else (None, None)
            records = tx.enqueue_all([job.entry for job in jobs], owner=owner, claim_expires_at=expires)
            waits = [groups.Dependency(job.entry.job.id, one.job, one.condition) for job in jobs for one in job.needs]
            groups.add_dependencies(tx.connection, waits)
    fault_point("enqueued")
    for job, made in zip(jobs, records, strict=True):
        keep_copy(ws.state_dir, job.entry.job, made.created_at)
    ws.on_live_job()
    return records


def submit_group(ws: Workspace, submissions: Sequence[Submission], group: GroupRecord) -> list[str]:
    """Submit the members of a new group, and return their ids: at once where they are one array of their cluster, or
    calls of a function.

    Passes send those of others. Raises `LaunchError` when certainly none of them runs.
    """

    def create(tx: Transaction) -> None:
        groups.create(tx.connection, group)

    if group.kind == "map" or _is_array(ws, group, submissions):
        return submit(ws, submissions, within=create)
    return [record.id for record in enqueue(ws, submissions, within=create)]


def _is_array(ws: Workspace, group: GroupRecord, submissions: Sequence[Submission]) -> bool:
    """Return True for members of a new *group* that their cluster takes together, as one array or several."""
    first = submissions[0].spec
    if group.kind not in dispatch.KINDS or (size := dispatch.array_size(ws, first.cluster, len(submissions))) < 2:
        return False
    return (
        (group.max_parallel is None or size == len(submissions))
        and not (first.depends_on or first.inputs)
        and all(one.snapshot.digests == submissions[0].snapshot.digests for one in submissions)
        and dispatch.are_alike(one.spec.model_dump() for one in submissions)
    )


def as_member(spec: JobSpec, group: GroupRecord) -> JobSpec:
    """Return *spec* as a job by itself; that of a sweep or an array is told the group, as by Slurm."""
    changes: dict[str, Any] = {"sweep": None, "array": None, "max_parallel": None}
    if group.kind in ("sweep", "array"):
        changes["env"] = {**spec.env, "ORC_ARRAY_JOB_ID": group.id}
    return spec.model_copy(update=changes)
