"""Processes that an agent starts, signals and ends: programs and forked work that die with it, and how they ended.

Signals are blocked for the agent's whole life and taken one by one, so that nothing interrupts it half-way.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from orc.launchers.agent.errors import LaunchFailure, log_stderr
from orc.launchers.agent.procfs import (
    boot_id,
    children,
    descendants,
    is_running,
    marked_processes,
    process_start,
    runs_another,
)
from orc.launchers.agent.records import NODE_RECORD_BYTES, checked, read_json, remove

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

# SIGURG too: a scheduler signals every process of a step at once, and this one means nothing to the ranks.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG, signal.SIGINT)
NEWS = signal.SIGUSR2  # from the link's process: something has come
_WATCHED = (signal.SIGCHLD, *ENDING, signal.SIGHUP, NEWS)
_inherited_mask: set[signal.Signals] | None = None


def take_signals() -> None:
    """Block what the agent reacts to; from now on `next_signal` delivers it. Children get the old mask back."""
    global _inherited_mask
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would reap our children behind our back
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    if _inherited_mask is None:  # a forked node agent inherits what the gang has blocked
        _inherited_mask = {signal.Signals(number) for number in before}


def release_signals() -> None:
    """Undo `take_signals` (for callers that live on after having supervised)."""
    if _inherited_mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _inherited_mask)


def next_signal(timeout_s: float) -> signal.struct_siginfo | None:
    """The next blocked signal, waiting for *timeout_s* at most."""
    return signal.sigtimedwait(_WATCHED, max(0.0, timeout_s))


def ended_children(first: int = 0) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, ``(pid, wait status)``: *first* before the others.

    The kernel lists them by age. But however many end before the signal is taken, it names the one that was first: so
    a rank that fails is told from those that lose their connection to it a moment later.
    """
    if not first and (pending := signal.sigtimedwait((signal.SIGCHLD,), 0)) is not None:
        first = pending.si_pid
    for which in (first, -1) if first else (-1,):
        while True:
            try:
                pid, status = os.waitpid(which, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            yield pid, status


def signal_process(pid: int, number: int) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group led by *pid*, if any of it is left."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc: Any = None
_users_umask = 0o022


def make_private() -> None:
    """Make what this process writes readable for its user alone; ranks get the umask back (`users_umask`)."""
    global _users_umask
    _users_umask = os.umask(0o077)


def users_umask() -> int:
    """Return the umask that this process was started with."""
    return _users_umask


def load_libc() -> Any:
    """The C library, loaded once."""
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None)
    return _libc


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument."""
    load_libc().prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Make this process inherit what its descendants leave behind, instead of init."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: str | None = None,
    stdin: int | None = None,
    output: int | None = None,
    errors: int | None = None,
    session: bool = True,
    umask: int | None = None,
    keep: Sequence[int] = (),
) -> int:
    """Start a program and return its pid; raises `LaunchFailure` when it cannot be executed.

    It dies with this process (PR_SET_PDEATHSIG). *stdin*, *output* (of stdout, and of stderr unless *errors* is
    given) are file descriptors, `None` inherits; *keep* are further ones to leave open.
    Not `subprocess`: that needs 8 ms to import and cannot do the steps between fork and exec.
    """
    parent = os.getpid()
    load_libc()  # here, not once in every child
    report, failed = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            if session:
                os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the call above
                os._exit(1)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by what we start
                signal.signal(number, signal.SIG_DFL)
            for number in _OF_TERMINALS if session else ():  # ignored by a submitting shell's background job, or nohup
                signal.signal(number, signal.SIG_DFL)
            if stdin is not None:
                os.dup2(stdin, 0)
            if output is not None:
                os.dup2(output, 1)
                os.dup2(output if errors is None else errors, 2)
            for fd in keep:
                os.set_inheritable(fd, True)
            if umask is not None:
                os.umask(umask)
            if cwd is not None:
                os.chdir(cwd)
            release_signals()
            os.execvpe(argv[0], list(argv), dict(env))
        except OSError as error:
            os.write(failed, f"{error.errno or 0} {error.strerror}".encode())
        except BaseException as error:
            os.write(failed, f"0 {error!r}".encode())
        finally:
            os._exit(127)
    os.close(failed)
    with os.fdopen(report, "rb") as pipe:
        problem = pipe.read().decode()
    if problem:
        os.waitpid(pid, 0)
        digits, _, text = problem.partition(" ")
        what = cwd if cwd is not None and not os.path.isdir(cwd) else argv[0]
        if int(digits) == errno.ENOENT and what == argv[0] and os.path.exists(what):
            text = "its interpreter (first line) does not exist"
        raise LaunchFailure(f"cannot start {what}: {text}")
    return pid


def background(work: Callable[[], None], output: int | None = None) -> int:
    """Run *work* in a forked child of its own session, so that the caller's loop goes on; returns the pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    load_libc()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            release_signals()
            if output is not None:
                os.dup2(output, 1)
                os.dup2(output, 2)
            work()
            status = 0
        except BaseException as error:
            log_stderr(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return pid


def decode_wait_status(status: int) -> tuple[int | None, str | None]:
    """Return ``(exit code, None)`` or ``(None, "SIGKILL")`` of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return None, signal.Signals(number).name
        except ValueError:
            return None, f"SIG{number}"  # a real-time signal
    return os.WEXITSTATUS(status), None


def shell_exit_status(code: int | None, name: str | None) -> int:
    """Return one number for both kinds of end, as shells count: 128 + n for signal n."""
    if name is None:
        return code or 0
    number = getattr(signal, name, None)
    return 128 + int(number if number is not None else name[3:])


def describe_exit(code: int | None, name: str | None) -> str:
    """Return ``exited with 1`` or ``was killed by SIGKILL``."""
    return f"was killed by {name}" if name else f"exited with {code}"


def agent_argv(runtime_tree: str) -> list[str]:
    """Return the command line that runs the agent of *runtime_tree*: as a package, which is read from byte code."""
    return [sys.executable, "-I", "-S", runtime_tree]


def detach(path: str) -> None:
    """Let go of the caller's terminal and pipes; what is printed from now on goes to the log at *path*."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


KILL_S = 10.0  # what has not ended by then does not


def kill_descendants(marker: str, spare: Iterable[int] = ()) -> None:
    """Kill everything below this process until nothing is left, but for the children in *spare* and other attempts
    than *marker*.

    As a child subreaper this process also inherits what its children had put into the background. Reaps what it
    kills; call it when no exit status matters any more.
    """
    spared = set(spare)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # the usual case, found without looking at every process of the machine
        left = [pid for pid in children() if pid not in spared and not runs_another(pid, marker)]
        if not left:
            return
        for pid in left:
            for below in (pid, *descendants(pid, lambda other: runs_another(other, marker))):
                signal_process(below, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def _is_abandoned(name: str) -> bool:
    """Return True for a file that was just being written (`write_json`, `create_json`) by a process that is gone.

    Those that live are agents of the next attempt, which note the end of this one.
    """
    parts = name.rsplit(".", 3)
    if len(parts) < 3 or parts[-1] not in ("tmp", "new") or not parts[-2].isdigit():
        return False
    elsewhere = parts[-1] == "new" and not name.endswith(f".{os.uname().nodename}.{parts[-2]}.new")
    return not elsewhere and process_start(int(parts[-2])) is None


def _sessions(path: str) -> list[tuple[int, str]]:
    """Return the sessions that an agent has noted and that still run; the job can have written anything there."""
    noted = read_json(path, NODE_RECORD_BYTES) or {}
    sessions = noted.get("sessions")
    found = [checked(one) for one in (sessions if isinstance(sessions, list) else ()) if isinstance(one, dict)]
    pairs = [(one.get("pid", 0), str(one.get("start"))) for one in found]
    return [(pid, start) for pid, start in pairs if is_running(pid, start, str(noted.get("boot_id")))]


def kill_attempt(attempt_dir: str, node: int | None = None) -> int:
    """Kill what an attempt (or one node of it) has left on this machine when its agent is gone.

    Returns how many processes were found. The sessions come from ``pids.json``; what escaped from them (or started
    before they were noted) is recognised by its environment.
    """
    killed: dict[int, str] = {}
    if node is not None:
        names = [f"node-{node}"]
    else:  # no directory: it was removed under a running attempt
        names = [n for n in os.listdir(attempt_dir) if n.startswith("node-")] if os.path.isdir(attempt_dir) else []
    for name in names:
        for pid, start in _sessions(os.path.join(attempt_dir, name, "pids.json")):
            killed[pid] = start
            signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        marked = [pid for pid in marked_processes(attempt_dir, node) if pid != os.getpid()]
        killed.update((pid, process_start(pid) or "") for pid in marked)
        for pid in marked:
            signal_process(pid, signal.SIGKILL)
        if not any(process_start(pid) == start for pid, start in killed.items()):
            break
        time.sleep(0.01)
    for name in names:
        directory = os.path.join(attempt_dir, name)
        if (read_json(os.path.join(directory, "pids.json"), NODE_RECORD_BYTES) or {}).get("boot_id") == boot_id():
            for unfinished in os.listdir(directory):
                if _is_abandoned(unfinished):
                    remove(os.path.join(directory, unfinished))
    return len(killed)
