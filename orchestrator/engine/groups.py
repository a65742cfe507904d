"""Groups of jobs: their submission, all or none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orc.orchestrator.engine import dispatch
from orc.orchestrator.engine.submission import Submission, enqueue, submit
from orc.orchestrator.ledger import groups

if TYPE_CHECKING:
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.groups import GroupRecord
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace


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
