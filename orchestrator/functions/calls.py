"""Python functions as jobs: the pickled call is the job's code, and its result a file in the job's directory.

`orc.orchestrator.functions.node` makes the call on the nodes. Everything else (states, retries, logs, cancellation) is
that of any job.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.remote.files import write_file
from orc.launchers.snapshot.tree_store import fsync_directory
from orc.orchestrator.functions import node
from orc.orchestrator.functions.node import KEY_VARIABLE

if TYPE_CHECKING:
    from orc.launchers.snapshot.scan import SourceTree
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.workspace import Workspace


_BYTES = 32


def new_key(state_dir: Path, digest: str) -> dict[str, str]:
    """Make the key of the snapshot *digest*; return it as the secret that its jobs get."""
    path = _file(state_dir, digest)
    try:
        write_file(str(path), secrets.token_hex(_BYTES).encode(), 0o600, new=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise LaunchError(f"cannot keep the key of the function: {error.strerror or error}", where=str(path)) from error
    return key_of(state_dir, digest)


def key_of(state_dir: Path, digest: str) -> dict[str, str]:
    """Return what `new_key` has made; nothing for other snapshots, and in other state directories."""
    try:
        key = _file(state_dir, digest).read_text()
    except FileNotFoundError:
        return {}
    return {KEY_VARIABLE: key} if len(key) == 2 * _BYTES else {}  # an empty one would sign for everybody


def _file(state_dir: Path, digest: str) -> Path:
    return state_dir / "functions" / f"{digest}.key"


Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
MAP_TAG, CALL_TAG = "map", "call"  # of the jobs of a map: its id, and the number of the call in it


def submit_calls(
    ws: Workspace,
    calls: Sequence[Call],
    *,
    many: bool = False,
    cluster: str = "local",
    resources: Mapping[str, Any] | None = None,
    name: str | None = None,
    at_once: int | None = None,
    max_timeouts: int = 3,
    job: Mapping[str, Any] | None = None,
) -> list[str]:
    """Submit a job for each of *calls*, ``(function, args, kwargs)``; *many* are a map. Return the ids of the jobs.

    The other arguments are those of `Client.map_functions`.
    """
    from orc.launchers.backends.base import SupportsArrays
    from orc.launchers.ids import new_job_id
    from orc.launchers.spec.load import LoadedJob
    from orc.orchestrator.engine import job_source
    from orc.orchestrator.engine.steps import silent
    from orc.orchestrator.engine.submission import new_submission, submit, submit_group
    from orc.orchestrator.ledger.groups import GroupRecord

    backend = ws.backend(cluster)
    name = name or name_of(calls[0][0])
    spec = specification(cluster, name, resources, job, saves=any(saves(fn) for fn, _, _ in calls))
    arrays = isinstance(backend, SupportsArrays)
    if at_once is not None:
        _check_limit(at_once, spec.resources.time_s, arrays=arrays, here=not backend.is_remote, where=name)
    group = new_job_id(name)
    settings = Settings(group, max_timeouts, None if arrays else at_once, backend.is_remote)
    with packed(calls, spec, settings) as tree:
        code = ws.store.ingest(tree)
    snapshot = job_source.with_code(ws.store, LoadedJob(spec, Path(), Path.cwd()), code, backend, silent)
    specs = [
        spec.model_copy(
            update={
                "args": (str(number),),
                "tags": {**spec.tags, MAP_TAG: group, CALL_TAG: str(number)},
            }
        )
        for number in range(len(calls))
    ] if many else [spec]  # fmt: skip
    source = f"function:{name}"
    key = new_key(ws.state_dir, snapshot.code.digest)
    submissions = [new_submission(ws, one, snapshot, source=source, secrets=key) for one in specs]
    if not (arrays and many):
        return submit(ws, submissions)
    # A group keeps the limit, and goes to its cluster as one array.
    row = GroupRecord(group, "map", name, ws.user, ws.clock(), at_once)
    return submit_group(ws, [replace(one, group=group, number=index) for index, one in enumerate(submissions)], row)


def _check_limit(at_once: int, time_s: int | None, *, arrays: bool, here: bool, where: str) -> None:
    """Raise `SpecError` for a limit that cannot be kept."""
    if at_once < 1:
        raise SpecError(f"at_once: at least one call runs at a time, not {at_once}", where=where)
    if not arrays and not here:
        raise SpecError("at_once needs a cluster with arrays, or this machine", where=where)
    if not arrays and time_s is not None:
        raise SpecError(
            "a call that waits for its turn on this machine uses up its time limit", where=where,
            hint="Leave out at_once or resources.time.",
        )  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of calls on the nodes: ``function.json``."""

    id: str  # of the map
    max_timeouts: int
    at_once: int | None  # kept by the calls themselves, on one machine
    remote: bool  # this machine's directories mean nothing on the nodes


