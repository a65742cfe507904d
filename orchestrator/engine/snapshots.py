"""Taking a job's snapshot into the local store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orc.launchers.backends.base import Snapshot
from orc.launchers.environments.rendering import environment_of
from orc.launchers.errors import SpecError
from orc.launchers.snapshot.listing import patterns_of
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.snapshot.scan import Bundle, ScanWatch, scan

DEFAULT_LIMIT = 2 * 1000**3
LIMIT_VARIABLE = "ORC_SNAPSHOT_LIMIT"


if TYPE_CHECKING:
    from orc.launchers.findings import Finding
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.scan import SourceTree
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.engine.progress import Progress


class Destination(Protocol):
    """Cluster that a snapshot is for, as far as it decides what belongs to it. A backend is one."""

    @property
    def cluster(self) -> Cluster:
        """Its configuration."""
        ...

    @property
    def is_remote(self) -> bool:
        """True when its root is on other machines."""
        ...

    @property
    def root(self) -> str:
        """The directory of orc's files there."""
        ...


def take(store: ContentStore, loaded: LoadedJob, progress: Progress, backend: Destination) -> Snapshot:
    """Store what *loaded* needs on the cluster of *backend*, and return it: its code, this installation's runtime, and
    the environment that it brings along. Raises `BundleError`, `SpecError`.
    """
    return with_code(store, loaded, take_code(store, loaded, progress, backend), backend, progress)


def take_code(store: ContentStore, loaded: LoadedJob, progress: Progress, backend: Destination) -> Bundle:
    """Store the code of *loaded* and return it. Raises `BundleError`, `SpecError`."""
    limit = size_limit(loaded.spec)
    code = store.snapshot(
        loaded.workdir,
        code_exclude(loaded, backend),
        on_progress=lambda done, size: progress("snapshot", {"done": done, "bytes": size}),
        watch=ScanWatch(
            lambda tree: progress(
                "size", {"files": tree.files, "bytes": tree.size, "folders": tree.folders, "limit": limit}
            ),
            lambda done, size: progress("hash", {"done": done, "bytes": size}),
        ),
    )
    progress("scan", {"files": len(code.bundle.entries), "bytes": code.bundle.size})
    for finding in code.findings:
        progress(
            "finding", {"level": finding.level, "what": finding.what, "where": finding.where, "hint": finding.hint}
        )
    check_script(loaded.spec, code.bundle)
    return code.bundle


def scan_job(
    loaded: LoadedJob, backend: Destination, cache: Path | None, state_dir: Path
) -> tuple[Snapshot, Sequence[Finding]]:
    """Return the snapshot that *loaded* would have, and findings about its code; nothing is stored.

    Raises `BundleError`, `SpecError`.
    """
    code = scan(loaded.workdir, code_exclude(loaded, backend), cache=cache, skip=(state_dir,))
    check_script(loaded.spec, code.bundle)
    environment = environment_tree(loaded, backend.cluster, cache)
    runtime = runtime_bundle(cache=cache).bundle
    return Snapshot(code.bundle, runtime, environment.bundle if environment else None), code.findings


def size_limit(job: JobSpec) -> int:
    """Return the bytes above which a snapshot is worth a question: the job's, the user's, or `DEFAULT_LIMIT`.

    Raises `SpecError` for a variable that is no size.
    """
    from orc.launchers.spec import grammar

    given = job.workdir.limit
    if given is None and (text := os.environ.get(LIMIT_VARIABLE)):
        try:
            given = grammar.memory(text)
        except ValueError as error:
            raise SpecError(str(error), where=LIMIT_VARIABLE) from None
    return grammar.memory_bytes(given) if given else DEFAULT_LIMIT


def with_code(
    store: ContentStore, loaded: LoadedJob, code: Bundle, backend: Destination, progress: Progress
) -> Snapshot:
    """Return the snapshot of a job whose *code* is in the store already. Raises as `take`."""
    runtime = store.ingest(runtime_bundle(cache=store.scan_cache))
    return Snapshot(code, runtime, take_environment(store, loaded, backend, progress))


def take_environment(store: ContentStore, loaded: LoadedJob, backend: Destination, progress: Progress) -> Bundle | None:
    """Store the environment that *loaded* brings along, if it does, and return it. Raises `BundleError`."""
    environment = environment_tree(loaded, backend.cluster, store.scan_cache)
    if environment is None:
        return None
    progress("environment", {"files": len(environment.bundle.entries), "bytes": environment.bundle.size})
    return store.ingest(environment, on_progress=lambda done, size: progress("snapshot", {"done": done, "bytes": size}))


def code_exclude(loaded: LoadedJob, backend: Destination) -> tuple[str, ...]:
    """Return the patterns of what is not code: those of the job, an environment that travels by itself, and the root of
    the cluster, which holds the snapshots of all jobs.
    """
    exclude = list(loaded.spec.workdir.exclude)
    if not backend.is_remote:
        exclude += patterns_of(Path(backend.root), loaded.workdir)
    environment = environment_of(loaded.spec, backend.cluster)
    if environment.kind in ("copy", "conda"):
        from orc.launchers.environments.packing import travels_apart

        exclude += travels_apart(environment, loaded.workdir, Path(loaded.base_dir))
    return tuple(exclude)


def environment_tree(loaded: LoadedJob, cluster: Cluster, cache: Path | None) -> SourceTree | None:
    """Return the environment that the job brings along, if it does. Raises `BundleError`."""
    environment = environment_of(loaded.spec, cluster)
    if environment.kind not in ("copy", "conda"):
        return None
    from orc.launchers.environments.packing import pack

    return pack(environment, loaded.workdir, Path(loaded.base_dir), cache)


def check_script(job: JobSpec, code: Bundle) -> None:
    """Raise `SpecError` for a script that is not part of the code."""
    # A script whose name begins with a dash is called ./-name, so that no interpreter takes it for an option.
    if job.script is not None and job.script.removeprefix("./") not in code:
        raise SpecError(
            f"the script {job.script!r} exists but is not part of the snapshot",
            where="script",
            hint="an entry in .gitignore, .orcignore or workdir.exclude leaves it out",
        )
