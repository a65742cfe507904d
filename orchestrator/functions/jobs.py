"""Python functions as jobs: the pickled call is the job's code, and its result a file in the job's directory.

`orc.orchestrator.functions.node` makes the call on the nodes. Everything else (states, retries, logs, cancellation) is
that of any job.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orc.launchers.backends.base import LogSelector
from orc.launchers.errors import LaunchError, SpecError
from orc.orchestrator.functions import node
from orc.orchestrator.functions.keys import key_of

if TYPE_CHECKING:
    from orc.launchers.snapshot.scan import SourceTree
    from orc.launchers.spec import JobSpec
    from orc.orchestrator.client import Client
    from orc.orchestrator.views import AttemptView, JobView

R = TypeVar("R")
Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
MAP_TAG, CALL_TAG = "map", "call"  # of the jobs of a map: its id, and the number of the call in it
_RESULT_LAG_S = 5.0  # a shared file system may show a result so much later than the end of the job


class FunctionFailed(LaunchError):
    """A call raised an exception on its node, or ended without a result.

    ``traceback`` is the traceback of the exception as text; empty when there was none. ``process`` is the process of
    the call (from 0) that it comes from.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "", traceback: str = "", process: int = 0) -> None:
        super().__init__(what, where=where, hint=hint)
        self.traceback = traceback
        self.process = process

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\n{self.traceback.rstrip()}" if self.traceback else text


class FunctionTimeout(LaunchError):
    """There was no result in the time that the caller would wait. The job goes on."""


