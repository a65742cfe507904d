"""Python functions as jobs, through submitit: one call, or one call for each of many arguments.

A call is pickled into a directory of its own below the cluster's root (``functions/<id>/``), where submitit leaves its
logs and its result; ``function.json`` there is what finds it again. Functions are not in the ledger: nobody retries
them, and their state is asked for when somebody wants to know.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orc.launchers.errors import AmbiguousSubmit, BackendUnreachable, LaunchError, SpecError

if TYPE_CHECKING:
    from orc.launchers.backends.slurm.client import SlurmClient
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.orchestrator.functions.executors import OrcLocalExecutor, OrcSlurmExecutor

R = TypeVar("R")
RECORD_NAME = "function.json"
_FORMAT = 1
# A job that Slurm does not know is lost only this long after its submission, in seconds: accounting lags.
_LOST_AFTER_S = 120.0
_LOOK_FILES_S, _LOOK_CLUSTER_S = 0.1, 2.0


class FunctionState(enum.StrEnum):
    """Where a call stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"  # the cluster does not answer, or does not know it yet

    @property
    def ended(self) -> bool:
        """True when the call will not change any more."""
        return self in (FunctionState.SUCCEEDED, FunctionState.FAILED)


class FunctionFailed(LaunchError):
    """A call raised an exception over there, or ended without a result.

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
    """There was no result in the time that the caller would wait. The call goes on."""


@dataclass(frozen=True)
class _Seen:
    """What the cluster says about a call that has no result (yet)."""

    state: FunctionState
    reason: str = ""


class FunctionJob(Generic[R]):
    """One call of a function, somewhere. Made by `Client.submit_function`, `map_functions` and `function_job`."""

    def __init__(
        self,
        id: str,
        native_id: str,
        processes: int,
        folder: Path,
        submitted_at: float,
        look: Callable[[], _Seen],
        end: Callable[[], None],
        lag_s: float = 0.0,
    ) -> None:
        self.id = id
        self.native_id = native_id  # the Slurm job, or the process that watches over the call on this machine
        self.processes = processes
        self.submitted_at = submitted_at  # seconds since the epoch
        self._folder = folder
        self._look = look
        self._end = end
        self._lag_s = lag_s

    def __repr__(self) -> str:
        return f"FunctionJob({self.id!r}, native_id={self.native_id!r})"

    @property
    def state(self) -> FunctionState:
        """Where it stands now. Asks the cluster unless the results are there."""
        if found := self._told():
            return found
        seen = self._look().state
        # What has ended by then has left its results; they may have come after the first look for them.
        return (self._told() if seen.ended else None) or seen

    def _told(self) -> FunctionState | None:
        """What the results say; `None` while one is missing and none is an exception."""
        outcomes = self._outcomes()
        if any(outcome[0] != "success" for outcome in outcomes if outcome):
            return FunctionState.FAILED
        return FunctionState.SUCCEEDED if all(outcomes) else None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state.ended

    def result(self, timeout_s: float | None = None) -> R:
        """What the function returned; that of process 0 where there are several.

        Raises `FunctionFailed` with the traceback from over there, `FunctionTimeout` after *timeout_s* seconds. A
        cluster that does not answer is waited for.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[R]:
        """What the function returned in each of its processes. Raises what `result` raises."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        return [outcome[1] for outcome in self._outcomes() if outcome]

    def exception(self, timeout_s: float | None = None) -> FunctionFailed | None:
        """Wait for the end; the failure of the first process that has one. Raises `FunctionTimeout`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        next_look = ended_at = 0.0
        while True:
            now = time.monotonic()
            seen = _Seen(FunctionState.UNKNOWN)
            if now >= next_look:
                seen = self._asked()
                next_look = time.monotonic() + _LOOK_CLUSTER_S
                # Before the results: what has ended by now has left them, but for the file system's lag.
                if seen.state.ended:
                    ended_at = ended_at or now
                    next_look = 0.0
                else:
                    ended_at = 0.0
            outcomes = self._outcomes()
            failed = [(number, value) for number, value in enumerate(outcomes) if value and value[0] != "success"]
            if failed:
                return self._failure(*failed[0])
            if all(outcomes):
                return None
            if ended_at and now - ended_at >= self._lag_s:
                return self._without_result(outcomes.index(None), seen.reason)
            if deadline is not None and now >= deadline:
                raise FunctionTimeout(f"{self.id} has no result after {timeout_s:g} s", hint="It goes on.")
            time.sleep(_LOOK_FILES_S)

    def cancel(self) -> None:
        """End it; what has ended stays as it is."""
        self._end()

    def stdout(self, process: int = 0) -> str:
        """What one process of it has printed so far."""
        return self._log("stdout", process)

    def stderr(self, process: int = 0) -> str:
        """The same for standard error, submitit's own messages included."""
        return self._log("stderr", process)

    def _log(self, stream: str, process: int) -> str:
        path: Path = getattr(self._paths(process), stream)
        try:
            return path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _paths(self, process: int) -> Any:
        from orc.orchestrator.functions.executors import paths_of

        return paths_of(self._folder, self.native_id, process)

    def _outcomes(self) -> list[tuple[str, Any] | None]:
        """What each process has left: ``("success", value)``, ``("error", traceback)``, or nothing yet."""
        import pickle

        os.listdir(self._folder)
        found: list[tuple[str, Any] | None] = []
        for process in range(self.processes):
            try:
                with self._paths(process).result_pickle.open("rb") as file:
                    found.append(pickle.load(file))  # noqa: S301 - our own directory
            except FileNotFoundError:
                found.append(None)
        return found

    def _asked(self) -> _Seen:
        try:
            return self._look()
        except BackendUnreachable:
            return _Seen(FunctionState.UNKNOWN)

    def _failure(self, process: int, outcome: tuple[str, Any]) -> FunctionFailed:
        trace = str(outcome[1])
        lines = [line for line in trace.splitlines() if line.strip()]
        what = lines[-1].strip() if lines else "it failed"
        return FunctionFailed(what, where=self._where(process), traceback=trace, process=process)

    def _without_result(self, process: int, reason: str) -> FunctionFailed:
        last = "\n".join(self.stderr(process).splitlines()[-20:])
        what = f"ended without a result{f' ({reason})' if reason else ''}"
        hint = f"the last it said:\n{last}" if last else f"look into {self._folder}"
        return FunctionFailed(what, where=self._where(process), hint=hint, process=process)

    def _where(self, process: int) -> str:
        return f"{self.id}, process {process}" if self.processes > 1 else self.id


