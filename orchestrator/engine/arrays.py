"""Arrays: new jobs of one group that go to their cluster together, which runs so many of them at a time.

Each is as durable, and as sure to run once, as a job by itself; attempts that follow a failure are sent by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine import admission, job_secrets
from orc.orchestrator.engine.attempt_inputs import stored_specs
from orc.orchestrator.engine.limits import is_limited
from orc.orchestrator.engine.placement import PlacementPlanner, PreparedAttempt
from orc.orchestrator.ledger import dependencies, groups, leases
from orc.orchestrator.ledger.lifecycle import JobState

if TYPE_CHECKING:
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.workspace import Workspace

KINDS = ("sweep", "array", "map")  # of groups
# What the jobs of one array may differ in.
_OF_PROGRAM = frozenset({"name", "script", "module", "command", "args", "env", "tags", "runtime", "checkpoint"})


def of_groups(ws: Workspace, jobs: Sequence[JobRecord]) -> dict[str, list[str]]:
    """Return those of *jobs* that are to be sent together, by group: those of groups of which nothing is under way."""
    waiting: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        if job.group_id and job.state is JobState.QUEUED and not job.number and job.cancel_requested_at is None:
            waiting[job.group_id].append(job)
    return {
        group_id: [job.id for job in members]
        for group_id, members in waiting.items()
        if len(members) > 1 and _are_array(ws, group_id, members)
    }


def _are_array(ws: Workspace, group_id: str, jobs: Sequence[JobRecord]) -> bool:
    first = jobs[0]
    if any((job.cluster, job.owner, job.digests) != (first.cluster, first.owner, first.digests) for job in jobs):
        return False
    if not all(_is_to_be_had(ws, job) for job in jobs) or not takes_arrays(ws, first.cluster):
        return False
    ids = [job.id for job in jobs]
    with ws.ledger.database.read() as connection:
        group = groups.find(connection, group_id)
        if group is None or group.kind not in KINDS or dependencies.of_jobs(connection, ids):
            return False
        if group.max_parallel is not None and groups.under_way(connection, group_id):
            return False
    return are_alike(spec for _, spec in ws.ledger.specs(ids))


def _is_to_be_had(ws: Workspace, job: JobRecord) -> bool:
    if job.not_before is not None and job.not_before > ws.clock():
        return False
    return job.claim_owner == ws.owner or leases.is_free(job.claim_owner, job.claim_expires_at, ws.clock())


def takes_arrays(ws: Workspace, cluster: str) -> bool:
    """Return True where *cluster* takes jobs together, and none has to be sent by itself."""
    from orc.launchers.backends.base import SupportsArrays

    try:
        return isinstance(ws.backend(cluster), SupportsArrays) and not is_limited(ws, cluster)
    except LaunchError:
        return False  # the dispatch of its jobs says what is wrong with the cluster


def are_alike(specs: Iterable[Mapping[str, Any]]) -> bool:
    """Return True for the specifications of jobs that ask their cluster for the same."""
    asked = ({key: value for key, value in spec.items() if key not in _OF_PROGRAM} for spec in specs)
    first = next(asked)
    return all(other == first for other in asked)


def prepare(
    planner: PlacementPlanner, jobs: Sequence[JobRecord], secrets: Mapping[str, str]
) -> tuple[list[PreparedAttempt], int | None]:
    """Return the PREPARED first attempts of *jobs*, made in one transaction, and how many of them may run at a time.

    *planner* is that of the first one, *secrets* are its. Those that have others are left to the next pass. Raises
    what `PlacementPlanner.prepare` raises.
    """
    ws = planner.ws
    members = [(jobs[0], planner)]
    others = [job for job in jobs[1:] if job_secrets.load_for(ws, job.id, planner.spec.secrets) == secrets]
    specs = stored_specs(ws, [job.id for job in others])
    members += [(job, replace(planner, spec=specs[job.id], attempt=AttemptId(job.id, 1))) for job in others]
    plans = [each.render(None) for _, each in members]
    planner.check(plans[0], None)
    group_id = str(jobs[0].group_id)
    with ws.ledger.transaction() as tx:
        admission.admit(ws, tx, [job for job, _ in members], together=[group_id])
        group = groups.find(tx.connection, group_id)
        prepared = tx.prepare_all([(job, p.marker, p.digest) for (job, _), p in zip(members, plans, strict=True)])
    attempts = [PreparedAttempt(plan, None, job) for job, plan in zip(prepared, plans, strict=True)]
    return attempts, group.max_parallel if group is not None else None
