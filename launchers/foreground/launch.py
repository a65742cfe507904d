"""``orc launch``: a script on this machine, on N processes, in the foreground. No ledger, no snapshot, no agent.

The ranks stay in the terminal's process group, so Ctrl-C, Ctrl-Z and a debugger on rank 0 work as they do with plain
``python``. Nothing here imports torch: the launcher costs milliseconds and is out of the way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orc.launchers.agent import network
from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.gpus import own_part
from orc.launchers.agent.processes import (
    become_subreaper,
    decode_wait_status,
    describe_exit,
    kill_descendants,
    next_signal,
    release_signals,
    shell_exit_status,
    signal_process,
    spawn,
    take_signals,
)
from orc.launchers.agent.procfs import children
from orc.launchers.agent.state import FAILURE_GRACE_S
from orc.launchers.agent.variables import prepend_path, without_own
from orc.launchers.control_characters import escape_controls
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.tee import Streams, chosen, open_tee
from orc.launchers.foreground.world import World, alone
from orc.launchers.rank_hooks.startup import GATE, PRELOAD, modules_in

_TRIGGERS = ("torch", "orc.runtime")
_SOURCE_LIMIT = 1 << 20


def begins_with_torch(source: bytes) -> bool:
    """Return True when the script's first statement with any effect is the import of torch, but for pure imports."""
    if len(source) > _SOURCE_LIMIT or not any(name.encode() in source for name in _TRIGGERS):
        return False
    import ast

    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # Python will say so, with its own words
        return False
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names = [statement.module]
        else:
            return False
        for name in names:
            if any(name == trigger or name.startswith(trigger + ".") for trigger in _TRIGGERS):
                return True
            if name.partition(".")[0] not in sys.stdlib_module_names and name != "numpy":
                return False
    return False


def shadows_a_library(modules: Collection[str]) -> bool:
    """Return True when one of these modules, which lie beside the script, hides a module that torch imports."""
    return any(name in sys.stdlib_module_names or name in ("torch", "numpy") for name in modules)


_TERMINAL = 0x80  # SI_KERNEL: sent by the terminal, to every process of the foreground group
_TERM_GRACE_S = 30.0
_REACTION_S = 3600.0  # nothing to watch but signals


def _current_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "the current directory, which was removed"


@dataclass(frozen=True)
class LocalLaunch:
    """Request of a launch. ``program`` is a script, a module or any program, and its arguments, passed on untouched."""

    program: Sequence[str]
    nprocs: int = 1
    module: bool = False  # program[0] is a module, as in python -m
    no_python: bool = False  # program[0] is a program of its own
    python: str = field(default_factory=lambda: sys.executable)
    python_flags: Sequence[str] = ()  # of the interpreter
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None  # each rank's output goes to rank-<n>.log there as well
    tee: Streams = 3  # which of its streams: 1 stdout, 2 stderr, 3 both; or one such number for each local rank
    redirects: Streams = 0  # which of them go there alone
    quiet: bool = False  # no line about the failing rank
    world: World | None = None  # what these ranks are a part of; None: they are all
    max_restarts: int = 0
    grace_s: float = _TERM_GRACE_S

    def argv(self) -> list[str]:
        """The command line of every rank. Raises `LaunchError` for a script that is not there."""
        if not self.program or not self.program[0]:
            raise LaunchError("nothing to run", hint="orc launch -n 2 train.py --lr 0.1")
        first = self.program[0]
        if self.no_python:
            return list(self.program)
        if self.module:
            return [self.python, *self.python_flags, "-m", *self.program]
        if not Path(first).exists():
            hint = "Use -m for a module, or --no-python for a program that is not Python."
            raise LaunchError(f"no such script: {first}", where=_current_directory(), hint=hint)
        return [self.python, *self.python_flags, *self.program]

    def make_log_dir(self) -> None:
        """Make the directory of the logs, if there are to be some. Raises `LaunchError`."""
        try:
            if self.log_dir is not None:
                self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = str(error.filename)
            raise LaunchError(f"the log directory cannot be made: {error.strerror}", where=where) from None