def submit(
    cluster: Cluster,
    state_dir: Path,
    function: Callable[..., R],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    *,
    many: bool,
    resources: Mapping[str, Any] | None,
    name: str | None,
    at_once: int | None,
    max_timeouts: int,
) -> list[FunctionJob[R]]:
    """One call, or *many* in one array. Raises `LaunchError`; then nothing is left behind."""
    from orc.launchers.ids import new_job_id

    if not callable(function):
        raise SpecError(f"expected a function, not {function!r}")
    if at_once is not None and at_once < 1:
        raise SpecError(f"at_once: at least one call runs at a time, not {at_once}")
    job = _job(name or _name_of(function), cluster, resources or {})
    place = _Place.of(cluster, state_dir)
    id = new_job_id(job.name)
    folder = place.functions / id
    folder.mkdir(mode=0o700, parents=True)
    try:
        executor = place.executor(job, folder, id, at_once if many else None, max_timeouts)
        from submitit.core.utils import DelayedSubmission

        made = executor._internal_process_submissions(
            [DelayedSubmission(function, *args, **kwargs) for args, kwargs in calls]
        )
    except LaunchError as error:
        if not isinstance(error, (AmbiguousSubmit, BackendUnreachable)):  # else it may run
            shutil.rmtree(folder, ignore_errors=True)
        error.where = error.where or job.name
        raise
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        raise LaunchError(
            f"the call cannot be sent: {type(error).__name__}: {error}",
            where=job.name,
            hint="The function and its arguments travel as a pickle (cloudpickle).",
        ) from error
    record = {
        "format": _FORMAT,
        "id": id,
        "kind": cluster.kind,
        "many": many,
        "processes": job.resources.max_nodes * job.resources.nproc,
        "native_ids": [one.job_id for one in made],
        "starts": [place.start_of(one.job_id) for one in made],
        "submitted_at": time.time(),
    }
    _write(folder / RECORD_NAME, record)
    return _jobs(place, folder, record)


