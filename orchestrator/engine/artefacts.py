"""Artefacts: outputs of one job that become inputs of another, as snapshots that travel to its nodes like its code.

They are collected when the job that takes them is about to be sent: from the directory of the one that has left them
into the store here, by digest, and from there to wherever the other runs. What arrives is verified; half a copy never
appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendUnreachable, LaunchError, SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.layout import Layout
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger.records import dump

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.snapshot.manifest import Bundle
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.ledger.records import JobRecord
    from orc.orchestrator.workspace import Workspace


def check(ws: Workspace, spec: JobSpec, others: Mapping[str, JobSpec]) -> None:
    """Raise `SpecError` where artefacts cannot come from or go to a cluster; *others* are new jobs."""
    from orc.launchers.spec.relations import artefact

    clusters = {spec.cluster: "inputs" if spec.inputs else "outputs"} if spec.inputs or spec.outputs else {}
    for text in spec.inputs.values():
        job = artefact(text).job
        if job in others:
            clusters[others[job].cluster] = "outputs"
    for cluster, what in clusters.items():
        backend = ws.backend(cluster)
        if not backend.passes_artefacts:
            raise SpecError(
                f"{what}: files of jobs on clusters of kind {backend.kind} cannot be passed on by orc",
                where=spec.name,
                hint="let the jobs write to and read from a place that they share, such as an object store",
            )


def collected(ws: Workspace, job: JobRecord, spec: JobSpec, snapshot: Snapshot) -> Snapshot:
    """Return *snapshot* with the inputs of *job*, which are collected now and noted in the ledger, if they are not yet.

    Raises `BackendUnreachable` when a cluster that has some cannot be asked now, `LaunchError` for what is not there.
    """
    missing = {name: text for name, text in spec.inputs.items() if name not in snapshot.inputs}
    if not missing:
        return snapshot
    found = {name: _collect(ws, name, text) for name, text in missing.items()}
    whole = replace(snapshot, inputs={**snapshot.inputs, **found})
    with ws.ledger.transaction() as tx:
        tx.connection.execute(
            "UPDATE jobs SET digests = :digests WHERE id = :id", {"digests": dump(whole.digests), "id": job.id}
        )
        content_holders.add(tx.connection, job.owner, [bundle.digest for bundle in found.values()], tx.now)
    return whole


def _collect(ws: Workspace, name: str, text: str) -> Bundle:
    from orc.launchers.attempts.agent_config import output_path
    from orc.launchers.backends.base import Handle
    from orc.launchers.spec.relations import artefact
    from orc.launchers.transfer.outputs import collect
    from orc.orchestrator.engine.stored_spec import stored_spec

    source = artefact(text)
    record = ws.ledger.job(source.job)
    if record is None or record.attempt is None or record.attempt.handle is None:
        raise LaunchError(f"inputs.{name}: {source.job} has left nothing", where=text)
    backend = ws.backend_of_attempt(record.cluster, record.owner, record.attempt)
    transport, attempt_dir = backend.files(Handle.from_dict(record.attempt.handle))
    layout = Layout.at(PurePosixPath(attempt_dir).parents[2])  # the root: jobs/<job>/a<n> are below it
    path = output_path(stored_spec(ws, record.id), source.output, AttemptId(record.id, record.number), layout)
    try:
        return collect(path, transport, backend.cluster.python or "python3", ws.store)
    except BackendUnreachable:
        raise
    except LaunchError as error:
        raise LaunchError(f"inputs.{name}: {text}: {error.what}", where=error.where, hint=error.hint) from error
