"""Jobs that make calls of functions, as those who submit them hold them: their states, and their results."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError
from orc.orchestrator.api.logs import at_backend, read_log
from orc.orchestrator.clients.ending import cancel, wait
from orc.orchestrator.functions import node
from orc.orchestrator.functions.calls import key_of
from orc.orchestrator.ledger.records import JobSize

if TYPE_CHECKING:
    from orc.orchestrator.api.session import LedgerSession
    from orc.orchestrator.views import JobView

R = TypeVar("R")
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

    def __init__(self, session: LedgerSession, id: str) -> None:
        self.id = self.job_id = id
        self._session = session

    def __repr__(self) -> str:
        return f"FunctionJob({self.id!r})"

    @property
    def view(self) -> JobView:
        """The job as the ledger has it."""
        return self._session.job(self.id)

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
        return JobSize.of(view.spec).ranks

    @property
    def state(self) -> str:
        """The job's state now: PENDING, RUNNING, SUCCEEDED, FAILED, ... (docs/explanation/lifecycle.md)."""
        self._session.refresh([self.id])
        return self.view.state

    def done(self) -> bool:
        """Return True when the job has ended, well or not."""
        self._session.refresh([self.id])
        return self.view.ended

    def wait(self) -> None:
        """Wait for the end of the job."""
        wait(self._session, [self.id])

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
        cancel(self._session, [self.id])

    def stdout(self, process: int = 0) -> str:
        """Return the output of one process so far: the log of its rank, standard error included."""
        chunks = read_log(self._session, self.id, LogSelector(rank=process))
        return b"".join(chunk.data for chunk in chunks).decode(errors="replace")

    stderr = stdout

    def _ended(self, timeout_s: float | None) -> JobView:
        (view,) = wait(self._session, [self.id], timeout_s=timeout_s)
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
        backend, handle = at_backend(self._session, self.id, view.attempt.number)
        if handle is None:
            return None
        # A file is read on the first host of a handle.
        first = process // JobSize.of(view.spec).ranks_per_node if handle.hosts else 0
        there = replace(handle, hosts=handle.hosts[first:] + handle.hosts[:first])
        name = node.result_name(view.attempt.number, process)
        data = backend.read_file(there, name)
        if not data:
            return None
        keys = key_of(self._session.workspace.state_dir, view.digests["code"])
        if not keys:
            raise LaunchError("the result can be read only on the machine that submitted the job", where=self.id)
        try:
            outcome = node.verified(keys[node.KEY_VARIABLE], f"{self.id}/{name}", data)
            found: tuple[str, Any] = pickle.loads(outcome)  # noqa: S301 - signed with the key of this very job
        except Exception as error:
            what = f"the result cannot be read here: {type(error).__name__}: {error}"
            raise FunctionFailed(what, where=self._where(process), process=process) from error
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
        attempt = view.attempt
        reason = view.reason or (attempt and (attempt.reason or attempt.cause))
        what = f"ended without a result ({view.state}{f': {reason}' if reason else ''})"
        hint = f"`orc logs {self.id}` shows its output, `orc status {self.id}` its attempts"
        return FunctionFailed(what, where=self._where(process), hint=hint, process=process)

    def _where(self, process: int) -> str:
        return f"{self.id}, process {process}" if self.processes > 1 else self.id
