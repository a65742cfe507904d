"""Steps of jobs: how they are written down and told of, and where a test can end the process in the middle of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orc.launchers.errors import LaunchError
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate
from orc.orchestrator.workspace import OutOfReach, Workspace

FAULT_POINT = "ORC_FAULT_POINT"
FAULT_HOLD = "ORC_FAULT_HOLD"

# Every step of a submission, in order. A test kills a real submission at each of them.
FAULT_POINTS = (
    "snapshot-taken",  # the code is in the local store, the ledger knows nothing
    "secrets-kept",  # the secrets' file is written, the ledger knows nothing
    "enqueued",  # the job is durable
    "examined",  # the preflight has found nothing
    "prepared",  # its first attempt and the marker are durable
    "staged",  # the snapshot is on the cluster
    "submitting",  # the ledger says that a submit is about to happen
    "submitted",  # the backend has the job, the ledger does not know its handle
    "handle-stored",  # the handle is durable
    "claim-released",  # all is done, the caller has not been told
)
# Those of a pass that brings an attempt further whose machines are being made first.
PASS_POINTS = (
    "advancing",  # the next step is about to be taken
    "advanced",  # it was, and the ledger does not know
)


def fault_point(point: str) -> None:
    """Kill this process with SIGKILL when ``ORC_FAULT_POINT`` names *point*, stop it (until SIGCONT) the first time
    that ``ORC_FAULT_HOLD`` does; otherwise do nothing."""
    if os.environ.get(FAULT_POINT) == point:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get(FAULT_HOLD) == point:
        del os.environ[FAULT_HOLD]
        os.kill(os.getpid(), signal.SIGSTOP)


Progress = Callable[[str, Mapping[str, Any]], None]


def silent(_stage: str, _data: Mapping[str, Any]) -> None:
    """Show no progress."""


def apply(
    ws: Workspace,
    job: JobRecord,
    allowed: Callable[[JobRecord], bool],
    change: Callable[[JobRecord, float], JobUpdate],
) -> JobRecord:
    """Write *change* about the attempt that *job* shows, as long as *allowed* holds for the job as it is now."""
    return apply_all(ws, [job], allowed, change)[0]


def apply_all(
    ws: Workspace,
    jobs: Sequence[JobRecord],
    allowed: Callable[[JobRecord], bool],
    change: Callable[[JobRecord, float], JobUpdate],
) -> list[JobRecord]:
    """`apply` to each of *jobs*, in few transactions."""
    found: dict[str, JobRecord] = {}
    for start in range(0, len(jobs), _JOBS_PER_TRANSACTION):
        some = jobs[start : start + _JOBS_PER_TRANSACTION]
        with ws.ledger.transaction() as tx:
            now = tx.reload_all([job.id for job in some])
            may = [is_ for is_, was in zip(now, some, strict=True) if is_.number == was.number and allowed(is_)]
            written = tx.record_all([(job, made) for job in may if (made := change(job, tx.now))])
        found |= {job.id: job for job in (*now, *written)}
    _forget_secrets(ws, found.values())
    return [found[job.id] for job in jobs]


POLL_ERROR_EVENT_S = 300.0  # a longer outage is one event each five minutes, not one each pass
_JOBS_PER_TRANSACTION = 200


@dataclass
class PassReport:
    """Report of one pass: the clusters that it could not reach, and the jobs that it could not start."""

    unreachable: dict[str, str] = field(default_factory=dict)  # cluster -> why nothing can be said about its jobs
    errors: dict[str, LaunchError] = field(default_factory=dict)  # job -> why it certainly does not run


def write_all(ws: Workspace, changes: Iterable[tuple[JobRecord, JobUpdate]]) -> dict[str, JobRecord]:
    """Write many changes in few transactions; jobs that were changed meanwhile are left out."""
    wanted = [(job, change) for job, change in changes if change]
    written: dict[str, JobRecord] = {}
    for start in range(0, len(wanted), _JOBS_PER_TRANSACTION):
        with ws.ledger.transaction(durable=False) as tx:
            done = tx.record_all(wanted[start : start + _JOBS_PER_TRANSACTION])
        written.update((job.id, job) for job in done)
    if not ws.ledger.volatile:
        _forget_secrets(ws, written.values())
    return written


def _forget_secrets(ws: Workspace, jobs: Iterable[JobRecord]) -> None:
    from orc.orchestrator.engine import job_secrets  # what only reads imports this module too

    for job in jobs:
        if job.state.terminal:
            job_secrets.remove(ws.state_dir, job.id)


def what_of(error: Exception) -> str:
    """Return the text of an error for a job's reason; of a defect with its class."""
    if isinstance(error, OutOfReach):
        return error.reason
    return error.what if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"


def note_unreachable(ws: Workspace, cluster: str, jobs: Sequence[JobRecord], what: str, report: PassReport) -> None:
    """Report that *cluster* could not be reached, and note it on its *jobs*; they stay as they are."""
    report.unreachable[cluster] = what
    now, reason = ws.clock(), f"cannot reach {cluster}: {what}"
    changes = []
    for job in ws.ledger.active([job.id for job in jobs]):
        if job.poll_error_at is None or now - job.poll_error_at >= POLL_ERROR_EVENT_S:
            event = Event(Kind.POLL_ERROR, None, {"reason": what})
            changes.append((job, JobUpdate((event,), {"reason": reason, "poll_error_at": now})))
        elif job.reason != reason:
            changes.append((job, JobUpdate(job_set={"reason": reason})))
    write_all(ws, changes)
