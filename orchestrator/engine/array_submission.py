"""Submission of many jobs as one array of their cluster. Each is as sure to run once as a job by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from orc.launchers.errors import AmbiguousSubmit, LaunchError
from orc.launchers.ids import AttemptId
from orc.launchers.secrets import redact, resolve_secrets
from orc.orchestrator.engine import claims, job_files, job_secrets
from orc.orchestrator.engine import submission_steps as steps
from orc.orchestrator.engine.fault_points import fault_point
from orc.orchestrator.engine.placement import PlacementPlanner
from orc.orchestrator.engine.submission import new_job
from orc.orchestrator.ledger import groups
from orc.orchestrator.ledger.errors import LedgerError
from orc.orchestrator.ledger.lifecycle import AttemptState
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot, SupportsArrays
    from orc.launchers.plan import Plan
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.groups import GroupRecord


def start_array(
    ws: Workspace,
    jobs: Sequence[JobSpec],
    snapshot: Snapshot,
    *,
    source: str,
    at_once: int | None = None,
    given: Mapping[str, str] | None = None,
    group: GroupRecord | None = None,
    numbers: Sequence[int] | None = None,
) -> list[JobRecord]:
    """Submit new jobs with the same resources as one array of which *at_once* run at a time.

    *group* is a new group that they belong to, *numbers* are their indices there. The cluster is one that
    `SupportsArrays`. Each job is as durable, and as sure to run once, as one that `start` submits; attempts that follow
    a failure are submitted by themselves. Raises what `start` raises.
    """
    from orc.launchers.backends.base import SupportsArrays

    backend = ws.backend_of_user(jobs[0].cluster, ws.user)
    if not isinstance(backend, SupportsArrays):
        raise TypeError(f"{backend.kind} has no arrays")
    secrets = resolve_secrets(jobs[0].secrets, {**os.environ, **(given or {})})
    planners = [PlacementPlanner(ws, job, snapshot, AttemptId(ws.new_job_id(job.name), 1)) for job in jobs]
    plans = [planner.render(None) for planner in planners]
    planners[0].check(plans[0], None)
    new = [new_job(ws, planner.spec, snapshot, planner.attempt, source) for planner in planners]
    if group is not None:
        pairs = zip(new, numbers or range(len(new)), strict=True)
        new = [replace(job, group_id=group.id, group_index=number) for job, number in pairs]
    with job_secrets.until_recorded(ws, *(job.id for job in new)):
        for job in new:
            job_secrets.keep_for(ws, job.id, secrets)
        with ws.ledger.transaction() as tx:
            if group is not None:
                groups.create(tx.connection, group)
            expires = tx.now + claims.TTL_S
            records = [
                tx.create(job, plan.marker, plan.digest, ws.owner, expires)
                for job, plan in zip(new, plans, strict=True)
            ]
    fault_point("prepared")
    for job, record in zip(new, records, strict=True):
        job_files.keep(ws.state_dir, job, record.created_at)
    ws.on_live_job()
    try:
        _deliver_array(ws, backend, records, plans, snapshot, secrets, at_once)
        records_now = {record.id: record for record in ws.ledger.jobs([job.id for job in new])}
        return [records_now[job.id] for job in new]
    except LedgerError as error:
        raise LedgerError(
            f"{error.what}; the jobs {', '.join(job.id for job in new)} are recorded, and run or will run",
            where=error.where,
            hint="do not submit them again; `orc list` shows them",
        ) from error
    except KeyboardInterrupt:
        for record in records:
            steps.abandon(ws, record)
        raise
    finally:
        for job in new:
            with suppress(LedgerError):  # claims expire by themselves
                ws.give_back(job.id)


def _deliver_array(
    ws: Workspace,
    backend: SupportsArrays,
    jobs: list[JobRecord],
    plans: Sequence[Plan],
    snapshot: Snapshot,
    secrets: Mapping[str, str],
    at_once: int | None,
) -> None:
    is_submitting = steps.attempt_is(AttemptState.SUBMITTING)
    try:
        ws.backend_of_user(jobs[0].cluster, jobs[0].owner).stage(snapshot, plans[0])
        fault_point("staged")
        begun = [(steps.begin(ws, job, plan), plan) for job, plan in zip(jobs, plans, strict=True)]
        begun = [(job, plan) for job, plan in begun if is_submitting(job)]  # others were cancelled meanwhile
        if not begun:
            return
        fault_point("submitting")
        handles = backend.submit_array([plan for _, plan in begun], secrets, at_once=at_once)
    except LedgerError:
        raise  # says nothing about the backend; what was durable stays true
    except AmbiguousSubmit as error:
        for job in jobs:
            steps.mark_ambiguous(ws, job, redact(error.what, secrets.values()))
        return
    except LaunchError as error:
        for job in jobs:
            steps.reject(ws, job, redact(error.what, secrets.values()))
        raise
    fault_point("submitted")
    for (job, _), handle in zip(begun, handles, strict=True):
        steps.accept(ws, job, handle)
