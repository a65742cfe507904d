"""Sources of jobs: the file of one, checked by all that will look at it, and the snapshot of its code.

Each of them stops at its first mistake where it is asked for a plan. Here all are asked, so that one look shows all.
The backend is asked only where something else is wrong: the plan that the caller renders next says what it has against
a job that is right otherwise.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from orc.launchers.backends.base import Snapshot
from orc.launchers.errors import LaunchError, RenderError, SpecError
from orc.launchers.snapshot.listing import patterns_of
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.snapshot.scan import Bundle, ScanWatch, scan
from orc.launchers.spec.clusters import environment_of
from orc.launchers.spec.load import Examined, examine, examine_document
from orc.launchers.spec.problems import Problem, SpecProblems, dotted

if TYPE_CHECKING:
    from orc.launchers.findings import Finding
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.scan import SourceTree
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.spec.groups import LoadedGroup
    from orc.launchers.spec.source import Document, KeyPath
    from orc.orchestrator.engine.steps import Progress


def load_checked(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, cluster: str | None = None
) -> LoadedJob:
    """Return the job in the file *path*, as `orc.launchers.spec.load.load_job` does, checked by all stages.

    Raises:
        SpecProblems: More than one thing is wrong: everything, by its place.
        LaunchError: The one thing that is wrong, as the stage that found it says it.
    """
    return _checked(examine(path, overrides, cluster=cluster))


def check_document(document: Document, source_path: Path) -> LoadedJob:
    """Return the job in *document*, as if it had been read from *source_path*, checked. Raises as `load_checked`."""
    return _checked(examine_document(document, source_path))


def load_jobs_checked(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, cluster: str | None = None
) -> LoadedJob | LoadedGroup:
    """Return the job or the group of jobs in the file *path*, checked by all stages. Raises as `load_checked`."""
    from orc.launchers.spec.groups import ExaminedGroup, examine_jobs

    found = examine_jobs(path, overrides, cluster=cluster)
    if not isinstance(found, ExaminedGroup):
        return _checked(found)
    group = found.loaded()
    for examined, *_ in found.members:
        _checked(examined)
    return group


def _checked(found: Examined) -> LoadedJob:
    errors = list(_later(found)) if found.loaded is not None else []
    if found.loaded is not None and not found.problems and not errors:
        return found.loaded
    if not found.problems and len(errors) == 1:
        raise errors[0][1]
    problems = list(found.problems)
    known = {(problem.where, problem.what) for problem in problems}
    for key, error in errors:
        problems += [p for p in _problems(error, found.document, key) if (p.where, p.what) not in known]
    raise SpecProblems(problems)


def _later(found: Examined) -> Iterator[tuple[KeyPath, LaunchError]]:
    """Yield the errors of all that follows the file, each with the key that it is most likely about."""
    from orc.launchers.backends import open_backend
    from orc.launchers.commands import build_command
    from orc.launchers.ids import AttemptId, placeholder_job_id
    from orc.launchers.plugins import COMMANDS
    from orc.launchers.spec.clusters import builtin_local, get_cluster
    from orc.launchers.spec.environment import Environment
    from orc.launchers.spec.job import Launcher

    loaded = found.loaded
    assert loaded is not None
    spec = loaded.spec
    # A launcher or an environment that is wrong is replaced, so that the backend is asked about the rest.
    if not COMMANDS.has(spec.launcher.kind):
        spec = _with(spec, launcher=Launcher())
    elif error := _error(lambda: build_command(spec)):
        yield ("launcher",), error
        spec = _with(spec, launcher=Launcher())
    cluster = _attempt(lambda: get_cluster(spec.cluster))
    if isinstance(cluster, LaunchError):
        if not cluster.where:
            cluster.where = found.document.origin(("cluster",)).where
        yield ("cluster",), cluster
    around = builtin_local() if isinstance(cluster, LaunchError) else cluster
    if error := _error(lambda: _check_environment(loaded, spec, around)):
        yield ("environment",), error
        spec = _with(spec, environment=Environment(none=True))
    if isinstance(cluster, LaunchError):
        return
    backend = _attempt(lambda: open_backend(cluster))
    if isinstance(backend, LaunchError):
        yield ("cluster",), backend
        return
    if not found.problems and spec is loaded.spec:
        return
    attempt = AttemptId(placeholder_job_id(spec.name), 1)
    snapshot = _snapshot(loaded, spec, cluster)
    if error := _error(lambda: backend.render(spec, snapshot, attempt)):
        yield ("resources", "options", cluster.kind), error


def _with(spec: JobSpec, **changes: Any) -> JobSpec:
    """Return *spec* with other sections, and the places of the others kept."""
    return BaseModel.model_copy(spec, update=changes)


def _attempt(do: Callable[[], Any]) -> Any:
    """Return what *do* returns, or its error about the job file or clusters file."""
    try:
        return do()
    except (SpecError, RenderError) as error:
        return error


def _error(do: Callable[[], Any]) -> LaunchError | None:
    found = _attempt(do)
    return found if isinstance(found, LaunchError) else None


def _check_environment(loaded: LoadedJob, spec: JobSpec, cluster: Cluster) -> None:
    """Raise `LaunchError` for an environment that names a file which is not there."""
    from orc.launchers.attempts.agent_config import render_environment
    from orc.launchers.commands import build_command
    from orc.launchers.paths import Layout

    layout = Layout.at("/")
    render_environment(spec, cluster, _snapshot(loaded, spec, cluster), layout, build_command(spec))


def _snapshot(loaded: LoadedJob, spec: JobSpec, cluster: Cluster) -> Snapshot:
    """Return a snapshot of the files that a plan requests by name, as far as they exist; nothing is read."""
    from orc.launchers.snapshot.manifest import FILE, Entry

    wanted = environment_of(spec, cluster)
    names = ["requirements.txt", posixpath.join(posixpath.dirname(spec.script or ""), "requirements.txt")]
    names += [text for text in (wanted.venv and wanted.venv.requirements, wanted.conda and wanted.conda.file) if text]
    names = [name for name in dict.fromkeys(names) if not posixpath.isabs(name) and (loaded.workdir / name).is_file()]
    code = Bundle.of([Entry(name, FILE, "0" * 64, 0) for name in sorted(names)])
    empty = Bundle.of([])
    return Snapshot(code, empty, empty)


def _problems(error: LaunchError, document: Document, key: KeyPath) -> list[Problem]:
    """Return *error* as problems of a file; without a place of its own it stands at *key*."""
    if isinstance(error, SpecProblems):
        elsewhere = (1 << 31, 0)  # those of other files come after those of the job file
        return [p if p.where.startswith(f"{document.where}:") else replace(p, order=elsewhere) for p in error.problems]
    _, _, place = error.where.rpartition(":")
    if place.isdigit():
        line, column = (int(part) for part in error.where.split(":")[-2:])
        return [Problem(error.where, "", error.what, error.hint, (line - 1, column - 1))]
    origin = document.origin(key)
    return [Problem(origin.where, dotted(key), error.what, error.hint, origin.order)]


DEFAULT_LIMIT = 2 * 1000**3
LIMIT_VARIABLE = "ORC_SNAPSHOT_LIMIT"


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