def interpreter_flags(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that Python itself was given in the command line *argv* of ``python FLAGS -m orc.launch``."""
    if "-m" not in argv:
        return ()
    module = argv.index("-m")
    if list(argv[module + 1 : module + 2]) != ["orc.launch"]:
        return ()
    return tuple(flag for flag in argv[1:module] if flag not in ("-E", "-I"))  # with these, ranks find no runtime


@dataclass(frozen=True)
class _End:
    """End of one round of ranks: status 0, or the first failing rank's."""

    status: int
    what: str = ""
    interrupted: bool = False  # by a signal to the launcher; not a reason to try again


def launch(request: LocalLaunch) -> int:
    """Run the ranks of a launch to their end.

    Output and standard input (rank 0's) are inherited. When a rank fails, the others are ended and the failing one is
    named on standard error.

    Args:
        request: The program, the number of its ranks, and their settings.

    Returns:
        The exit status: 0, or that of the first failing rank (128 + signal).

    Raises:
        LaunchError: Nothing could be started.
    """
    if request.nprocs < 1:
        raise LaunchError(f"-n {request.nprocs}: at least one process is needed")
    argv = request.argv()
    env = environment(request)
    request.make_log_dir()
    become_subreaper()
    take_signals()
    try:
        for restart in range(request.max_restarts + 1):
            end = _Round(request, argv, env, restart).run()
            if end.what and not request.quiet:
                log_stderr(end.what)
            if end.status == 0 or end.interrupted or restart == request.max_restarts:
                break
            log_stderr(f"restart {restart + 1} of {request.max_restarts}")
        return end.status
    except LaunchFailure as error:
        raise LaunchError(str(error)) from None
    finally:
        release_signals()


def log_stderr(text: str) -> None:
    """Write *text* to standard error, in the launcher's name."""
    sys.stderr.write(f"orc launch: {escape_controls(text)}\n")
    sys.stderr.flush()


def runtime_path() -> Path:
    """A directory for PYTHONPATH that holds ``orc.runtime``, the start-up hook, and nothing else of this installation.

    Putting site-packages itself on the path would let everything in it shadow the standard library. Made of symbolic
    links below the state directory, once per installation. Raises `LaunchError`.
    """
    import hashlib

    from orc.launchers.paths import state_dir
    from orc.launchers.strict_modes import make_private

    room = Path(__file__).resolve().parents[1]
    runtime, hook = room.parent / "runtime", room / "rank_hooks" / "startup.py"
    key = hashlib.sha256(f"{runtime}\n{hook}".encode()).hexdigest()[:16]
    directory = state_dir() / "python-path" / key
    try:
        for link, target in (
            (directory / "orc" / "runtime", runtime),
            (directory / "sitecustomize.py", hook),
        ):
            if not link.is_symlink():
                make_private(link.parent)
                temporary = link.with_name(f"{link.name}.{os.getpid()}")
                temporary.symlink_to(target)
                temporary.rename(link)
    except OSError as error:
        raise LaunchError(
            f"cannot prepare the Python path of the ranks: {error.strerror}", where=str(directory)
        ) from None
    return directory


def environment(request: LocalLaunch) -> dict[str, str]:
    """Return the variables that all ranks of *request* have in common. Raises `LaunchError`."""
    env = without_own(os.environ)
    env.update(request.env)
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env = {**(request.world.listening(env) if request.world else network.on_loopback()), **env}
    if request.nprocs > 1 or (request.world and request.world.local_size > 1):
        env.setdefault("OMP_NUM_THREADS", "1")
        env["ORC_WHOLE_LINES"] = "1"  # launchers/rank_hooks/startup.py
    prepend_path(env, str(runtime_path()))
    return env


def _may_preload(request: LocalLaunch, env: Mapping[str, str]) -> bool:
    """Return True when one process may import torch for all ranks: see `orc.launchers.foreground.launch`."""
    if request.nprocs < 2 or request.module or request.no_python or request.log_dir is not None:
        return False
    if env.get("OMP_NUM_THREADS") != "1" or env.get("ORC_FREEZE_IMPORT") == "0":
        return False  # libraries that start threads when they are loaded cannot be forked

    script = Path(request.program[0])
    try:
        return begins_with_torch(script.read_bytes()) and not shadows_a_library(
            modules_in(str(script.resolve().parent))
        )
    except OSError:  # a pipe, a directory with __main__.py: Python's business
        return False


class _Round:
    """Round of all ranks, from the first start to the last end."""

    def __init__(self, request: LocalLaunch, argv: list[str], env: Mapping[str, str], restart: int) -> None:
        self.request = request
        self.argv = argv
        self.env = {**env, "ORC_RESTART": str(restart)}
        self.alive: dict[int, int] = {}  # pid -> rank
        self.preloader: tuple[int, int] | None = None  # its pid, and the pipe through which it names the ranks
        self.tees: list[int] = []
        self.others = set(children())  # of the calling program; not ours to touch
        self.started = False
        self.ranks: list[dict[str, str]] = []
        self.failed: tuple[int, int | None, str | None] | None = None
        self.kill_at: float | None = None
        self.interrupted: signal.Signals | None = None

    def run(self) -> _End:
        port = None if self.request.world else network.Port()
        try:
            world = self.request.world or alone(self.request.nprocs, port.number if port else 0)
            self.ranks = [
                {**own, **own_part(self.env, int(own["LOCAL_RANK"]), int(own["LOCAL_WORLD_SIZE"]))}
                for own in map(world.variables, range(self.request.nprocs))
            ]
            if _may_preload(self.request, self.env):
                self._preload()
            else:
                self._start()
            while self.alive or self.preloader:
                self._tick()
        finally:
            self._clean_up()
            if port is not None:
                port.close()
        if self.failed is None and self.interrupted is not None and not self.started:
            return _End(128 + self.interrupted, f"stopped by {self.interrupted.name}", interrupted=True)
        if self.failed is None:
            return _End(0)
        rank, code, name = self.failed
        status = shell_exit_status(code, name)
        if self.interrupted is not None:
            return _End(status, f"stopped by {self.interrupted.name}", interrupted=True)
        return _End(status, f"rank {self._number(rank)} {describe_exit(code, name)}")

    def _number(self, index: int) -> int:
        return index + (self.request.world.first_rank if self.request.world else 0)

    def _preload(self) -> None:
        """Start one process that imports torch and forks the ranks."""
        read, write = os.pipe()
        orders = {
            "report": write,
            "launcher": os.getpid(),
            "directory": str(Path(self.request.program[0]).resolve().parent),
            "ranks": self.ranks,
        }
        try:
            pid = spawn(self.argv, {**self.env, PRELOAD: json.dumps(orders)}, session=False, keep=(write,))
        finally:
            os.close(write)
        self.preloader = (pid, read)

    def _adopt(self) -> None:
        """The preloading process has ended: its ranks are ours now, or there are none and we start them."""
        if self.preloader is None or not os.waitpid(self.preloader[0], os.WNOHANG)[0]:
            return
        with os.fdopen(self.preloader[1], "rb") as pipe:
            report = pipe.read()
        self.preloader = None
        if report:
            self.alive = {pid: rank for rank, pid in enumerate(json.loads(report))}
            self.started = True
            for pid in self.alive if self.interrupted else ():
                signal_process(pid, self.interrupted or signal.SIGTERM)
        elif self.interrupted is None:
            kill_descendants("", spare=self.others)  # a rank that was forked before it failed
            self._start()

    def _start(self) -> None:
        self.started = True
        null = os.open(os.devnull, os.O_RDONLY)
        gate, opener = os.pipe()
        try:
            for rank, own in enumerate(self.ranks):
                keep = (gate if rank else opener,) if self.request.nprocs > 1 else ()
                gate_variable = {GATE: str(keep[0])} if keep else {}
                output = self._tee(rank) if self.request.log_dir is not None else (None, None)
                pid = spawn(
                    self.argv,
                    {**self.env, **own, **gate_variable},
                    stdin=null if rank else None,
                    output=1 if output[1] and not output[0] else output[0],  # both, or neither
                    errors=2 if output[0] and not output[1] else output[1],
                    session=False,
                    keep=keep,
                )
                self.alive[pid] = rank
                for fd in filter(None, output):
                    os.close(fd)
        finally:
            for fd in (null, gate, opener):
                os.close(fd)

    def _tee(self, index: int) -> tuple[int | None, int | None]:
        """Return the ends (stdout, stderr) that a rank writes to, where they are others than ours."""
        directory = self.request.log_dir
        if directory is None:
            raise AssertionError("no log directory")
        copied, redirected = chosen(self.request.tee, index), chosen(self.request.redirects, index)
        if not copied | redirected:
            return None, None
        ends, copier = open_tee(directory / f"rank-{self._number(index)}.log", copied, redirected)
        if copier is not None:
            self.tees.append(copier)
        return ends.get(1), ends.get(2)

    def _tick(self) -> None:
        left = _REACTION_S if self.kill_at is None else self.kill_at - time.monotonic()
        received = next_signal(left)
        if received is None and self.kill_at is not None:
            for pid in self._processes():
                signal_process(pid, signal.SIGKILL)
            self.kill_at = None
        elif received is not None and received.si_signo != signal.SIGCHLD:
            self._on_signal(signal.Signals(received.si_signo), from_terminal=received.si_code == _TERMINAL)
        self._reap(received.si_pid if received is not None and received.si_signo == signal.SIGCHLD else 0)

    def _on_signal(self, number: signal.Signals, from_terminal: bool) -> None:
        if not from_terminal:
            for pid in self._processes():
                signal_process(pid, number)
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            return  # the script's own business
        if self.interrupted is not None and number == signal.SIGINT:
            self.kill_at = time.monotonic()  # a second Ctrl-C: now
        elif self.interrupted is None:
            self.interrupted = number
            self.kill_at = time.monotonic() + self.request.grace_s

    def _processes(self) -> list[int]:
        return [*self.alive, *([self.preloader[0]] if self.preloader else [])]

    def _reap(self, first: int) -> None:
        """Take note of what has ended; of several ranks the one that the signal names was *first*."""
        self._adopt()
        for pid, rank in sorted(self.alive.items(), key=lambda one: one[0] != first):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self.alive[pid]
            code, name = decode_wait_status(status)
            if (code != 0 or name is not None) and self.failed is None:
                self.failed = (rank, code, name)
                if self.interrupted is None:
                    for other in self.alive:
                        signal_process(other, signal.SIGTERM)
                    self.kill_at = time.monotonic() + min(self.request.grace_s, FAILURE_GRACE_S)

    def _clean_up(self) -> None:
        """Nothing that the ranks have put into the background survives; their last output does."""
        kill_descendants("", spare={*self.others, *self.tees})
        deadline = time.monotonic() + 5.0
        for pid in self.tees:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    signal_process(pid, signal.SIGKILL)
                next_signal(0.05)
