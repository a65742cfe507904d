"""Inputs of an attempt of a job in the ledger: its specification, its snapshots, its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError, LaunchError, SpecError
from orc.orchestrator.engine import artefacts, job_secrets
from orc.orchestrator.engine.sealing import UnsealError
from orc.orchestrator.engine.stored_spec import stored_spec
from orc.orchestrator.ledger.records import JobRecord
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.spec import JobSpec


def attempt_inputs(ws: Workspace, job: JobRecord) -> tuple[JobSpec, Snapshot, Mapping[str, str]]:
    """Return the specification, snapshots and secrets of another attempt of *job*.

    Raises `InputsUnavailable` when it lies on another machine that shares the ledger, `LaunchError` when it is nowhere.
    """
    spec = stored_spec(ws, job.id)
    try:
        secrets = job_secrets.load_for(ws, job.id, spec.secrets)
        snapshot = _snapshot(ws, job)
    except UnsealError as error:
        raise InputsUnavailable(f"waiting for the key of its secrets: {error.what}", where=job.id) from error
    except (BundleError, SpecError) as error:
        origin = ws.ledger.origin(job.id)
        if origin in ("", ws.origin):
            raise
        host, _, directory = origin.partition(":")
        raise InputsUnavailable(
            f"waiting for {host}, where its snapshot and secrets are ({directory}); here: {error.what}", where=job.id
        ) from error
    return spec, artefacts.collected(ws, job, spec, snapshot), secrets


def _snapshot(ws: Workspace, job: JobRecord) -> Snapshot:
    """From the local store, or from the hosts of an earlier attempt if this is another machine."""
    try:
        return stored_snapshot(ws, job.digests)
    except BundleError:
        if not _recalled(ws, job):
            raise
    return stored_snapshot(ws, job.digests)


def _recalled(ws: Workspace, job: JobRecord) -> bool:
    from orc.launchers.backends.base import Handle, SupportsRecall

    for attempt in reversed(ws.ledger.attempts(job.id)):
        if not attempt.handle:
            continue
        try:
            backend = ws.backend_of_attempt(job.cluster, job.owner, attempt)
            if not isinstance(backend, SupportsRecall):
                return False
            for digest in job.digests.values():
                backend.recall(digest, Handle.from_dict(attempt.handle))
        except LaunchError:
            continue  # what is missing here is said, and where the job came from
        return True
    return False


class InputsUnavailable(LaunchError):
    """Another attempt can only be made where the job was submitted."""


def stored_snapshot(ws: Workspace, digests: Mapping[str, str]) -> Snapshot:
    """Return the snapshots that a job was submitted with, from the local store. Raises `BundleError`, `SpecError`."""
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.snapshot.trees import INPUT

    environment = ws.store.load(digests["environment"]) if "environment" in digests else None
    runtime = ws.store.load(digests["runtime"])
    if not any(entry.path.startswith("lib/orc/launchers/agent/") for entry in runtime.entries):
        raise SpecError(
            "an earlier version of orc has submitted this job, and this one does not start that one's agents",
            hint="submit the job file again",
        )
    inputs = {
        key.removeprefix(INPUT): ws.store.load(digest) for key, digest in digests.items() if key.startswith(INPUT)
    }
    return Snapshot(ws.store.load(digests["code"]), runtime, environment, inputs)
