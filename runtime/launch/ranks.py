"""Ranks of this Python: one function in several child processes, their output, their end, and what became of them.

The one implementation below `notebook_launcher`, `debug_launcher` and `orc.runtime.testing.run_ranks`. A rank is the
leader of a session of its own, so that Ctrl-C reaches the caller alone, which then ends the ranks with whatever they
have started. It dies with the caller.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from string import Template
from typing import Any

from orc.runtime.core.errors import RankFailure

START_METHODS = ("fork", "forkserver", "spawn")
# What a launch around this process says of its own ranks; the new ones have nothing to do with it.
_FOREIGN = ("SLURM_", "OMPI_", "PMI_")
_SETTINGS = ("ORC_", "ACCELERATE_")
_AFTER_FAILURE_S = 2.0  # the others may hang in a collective that the failed rank has left
_GRACE_S = 5.0  # from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    """Rank as its parent sees it."""

    process: Any
    answers: Connection
    outputs: tuple[Connection, ...]
    answer: tuple[str, Any] | None = None
    gone: bool = False  # without an answer, and by itself; a large process takes seconds to end
    stopped: bool = False  # by the parent, not by itself


def run(
    variables: Sequence[Mapping[str, str]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    start_method: str = "fork",
    timeout_s: float | None = None,
    interval_s: float = 0.1,
    clean: bool = False,
    results: bool = False,
    prefixes: Sequence[str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on one rank for each mapping of *variables*, and wait for all of them.

    Args:
        variables: environment variables of each rank, in order of rank.
        function: what each rank does. With ``fork`` neither it nor its arguments need be picklable.
        args: its arguments.
        start_method: ``fork``, ``forkserver`` or ``spawn``.
        timeout_s: for everything, in seconds; no limit without it.
        interval_s: how often it is looked whether ranks are alive, in seconds; their answers come at once.
        clean: keep settings (``ORC_*``, ``ACCELERATE_*``) of this process from the ranks.
        results: return what the function returned, which is pickled then.
        prefixes: print what the ranks write, each line with its rank's prefix; without, they write where this process
            does.

    Returns:
        What the function returned on each rank, `None` unless *results*.

    Raises:
        RankFailure: a rank raised, died, or was not done in time. No process is left then.
    """
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["orc.runtime.accelerator", "torch._dynamo"])  # once, not by every rank
    call = (function, args) if start_method == "fork" else pickled((function, args))
    ranks: list[_Rank] = []
    try:
        for own in variables:
            ranks.append(_start(context, call, own, clean, results, prefixes is not None))
        _watch(ranks, timeout_s, interval_s, prefixes)
    finally:
        _end(ranks)
    _raise_failures(ranks, timeout_s)
    return [unpickled(rank.answer[1]) if results and rank.answer else None for rank in ranks]


def launch_variables(
    rank: int, world_size: int, local_world_size: int, address: str, port: int | str
) -> dict[str, str]:
    """Return the variables of one rank, those that torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(rank // local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def held_port(wanted: int = 0) -> Any:
    """Reserve a TCP port of the loopback interface for the block: *wanted* if it is free."""
    with socket.socket() as holder:
        # Bound, but not listened on: who sets this option too, as torch's store does, can listen there all the same.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", wanted))
        except OSError:
            holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


# ---- the parent


def _start(context: Any, call: Any, variables: Mapping[str, str], clean: bool, results: bool, piped: bool) -> _Rank:
    mine, theirs = context.Pipe()
    pipes = [context.Pipe(duplex=False) for _ in range(2 if piped else 0)]
    arguments = (call, dict(variables), clean, results, theirs, tuple(write for _, write in pipes))
    process = context.Process(target=_live, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: those of a notebook are not used
        process.start()
    for end in (theirs, *(write for _, write in pipes)):
        end.close()
    return _Rank(process, mine, tuple(read for read, _ in pipes))


def _watch(ranks: Sequence[_Rank], timeout_s: float | None, interval_s: float, prefixes: Sequence[str] | None) -> None:
    """Wait for the answers of all ranks, and print what they write meanwhile."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    printer = _Printer(ranks, prefixes or [""] * len(ranks))
    waiting = {rank.answers: rank for rank in ranks}
    while waiting:
        left = interval_s if deadline is None else min(interval_s, deadline - time.monotonic())
        if left <= 0:
            break
        failed = False
        for ready in multiprocessing.connection.wait([*waiting, *printer.open], left):
            assert isinstance(ready, Connection)
            if ready in printer.open:
                printer.copy(ready)
                continue
            rank = waiting.pop(ready)
            with contextlib.suppress(EOFError, ConnectionResetError):
                rank.answer = ready.recv()
            rank.gone = rank.answer is None
            failed |= rank.answer is None or rank.answer[0] == "error"
        for rank in [rank for rank in waiting.values() if not rank.process.is_alive() and not rank.answers.poll()]:
            del waiting[rank.answers]  # its own children may keep the pipe open
            rank.gone = failed = True
        if failed:
            soon = time.monotonic() + _AFTER_FAILURE_S
            deadline = soon if deadline is None else min(deadline, soon)
    printer.drain()


