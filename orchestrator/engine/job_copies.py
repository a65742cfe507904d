"""Copies of new jobs in the state directory, for when the ledger is lost."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.launchers.ids import JOB_ID
from orc.launchers.strict_modes import make_private
from orc.orchestrator.ledger.records import NewJob, conditions

if TYPE_CHECKING:
    from orc.orchestrator.workspace import Workspace

_CANCELLED = "job.cancelled"


@dataclass(frozen=True)
class SavedJob:
    """A job as its directory has it."""

    job: NewJob
    created_at: float  # seconds since the epoch
    cancelled: bool  # or to be cancelled


def keep_copy(state_dir: Path, job: NewJob, created_at: float) -> None:
    """Write what `unknown` reads: for the day when the ledger is lost: its failure is no failure of the submission."""
    path = _copy(state_dir, job.id)
    try:
        make_private(path.parent)
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps({"created_at": created_at, "job": vars(job)}))
    except OSError:
        path.unlink(missing_ok=True)  # half of it, which `unknown` would leave out


def note_cancelled(state_dir: Path, job_id: str) -> None:
    """Remember that the job is not to run again, as `keep_copy` remembers the job."""
    with contextlib.suppress(OSError):
        _copy(state_dir, job_id).with_name(_CANCELLED).touch(mode=0o600)


def unknown(ws: Workspace) -> list[SavedJob]:
    """Return the jobs of the state directory that the ledger has lost, oldest first; not those that were pruned."""
    from orc.orchestrator.ledger.prune import was_pruned

    kept = {path.parent.name: path for path in ws.state_dir.glob("jobs/*/job.json")}
    with ws.ledger.database.read() as connection:
        known = was_pruned(connection, list(kept))
        for condition, parameters in conditions(list(kept)):
            known |= {row[0] for row in connection.tuples(f"SELECT j.id FROM jobs j WHERE {condition}", parameters)}  # noqa: S608
    return sorted(_read(path for job, path in kept.items() if job not in known), key=lambda found: found.created_at)


def _read(paths: Iterable[Path]) -> Iterator[SavedJob]:
    for path in paths:
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            cancelled = path.with_name(_CANCELLED).exists()
            found = SavedJob(NewJob(**data["job"]), float(data["created_at"]), cancelled)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # not written by us, or by another version of orc
        if JOB_ID.fullmatch(found.job.id) and found.job.id == path.parent.name:
            yield found


def _copy(state_dir: Path, job_id: str) -> Path:
    return state_dir / "jobs" / job_id / "job.json"