def specification(
    cluster: str, name: str, resources: Mapping[str, Any] | None, keys: Mapping[str, Any] | None, *, saves: bool
) -> JobSpec:
    """Return the job of one call. Raises `SpecError` with everything that is wrong with *resources* and *keys*."""
    from orc.launchers.spec.load import validate
    from orc.launchers.spec.source import Document

    retry = {"on": ["node_failure", "preempted", "timeout"], "backoff": 1} if saves else {}
    given = {"retry": retry, **(keys or {}), "resources": dict(resources or {}), "cluster": cluster, "name": name}
    fixed = {"script": "orc_function.py", "args": ["0"], "launcher": "python"}
    fixed["secrets"] = [*given.get("secrets", ()), node.KEY_VARIABLE]
    return validate(Document({**given, **fixed}, "", {}, {}))


@contextmanager
def packed(calls: Sequence[Call], spec: JobSpec, settings: Settings) -> Iterator[SourceTree]:
    """Yield the snapshot of *calls*, as long as the context lasts. Raises `LaunchError` for what cannot be pickled."""
    from orc.launchers.snapshot.manifest import FILE, Bundle, Entry
    from orc.launchers.snapshot.scan import SourceTree

    found: dict[str, bytes] = {"orc_function.py": Path(node.__file__).read_bytes()}
    with _by_value(settings.remote) as dumps:
        for number, call in enumerate(calls):
            try:
                found[f"call-{number}.pkl"] = pickle.dumps(0) + dumps(call)
            except Exception as error:
                raise LaunchError(
                    f"the call cannot be sent: {type(error).__name__}: {error}",
                    where=spec.name,
                    hint="Function and arguments travel as a pickle; cloudpickle carries more than pickle.",
                ) from error
    described = {
        "id": settings.id,
        "python": sys.version_info[:2],
        "paths": [] if settings.remote else _own_paths(),
        "saves": any(saves(function) for function, _, _ in calls),
        "time_s": spec.resources.time_s,
        "max_timeouts": settings.max_timeouts,
        "at_once": settings.at_once,
    }
    found["function.json"] = json.dumps(described).encode()
    with TemporaryDirectory(prefix="orc-function-") as directory:
        entries, sources = [], {}
        for name, data in found.items():
            path = Path(directory, name)
            path.write_bytes(data)
            entries.append(Entry(name, FILE, hashlib.sha256(data).hexdigest(), len(data)))
            sources[name] = bytes(path)
        yield SourceTree(Bundle.of(entries), sources)


def saves(function: Callable[..., Any]) -> bool:
    """Return True for a callable that can save (`submitit.helpers.Checkpointable`)."""
    return callable(getattr(function, "checkpoint", None))


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a job that calls *function*. Raises `SpecError` for what cannot be called."""
    if not callable(function):
        raise SpecError(f"expected a function, not {function!r}")
    name = getattr(function, "__name__", "") or type(getattr(function, "func", function)).__name__
    return name.strip("<>_") or "function"


def arguments(iterables: Iterable[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a map. Raises `SpecError` for none, and for unequal lengths."""
    columns = [list(iterable) for iterable in iterables]
    if not columns or not columns[0]:
        raise SpecError("nothing to map over")
    if len({len(column) for column in columns}) > 1:
        raise SpecError(f"the arguments are of different number: {', '.join(str(len(c)) for c in columns)}")
    return list(zip(*columns, strict=True))


@contextmanager
def _by_value(remote: bool) -> Iterator[Callable[[Any], bytes]]:
    """Return the function that pickles; for nodes that cannot import this program's modules, with their content."""
    if importlib.util.find_spec("cloudpickle") is None:
        yield pickle.dumps
        return
    import cloudpickle  # type: ignore[import-untyped]

    known = cloudpickle.list_registry_pickle_by_value()
    own = {name.partition(".")[0] for name, module in sys.modules.items() if _is_own(getattr(module, "__file__", None))}
    names = (own - {"__main__", "orc"} - known) & set(sys.modules) if remote else ()
    added = [sys.modules[name] for name in names]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield cloudpickle.dumps
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _own_paths() -> list[str]:
    """Return the directories of modules that are not installed with this interpreter."""
    here = [str(Path(entry or ".").absolute()) for entry in sys.path]
    return list(dict.fromkeys(entry for entry in here if Path(entry).is_dir() and _is_own(entry)))


def _is_own(path: str | None) -> bool:
    installed = tuple(f"{Path(prefix)}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    return path is not None and not f"{Path(path).absolute()}/".startswith(installed)