class FunctionJob(Generic[R]):
    """Job that makes one call of a function. Made by `Client.submit_function` and `Client.map_functions`."""

    def __init__(self, client: Client, id: str) -> None:
        self.id = self.job_id = id
        self._client = client

    def __repr__(self) -> str:
        return f"FunctionJob({self.id!r})"

    @property
    def view(self) -> JobView:
        """The job as the ledger has it."""
        return self._client.job(self.id)

    @property
    def native_id(self) -> str | None:
        """The cluster's own name for its newest attempt."""
        attempt = self.view.attempt
        return attempt.native_id if attempt else None

    @property
    def processes(self) -> int:
        """Number of processes that make the call: those that have run it, once it has ended, else at most so many."""
        view = self.view
        if view.ended and view.attempt and view.attempt.exit and view.attempt.exit.ranks:
            return max(view.attempt.exit.ranks) + 1
        return int(str(view.spec["resources"]["nodes"]).rpartition(":")[2]) * self._per_node

    @property
    def _per_node(self) -> int:
        resources = self.view.spec["resources"]
        return int(resources["procs_per_node"] or resources["gpus_per_node"] or 1)

    @property
    def state(self) -> str:
        """The job's state now: PENDING, RUNNING, SUCCEEDED, FAILED, ... (docs/explanation/lifecycle.md)."""
        self._client.refresh([self.id])
        return self.view.state

    def done(self) -> bool:
        """Return True when the job has ended, well or not."""
        self._client.refresh([self.id])
        return self.view.ended

    def wait(self) -> None:
        """Wait for the end of the job."""
        self._client.wait([self.id])

    def result(self, timeout_s: float | None = None) -> R:
        """Return the function's value; that of process 0 where there are several.

        Args:
            timeout_s: Seconds to wait for the end of the job; without it, as long as it takes.

        Raises:
            FunctionFailed: The function raised an exception, or the job ended without a result.
            FunctionTimeout: The job has not ended after *timeout_s* seconds.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[R]:
        """Return the function's value in each of its processes. Raises what `result` raises."""
        view = self._ended(timeout_s)
        if view.state != "SUCCEEDED":
            raise self._failure(view)
        return [self._value(view, process) for process in range(self.processes)]

    def exception(self, timeout_s: float | None = None) -> FunctionFailed | None:
        """Wait for the end of the job; return the failure of the first process that has one.

        Raises:
            FunctionTimeout: The job has not ended after *timeout_s* seconds.
        """
        view = self._ended(timeout_s)
        return None if view.state == "SUCCEEDED" else self._failure(view)

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; one that has ended stays as it is."""
        self._client.cancel([self.id])

    def stdout(self, process: int = 0) -> str:
        """Return the output of one process so far: the log of its rank, standard error included."""
        chunks = self._client.read_log(self.id, LogSelector(rank=process))
        return b"".join(chunk.data for chunk in chunks).decode(errors="replace")

    stderr = stdout

    def _ended(self, timeout_s: float | None) -> JobView:
        (view,) = self._client.wait([self.id], timeout_s=timeout_s)
        if not view.ended:
            raise FunctionTimeout(f"{self.id} has no result after {timeout_s:g} s", hint="It goes on.")
        return view

    def _value(self, view: JobView, process: int) -> R:
        deadline = time.monotonic() + _RESULT_LAG_S
        while not (outcome := self._outcome(view, process)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if outcome is None:
            raise self._without_result(view, process)
        value: R = outcome[1]
        return value

    def _outcome(self, view: JobView, process: int) -> tuple[str, Any] | None:
        """Return ``("success", value)`` or ``("error", traceback)`` of a process; `None` where it has left nothing."""
        if view.attempt is None:
            return None
        backend, handle = self._client.at_backend(self.id, view.attempt.number)
        if handle is None:
            return None
        first = process // self._per_node if handle.hosts else 0  # a file is read on the first host of a handle
        there = replace(handle, hosts=handle.hosts[first:] + handle.hosts[:first])
        name = node.result_name(view.attempt.number, process)
        data = backend.read_file(there, name)
        if not data:
            return None
        keys = key_of(self._client.workspace.state_dir, view.digests["code"])
        if not keys:
            raise LaunchError("its result can only be read where it was submitted", where=self.id)
        try:
            outcome = node.verified(keys[node.KEY_VARIABLE], f"{self.id}/{name}", data)
            found: tuple[str, Any] = pickle.loads(outcome)  # noqa: S301 - signed with the key of this very job
        except Exception as error:
            raise FunctionFailed(
                f"the result cannot be read here: {type(error).__name__}: {error}",
                where=self._where(process),
                process=process,
            ) from error
        return found

    def _failure(self, view: JobView) -> FunctionFailed:
        first = view.attempt.exit.first_failure if view.attempt and view.attempt.exit else None
        process = (first.rank or 0) if first else 0
        outcome = self._outcome(view, process) if view.state == "FAILED" else None
        if outcome is None or outcome[0] == "success":
            return self._without_result(view, process)
        trace = str(outcome[1])
        lines = [line.strip() for line in trace.splitlines() if line.strip()]
        return FunctionFailed(lines[-1], where=self._where(process), traceback=trace, process=process)

    def _without_result(self, view: JobView, process: int) -> FunctionFailed:
        reason = view.reason or _cause(view.attempt)
        hint = f"`orc logs {self.id}` shows its output, `orc status {self.id}` its attempts"
        return FunctionFailed(
            f"ended without a result ({view.state}{f': {reason}' if reason else ''})",
            where=self._where(process),
            hint=hint,
            process=process,
        )

    def _where(self, process: int) -> str:
        return f"{self.id}, process {process}" if self.processes > 1 else self.id


def _cause(attempt: AttemptView | None) -> str:
    return (attempt.reason or attempt.cause or "") if attempt else ""


@dataclass(frozen=True)
class Settings:
    """Settings of calls on the nodes: ``function.json``."""

    id: str  # of the map
    max_timeouts: int
    at_once: int | None  # kept by the calls themselves, on one machine
    elsewhere: bool  # this machine's directories mean nothing on the nodes


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
    with _by_value(settings.elsewhere) as dumps:
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
        "paths": [] if settings.elsewhere else _own_paths(),
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
def _by_value(elsewhere: bool) -> Iterator[Callable[[Any], bytes]]:
    """Return the function that pickles; for nodes that cannot import this program's modules, with their content."""
    if importlib.util.find_spec("cloudpickle") is None:
        yield pickle.dumps
        return
    import cloudpickle  # type: ignore[import-untyped]

    known = cloudpickle.list_registry_pickle_by_value()
    own = {name.partition(".")[0] for name, module in sys.modules.items() if _is_own(getattr(module, "__file__", None))}
    names = (own - {"__main__", "orc"} - known) & set(sys.modules) if elsewhere else ()
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
