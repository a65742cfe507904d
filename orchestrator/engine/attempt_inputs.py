"""Inputs of an attempt: specification, snapshots, secrets, and outputs of other jobs.

Outputs of one job that become inputs of another are collected when the job that takes them is about to be sent: from
the directory of the one that has left them into the store here, by digest, and from there to wherever the other runs,
like its code. What arrives is verified; half a copy never appears.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendUnreachable, BundleError, LaunchError, SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.orchestrator.engine import job_secrets
from orc.orchestrator.engine.job_secrets import DecryptionError
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.ledger.records import JobRecord, dump
from orc.orchestrator.workspace import Workspace

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.snapshot.manifest import Bundle
    from orc.launchers.spec import JobSpec


def read_stored(stored: Mapping[str, Any], where: str) -> JobSpec:
    """Return a specification as the ledger has it. Raises `SpecError` for one of another version of orc."""
    from orc.launchers.spec import JobSpec

    try:
        return JobSpec.model_validate(stored)
    except ValueError as error:
        raise SpecError(
            f"the stored specification does not fit this version of orc: {error}",
            where=where,
            hint="submit the job file again",
        ) from None


def stored_spec(ws: Workspace, job_id: str) -> JobSpec:
    """Return the job's specification from the ledger. Raises `SpecError` for one of another version of orc."""
    return read_stored(ws.ledger.spec(job_id), job_id)


def stored_specs(ws: Workspace, job_ids: Sequence[str]) -> dict[str, JobSpec]:
    """Return the specifications of jobs, by their ids; as `stored_spec`."""
    return {job_id: read_stored(spec, job_id) for job_id, spec in ws.ledger.specs(job_ids)}


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
    from orc.launchers.transfer.fetch import collect

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


def attempt_inputs(ws: Workspace, job: JobRecord) -> tuple[JobSpec, Snapshot, Mapping[str, str]]:
    """Return the specification, snapshots and secrets of another attempt of *job*.

    Raises `InputsUnavailable` when it lies on another machine that shares the ledger, `LaunchError` when it is nowhere.
    """
    spec = stored_spec(ws, job.id)
    try:
        secrets = job_secrets.load_for(ws, job.id, spec.secrets)
        snapshot = _snapshot(ws, job)
    except DecryptionError as error:
        raise InputsUnavailable(f"waiting for the key of its secrets: {error.what}", where=job.id) from error
    except (BundleError, SpecError) as error:
        origin = ws.ledger.origin(job.id)
        if origin in ("", ws.origin):
            raise
        host, _, directory = origin.partition(":")
        raise InputsUnavailable(
            f"waiting for {host}, where its snapshot and secrets are ({directory}); here: {error.what}", where=job.id
        ) from error
    return spec, collected(ws, job, spec, snapshot), secrets


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
    from orc.launchers.snapshot.manifest import INPUT

    environment = ws.store.load(digests["environment"]) if "environment" in digests else None
    runtime = ws.store.load(digests["runtime"])
    if not any(entry.path.startswith("lib/orc/launchers/agent/") for entry in runtime.entries):
        raise SpecError(
            "an earlier version of orc submitted this job, and this version cannot start its agents",
            hint="submit the job file again",
        )
    inputs = {
        key.removeprefix(INPUT): ws.store.load(digest) for key, digest in digests.items() if key.startswith(INPUT)
    }
    return Snapshot(ws.store.load(digests["code"]), runtime, environment, inputs)


def changed(stored: Mapping[str, Any], overrides: Sequence[str], *, where: str) -> JobSpec:
    """Return the specification *stored* (as in the ledger) after *overrides*, ``key.path=VALUE`` texts, in order.

    *where* names the job in errors. Raises `SpecError`, also for a stored one of another version of orc.
    """
    if not overrides:
        return read_stored(stored, where)
    from orc.launchers.spec import grammar, load
    from orc.launchers.spec.source import Document

    document = Document(json.loads(json.dumps(stored)), where, {}, {})
    named: Mapping[str, Any] = {}
    for override in overrides:
        words = document.data.get("args")  # of a mapping in the job file, perhaps
        by_key = override.lstrip().startswith("args.")
        if by_key and isinstance(words, list) and (flags := grammar.named_flags(words)) is not None:
            document.data["args"], named = flags, {**flags}
        load.apply_override(document, override, load.reading)
    _refuse_lost_words(named, document.data.get("args"))
    _refuse_another_snapshot(stored, document.data, where)
    return load.validate(document)


def digests_left(digests: Mapping[str, str], stored: Mapping[str, Any], new: JobSpec) -> dict[str, str]:
    """Return those of *digests* that a changed job still has: inputs that now name something else are left out."""
    from orc.launchers.snapshot.manifest import INPUT

    old = stored.get("inputs") or {}
    same = {INPUT + name for name, text in new.inputs.items() if old.get(name) == text}
    return {key: digest for key, digest in digests.items() if not key.startswith(INPUT) or key in same}


def _refuse_lost_words(named: Mapping[str, Any], args: Any) -> None:
    """Raise `SpecError` where *args*, changed from *named*, may lack words that belong to no flag."""
    for key, old in named.items() if isinstance(args, dict) else ():
        new = args.get(key)
        # The last of several words may be a positional one; a single one is, if the flag takes none.
        if new != old and (isinstance(old, list) or (old is not True and (isinstance(new, bool) or new in (None, [])))):
            raise SpecError(
                f"the words after {key} may be its values, or arguments of their own",
                where=f"--set args.{key}",
                hint="give all arguments: --set 'args=[...]'",
            )


def _refuse_another_snapshot(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> None:
    """Raise `SpecError` for changes that need other files than those the job was submitted with."""
    for key in ("workdir", "environment"):
        if old.get(key) != new.get(key):
            raise SpecError(
                f"--set {key}: the new job has the snapshots of {where}, which are of that {key}",
                where=where,
                hint="submit the job file instead",
            )


def as_overrides(changes: Mapping[str, Any]) -> list[str]:
    """Return ``{"resources.nodes": 4}`` as override texts; a text is read as after ``--set``."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
