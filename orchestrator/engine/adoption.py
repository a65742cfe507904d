"""Adoption of jobs that a ledger has lost, which was deleted or restored from an old backup.

What they are made from lies in the copies of the state directory (`orc.orchestrator.engine.job_copies.unknown`), what
became of their attempts is asked of their clusters, where everything carries their markers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.ids import AttemptId
from orc.orchestrator.engine.delivery import accepted
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import JobRecord, NewJob

if TYPE_CHECKING:
    from orc.launchers.backends.base import Handle, Placement
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.engine.job_copies import SavedJob
    from orc.orchestrator.ledger.records import Destination
    from orc.orchestrator.ledger.transaction import Transaction
    from orc.orchestrator.workspace import Workspace

_BEFORE = "its end was in the ledger that was lost"


@dataclass(frozen=True)
class AdoptionResult:
    """Result of the search for one job."""

    job: str
    cluster: str
    attempts: int  # found on its cluster; with none it is not adopted
    error: str = ""  # why nobody can tell


def adopt(ws: Workspace, kept: SavedJob) -> AdoptionResult:
    """Write the job into the ledger, with the attempts that its cluster has. Raises `LedgerError`."""
    from orc.launchers.spec import JobSpec

    job = kept.job
    try:
        spec = JobSpec.model_validate(dict(job.spec))
        handles = _handles(ws, job, spec)
    except (LaunchError, ValueError) as error:
        what = error.what if isinstance(error, LaunchError) else "its specification does not fit this version of orc"
        return AdoptionResult(job.id, job.cluster, 0, what)
    if not handles:
        return AdoptionResult(job.id, job.cluster, 0)
    sent_to = [ws.destination(job.cluster, job.owner, handle.hosts) for handle in handles]
    placements = [_placement(ws, job, spec, handle) for handle in handles]
    with ws.ledger.transaction() as tx:
        if tx.find(job.id) is None:
            now, tx.now = tx.now, kept.created_at
            record = tx.enqueue(job)
            tx.now = now
            for handle, placement, place in zip(handles, placements, sent_to, strict=True):
                record = _write(tx, record, handle, placement, place, last=handle is handles[-1])
            if kept.cancelled:  # an attempt that has failed is not made again
                grace = float(job.spec["grace"])
                wish = {"cancel_requested_at": tx.now, "cancel_grace_s": grace}
                tx.record(record, Event(Kind.CANCEL_REQUESTED, None, {"grace_s": grace}), job_set=wish)
    return AdoptionResult(job.id, job.cluster, len(handles))


def _handles(ws: Workspace, job: NewJob, spec: JobSpec) -> Sequence[Handle]:
    """Return its attempts, as far as its cluster has them. Raises `LaunchError` when it does not answer."""
    from orc.launchers.backends.base import SupportsPlacement

    backend = ws.backend_of_user(job.cluster, job.owner)
    hosts = backend.candidates(spec) if isinstance(backend, SupportsPlacement) else ()
    handles: list[Handle] = []
    while True:
        handle = backend.find(AttemptId(job.id, len(handles) + 1).marker, hosts, complete=False)
        if handle is None:
            return handles
        handles.append(handle)


def _placement(ws: Workspace, job: NewJob, spec: JobSpec, handle: Handle) -> Placement | None:
    """Return the hosts that the attempt holds, where hosts are reserved in the ledger."""
    from orc.launchers.backends.base import Placement, SupportsPlacement

    backend = ws.backend_of_user(job.cluster, job.owner)
    if not isinstance(backend, SupportsPlacement):
        return None
    try:
        slots = backend.place(spec, {}).slots
    except LaunchError as error:  # the cluster has been described anew
        raise SpecError(error.what, where=job.id, hint="describe its hosts in clusters.yaml again") from error
    return Placement(handle.hosts, slots)


def _write(
    tx: Transaction, job: JobRecord, handle: Handle, placement: Placement | None, sent_to: Destination, *, last: bool
) -> JobRecord:
    """Write one attempt: it is at its backend, or was followed by the next one."""
    job = tx.prepare(job, handle.marker, "", placement)
    sent = Event(Kind.SUBMITTING, job.number, {"plan": ""})
    job = tx.record(job, sent, attempt_set={"submitted_at": handle.submitted_at or tx.now})
    (job,) = tx.record_all([(job, accepted(Kind.ACCEPTED, job, handle, tx.now, sent_to))])
    if last:
        return job
    over: Mapping[str, Any] = {"cause": "node_failure", "reason": _BEFORE}
    lost, again = Event(Kind.LOST, job.number, over), Event(Kind.RETRY, None, {**over, "at": tx.now})
    return tx.record(job, lost, again, attempt_set={**over, "ended_at": tx.now})