class _Printer:
    """Copies the lines that ranks write to this process's own streams."""

    def __init__(self, ranks: Sequence[_Rank], prefixes: Sequence[str]) -> None:
        self.open: dict[Connection, tuple[str, str]] = {
            pipe: (prefix, name)
            for rank, prefix in zip(ranks, prefixes, strict=True)
            for pipe, name in zip(rank.outputs, ("stdout", "stderr"), strict=False)
        }
        self._kept = dict.fromkeys(self.open, b"")

    def copy(self, pipe: Connection) -> None:
        """Print the whole lines that *pipe* has; a progress bar's end with a carriage return."""
        data = os.read(pipe.fileno(), 65536)
        text = self._kept[pipe] + data
        end = len(text) if not data else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._print(pipe, text[:end])
        self._kept[pipe] = text[end:]
        if not data:
            del self.open[pipe]

    def _print(self, pipe: Connection, text: bytes) -> None:
        if not text:
            return
        prefix, name = self.open[pipe]
        stream = getattr(sys, name)  # a notebook has its own for each cell
        for line in text.decode(errors="replace").splitlines(keepends=True):
            stream.write(prefix + line)
        stream.flush()

    def drain(self) -> None:
        """Print what is still in the pipes, without waiting for processes that keep them open."""
        while ready := multiprocessing.connection.wait(list(self.open), 0):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self.copy(pipe)
        for pipe in self.open:
            self._print(pipe, self._kept[pipe])


def _end(ranks: Sequence[_Rank]) -> None:
    """Let ranks that are done leave; end the others, and whatever any of them has left behind."""
    for rank in ranks:
        if rank.answer is not None:
            with contextlib.suppress(OSError):
                rank.answers.send("leave")  # nobody closes a connection that others still use
        elif not rank.gone and rank.process.is_alive():
            rank.stopped = True
            rank.process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        _kill_session(rank.process.pid)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        for pipe in (rank.answers, *rank.outputs):
            pipe.close()


def _kill_session(pid: int) -> None:
    # It is no leader yet, or nothing is left of its group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _raise_failures(ranks: Sequence[_Rank], timeout_s: float | None) -> None:
    told: list[tuple[int, int, str]] = []
    for number, rank in enumerate(ranks):
        name = f"--- rank {number}"
        if rank.answer is not None and rank.answer[0] == "error":
            when, text = rank.answer[1]
            told.append((1, when, f"{name}\n{text}"))
        elif rank.answer is None and not rank.stopped:
            told.append((0, 0, f"{name}\n{_ending(rank.process.exitcode)}"))
        elif rank.answer is None:
            told.append((2, number, f"{name}\n"))
    if not told:
        return
    told.sort()  # first what died by itself, then what raised, earliest first: the others are mostly consequences
    late = told[0][0] == 2
    silent = f"no result within {timeout_s:g} s" if late else "was stopped: it had not ended when another rank failed"
    raise RankFailure("\n".join(text + silent if kind == 2 else text.rstrip() for kind, _, text in told))


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"it ended with exit status {status}, and without an answer"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"it was ended by {name}{hint}"


# ---- the rank


def _live(
    call: Any,
    variables: Mapping[str, str],
    clean: bool,
    results: bool,
    answers: Connection,
    outputs: tuple[Connection, ...],
) -> None:
    """The life of one rank; never returns."""
    with contextlib.suppress(OSError):
        os.setsid()
    _die_with_the_caller()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the caller's handler, if it has one, is about the caller
    for number, pipe in zip((1, 2), outputs, strict=False):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    if outputs:
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    foreign = _FOREIGN + (_SETTINGS if clean else ())
    for name in list(os.environ):
        if name.startswith(foreign):
            del os.environ[name]
    os.environ.update(variables)
    try:
        import torch

        torch.set_num_threads(1)  # as under a launcher: the ranks share this machine
        function, args = call if isinstance(call, tuple) else unpickled(call)
        value = _value(function, args)
        answer: tuple[str, Any] = ("ok", pickler().dumps(value) if results else b"")
    except BaseException:  # noqa: BLE001 (it is raised again by the caller's process)
        answer = ("error", (time.monotonic_ns(), traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        answers.send(answer)
        answers.poll(None)  # until all are done, or the caller is gone
    os._exit(0 if answer[0] == "ok" else 1)


def _value(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except SystemExit as end:
        if end.code:
            raise
        return None


def _die_with_the_caller() -> None:
    """Have Linux kill this process when its parent ends; elsewhere nothing happens."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- functions on their way


def pickler() -> Any:
    """Return cloudpickle, or pickle where that is not installed."""
    import importlib
    import importlib.util

    return importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")


def pickled(value: Any) -> bytes:
    """Return a function and its arguments for another process. Raises `RankFailure` for what cannot travel."""
    made = pickler()
    function = value[0] if isinstance(value, tuple) else None
    module = sys.modules.get(getattr(function, "__module__", ""))
    # Test modules are often imported in a way that another process cannot repeat.
    by_value = module is not None and made.__name__ == "cloudpickle" and not _importable(module.__name__)
    if by_value:
        made.register_pickle_by_value(module)
    try:
        return bytes(made.dumps(value))
    except Exception as error:
        raise RankFailure(
            f"{getattr(function, '__qualname__', type(value).__name__)} or its arguments cannot be pickled for another "
            f"process ({error}); define the function at the top of a module, or install cloudpickle"
        ) from error
    finally:
        if by_value:
            made.unregister_pickle_by_value(module)


def _importable(module: str) -> bool:
    import importlib.machinery

    return importlib.machinery.PathFinder.find_spec(module.partition(".")[0]) is not None


def unpickled(data: bytes) -> Any:
    """Return what `pickled` was given."""
    return pickler().loads(data)


def prefixes(template: str | None, first_rank: int, count: int) -> list[str]:
    """Return the prefix of each rank's lines: *template* with ``${role_name}``, ``${rank}``, ``${local_rank}``."""
    return [
        Template(template or "").safe_substitute(role_name="default", rank=first_rank + local, local_rank=local)
        for local in range(count)
    ]
