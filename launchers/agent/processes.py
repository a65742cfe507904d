"""Child processes: programs and forked work that die with the agent, and how they ended."""

from __future__ import annotations

import errno
import os
import signal
import sys

from orc.launchers.agent.errors import LaunchFailure, log_stderr
from orc.launchers.agent.signals import release_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

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