def load(cluster: Cluster, state_dir: Path, id: str) -> list[FunctionJob[Any]]:
    """The calls of an earlier submission. Raises `LaunchError` when there is none of that id."""
    place = _Place.of(cluster, state_dir)
    group, dot, number = id.partition(".")
    folder = place.functions / group
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
    except (FileNotFoundError, ValueError):
        raise LaunchError(f"no such function job: {id}", where=cluster.name, hint=f"looked in {folder}") from None
    jobs = _jobs(place, folder, record)
    if not dot:
        return jobs
    found = [job for job in jobs if job.id == id]
    if not number.isdigit() or not found:
        raise LaunchError(f"{group} has no call {number}", where=cluster.name, hint=f"it has {len(jobs)}, from 0")
    return found


def _jobs(place: _Place, folder: Path, record: Mapping[str, Any]) -> list[FunctionJob[Any]]:
    jobs = []
    for number, (native_id, start) in enumerate(zip(record["native_ids"], record["starts"], strict=True)):
        id = f"{record['id']}.{number}" if record["many"] else str(record["id"])
        at, name = float(record["submitted_at"]), _slurm_name(str(record["id"]))
        look = _bound(place.look, native_id, name, start, at)
        end = _bound(place.end, native_id, name, start)
        jobs.append(FunctionJob[Any](id, native_id, int(record["processes"]), folder, at, look, end, place.lag_s))
    return jobs


def _bound(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


def _slurm_name(id: str) -> str:
    return f"orc-fn-{id}"


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "") or type(getattr(function, "func", function)).__name__
    return name.strip("<>_") or "function"


def _job(name: str, cluster: Cluster, resources: Mapping[str, Any]) -> JobSpec:
    """The job that asks for what the call needs. Raises `SpecProblems`."""
    from pydantic import ValidationError

    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.load import known_keys
    from orc.launchers.spec.problems import SpecProblems, choose, translate
    from orc.launchers.spec.source import Document

    asked = {"name": name, "command": "true", "cluster": cluster.name, "resources": dict(resources)}
    try:
        return JobSpec.model_validate(asked)
    except ValidationError as error:
        document = Document(asked, "", {}, {})
        raise SpecProblems(translate(error, document, lambda path, key: choose(key, known_keys(path)))) from None


def _write(path: Path, record: Mapping[str, Any]) -> None:
    from orc.launchers.remote.files import write_file

    write_file(str(path), json.dumps(record).encode() + b"\n", 0o600)


class _Place:
    """Where calls run: what they are submitted with, how they are looked at and ended."""

    functions: Path
    lag_s = 0.0  # how long a result may take to show after the call's end

    @staticmethod
    def of(cluster: Cluster, state_dir: Path) -> _Place:
        """Raises `LaunchError` for a cluster that cannot run functions, or without submitit."""
        import importlib.util

        if cluster.kind not in ("local", "slurm"):
            raise LaunchError(
                f"functions run on clusters of kind local or slurm, not {cluster.kind}",
                where=cluster.name,
                hint="Write a script and submit it as a job.",
            )
        if importlib.util.find_spec("submitit") is None:
            raise LaunchError("functions need submitit, which is not installed", hint="pip install 'orc-launch[slurm]'")
        return _Here(cluster, state_dir) if cluster.kind == "local" else _OnSlurm(cluster)

    def executor(
        self, job: JobSpec, folder: Path, id: str, at_once: int | None, timeouts: int
    ) -> OrcLocalExecutor | OrcSlurmExecutor:
        """What submits one call, or several at once."""
        raise NotImplementedError

    def start_of(self, native_id: str) -> str:
        """What tells the call from a later one of the same number, if anything does."""
        raise NotImplementedError

    def look(self, native_id: str, name: str, start: str, submitted_at: float) -> _Seen:
        """What the cluster says."""
        raise NotImplementedError

    def end(self, native_id: str, name: str, start: str) -> None:
        """Cancel."""
        raise NotImplementedError


class _Here(_Place):
    """This machine."""

    def __init__(self, cluster: Cluster, state_dir: Path) -> None:
        self._cluster = cluster
        self.functions = state_dir / "functions"

    def executor(self, job: JobSpec, folder: Path, id: str, at_once: int | None, timeouts: int) -> OrcLocalExecutor:
        from orc.orchestrator.functions.executors import local_executor

        return local_executor(job, self._cluster, folder, at_once, timeouts)

    def start_of(self, native_id: str) -> str:
        from orc.launchers.agent.procfs import process_start

        return str(process_start(int(native_id)) or "")

    def look(self, native_id: str, name: str, start: str, submitted_at: float) -> _Seen:
        if start and self.start_of(native_id) == start:
            return _Seen(FunctionState.RUNNING)
        return _Seen(FunctionState.FAILED, "its process is gone")

    def end(self, native_id: str, name: str, start: str) -> None:
        import signal
        from contextlib import suppress

        pid = int(native_id)
        if start and self.start_of(native_id) == start:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


class _OnSlurm(_Place):
    """A Slurm cluster that is entered on this machine."""

    lag_s = 5.0  # of a shared file system

    def __init__(self, cluster: Cluster) -> None:
        from orc.launchers.backends.slurm.client import SlurmClient
        from orc.launchers.backends.slurm.login import root_of
        from orc.launchers.backends.slurm.options import read_settings
        from orc.launchers.remote.transport import LocalTransport

        settings = read_settings(cluster.options, where=cluster.name)
        if settings.login is not None:
            raise LaunchError(
                "functions are pickled into a directory that this machine and the nodes share, and this cluster is "
                "entered over SSH",
                where=cluster.name,
                hint="Run this on the login node, or write a script and submit it as a job.",
            )
        self._cluster, self._accounting = cluster, settings.accounting
        self._client: SlurmClient = SlurmClient(LocalTransport(), settings, where=f"cluster {cluster.name}")
        self.functions = Path(root_of(cluster, settings)).expanduser() / "functions"

    def executor(self, job: JobSpec, folder: Path, id: str, at_once: int | None, timeouts: int) -> OrcSlurmExecutor:
        from orc.orchestrator.functions.executors import slurm_executor

        return slurm_executor(job, self._cluster, self._client, folder, _slurm_name(id), at_once, timeouts)

    def start_of(self, native_id: str) -> str:
        return ""

    def look(self, native_id: str, name: str, start: str, submitted_at: float) -> _Seen:
        rows = [row for row in self._client.queue([native_id]) if row.name == name]
        asked_everyone = True
        if not rows:
            accounted = self._client.accounted([native_id])
            asked_everyone = accounted is not None or not self._accounting
            rows = [row for row in accounted or () if row.name == name and row.ended]
        if not rows:
            lost = asked_everyone and time.time() - submitted_at > _LOST_AFTER_S
            return _Seen(FunctionState.FAILED if lost else FunctionState.UNKNOWN, "Slurm does not know the job")
        row = max(rows, key=lambda row: row.submitted_at or 0.0)
        if row.ended:
            return _Seen(FunctionState.FAILED if row.state != "COMPLETED" else FunctionState.SUCCEEDED, row.state)
        return _Seen(FunctionState.PENDING if row.waiting else FunctionState.RUNNING, row.reason)

    def end(self, native_id: str, name: str, start: str) -> None:
        rows = [row for row in self._client.queue([native_id]) if row.name == name and not row.ended]
        self._client.set_apart(row.job_id for row in rows if row.waiting and "_" in row.job_id)
        if rows:
            self._client.cancel([native_id])


def arguments(iterables: Iterable[Iterable[Any]]) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
    """The calls of a map: the first of each, the second of each, ... Raises `SpecError` for unequal lengths."""
    columns = [list(iterable) for iterable in iterables]
    if not columns or not columns[0]:
        raise SpecError("nothing to map over")
    if len({len(column) for column in columns}) > 1:
        raise SpecError(f"the arguments are of different number: {', '.join(str(len(c)) for c in columns)}")
    return [(args, {}) for args in zip(*columns, strict=True)]
