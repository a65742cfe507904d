"""The agent: starts, watches and ends the processes of one attempt on one node, and writes down how it went.

Standard library only, Python >= 3.9: it is shipped to the nodes as ``orc_agent.py`` and runs there under any
interpreter, with nothing installed. What only some attempts need lies beside it (`beside`). What it reads and writes is
docs/explanation/attempt-directory.md; why it is built like this is docs/explanation/agent.md.

One thread, no signal handlers: signals are blocked and taken one by one with ``sigtimedwait``, so a child's end wakes
the loop at once and nothing can interrupt the agent half-way through a record. Slow work (copying the tree, setup)
happens in child processes, so heartbeats never stop.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` costs milliseconds at every start and means nothing at run time
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

FORMAT = 1
EXIT_PREEMPTED = 75
EXIT_HELD = 76
EXIT_LAUNCH = 77
EXIT_TIMEOUT = 124
EXIT_CANCELLED = 143

TAIL_LINES = 40
TAIL_BYTES = 8192
LOOK_S = 0.25  # how often the records of others are looked at
HURRY_S = 0.02  # the same while the nodes of an attempt find each other
FAILURE_GRACE_S = 5.0  # ranks whose peer has crashed hang in a collective; there is nothing to save
EXPLAIN_S = 2.0  # how long a launcher's own failure waits for the node whose rank has failed
CALL_PATIENCE_S = 10.0  # for a launcher that does not notice that a node could not start what it asked for
STARTUP_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 120.0  # where no scheduler stands between: the same program starts them all, one after the other
RESERVE_BYTES = 32768  # kept on disk so that the exit record can be written when the disk is full

# SIGURG too: a scheduler signals every process of a step at once, and this one means nothing to the ranks.
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG, signal.SIGINT)
NEWS = signal.SIGUSR2  # from the link's process: something has come
_WATCHED = (signal.SIGCHLD, *ENDING, signal.SIGHUP, NEWS)
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# What the agent derives for its ranks. Inherited values (a job that starts a job) must never leak through.
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
DERIVED = (
    *_RANK_NAMES,
    *("MASTER_ADDR", "MASTER_PORT", "ORC_JOB_ID", "ORC_JOB_NAME", "ORC_ATTEMPT", "ORC_RESTART", "ORC_MARKER"),
    *("ORC_JOB_DIR", "ORC_ATTEMPT_DIR", "ORC_NODE_RANK", "ORC_NNODES", "ORC_NPROC", "ORC_RDZV_ID"),
    "TORCHELASTIC_RUN_ID",
    "ORC_LOGS_DIR",
    "ORC_TOKEN",  # what the ranks of one incarnation know each other by
    "ORC_GANG",  # the marker of the attempt that a process runs without being one of its ranks
)


users_umask = 0o022


def private() -> None:
    """What the agent writes is for its user alone; the ranks get the user's own umask back."""
    global users_umask
    users_umask = os.umask(0o077)


class Superseded(Exception):
    """A newer run owns the job; the message says which."""


class LaunchFailure(Exception):
    """Setup or start failed; the message is the reason that people read."""


def complain(message: str) -> None:
    """Say it on standard error. That may be a log on a full disk, or closed: no reason for an agent to end."""
    try:
        os.write(2, f"orc agent: {message}\n".encode("utf-8", "replace"))
    except OSError:
        pass  # nobody is left to tell


def beside(name: str) -> Any:
    """The module ``orc_agent_<name>.py`` that is shipped beside this file: most agents need few of them."""
    if __package__:
        import importlib

        return importlib.import_module(f"{__package__}.agent_{name}")
    here = os.path.dirname(os.path.abspath(__file__))
    if here not in sys.path:  # behind the standard library, in front of nothing
        sys.path.append(here)
    sys.modules.setdefault("orc_agent", sys.modules[__name__])  # it may have been started as a script
    return __import__(f"{os.path.basename(__file__)[: -len('.py')]}_{name}")


# --- records -------------------------------------------------------------------------------------------------------


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in *path*; `None` when there is no such file (or, on a crashed disk, no object in it)."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot sync a directory
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_json(path: str, data: Mapping[str, Any], *, durable: bool = True, mode: int = 0o600) -> None:
    """Write *data* so that readers see all of it or none; *durable* also survives a power cut."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False)
            file.write("\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    if durable:
        _sync_directory(os.path.dirname(path))


def refresh_json(path: str, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """`write_json` for a record that is written again and again: on a full disk it goes where the last one was."""
    try:
        write_json(path, data, durable=durable)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not os.path.exists(path):
            raise
        content = json.dumps(data, ensure_ascii=False).encode()
        with open(path, "r+b", buffering=0) as file:
            file.write(content + b" " * (os.fstat(file.fileno()).st_size - len(content) - 1) + b"\n")


def create_json(path: str, data: Mapping[str, Any]) -> bool:
    """Like `write_json`, but exactly one of all creators gets True; link(2) is atomic on network file systems too."""
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.new"
    write_json(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        remove(temporary)
    _sync_directory(os.path.dirname(path))
    return True


def remove(path: str) -> None:
    """Unlink *path* if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def log_tail(path: str, start: int = 0, secrets: Sequence[str] = ()) -> str:
    """The last lines of a log from byte *start* on, without the values of *secrets*: 40 lines and 8 KiB at most."""
    masking = beside("masking") if secrets else None
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(start, size - TAIL_BYTES)
            # A value that begins before the tail and reaches into it is masked, too.
            reach = min(begin - start, masking.longest(secrets)) if masking else 0
            file.seek(begin - reach)
            before, data = file.read(reach).decode("utf-8", "replace"), file.read(TAIL_BYTES)
    except OSError:
        return ""
    text = data.decode("utf-8", "replace")
    if masking:
        text = masking.masked(before + text, secrets, len(before))
    lines = text.splitlines()
    if begin > start and len(lines) > 1:
        lines = lines[1:]  # the first one is cut
    return "\n".join(lines[-TAIL_LINES:])


# --- processes -----------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


_libc: Any = None


def load_libc() -> Any:
    """The C library, loaded once."""
    global _libc
    if _libc is None:
        import ctypes

        _libc = ctypes.CDLL(None)
    return _libc


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    load_libc().prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """From now on this process inherits what its descendants leave behind, instead of init."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def boot_id() -> str:
    """Changes with every boot of the machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Field 22 of ``/proc/<pid>/stat``; `None` when there is no such process, or only its zombie."""
    stat = process_stat(pid)
    return stat[19] if stat and stat[0] not in ("Z", "X") else None


def process_stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` behind the name, state first; `None` when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may hold spaces and parentheses
    except OSError:
        return None


def is_running(pid: int, start: str, boot: str) -> bool:
    """Whether that very process still runs on this machine (not a later one with the same number)."""
    return bool(pid) and boot == boot_id() and process_start(pid) == start


def identity() -> dict[str, Any]:
    """Who this process is, in the words of a lease."""
    try:
        network, processes = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
    except OSError:
        network = processes = ""
    pid = os.getpid()
    return {
        "host": os.uname().nodename,
        "pid": pid,
        "pid_start": process_start(pid) or "",
        "boot_id": boot_id(),
        "net": network,
        "pid_ns": processes,
        "at": time.time(),
    }


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def runs_another(pid: int, marker: str) -> bool:
    """Whether the process runs another attempt than *marker*: a job that one of our ranks has submitted outlives us."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return any(word.startswith(b"ORC_GANG=") and word != os.fsencode(f"ORC_GANG={marker}") for word in environ)


def descendants(root: int, spare: Callable[[int], bool] = lambda pid: False) -> list[int]:
    """All living processes below *root*, but for those that are to be spared and what is below them."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = process_stat(pid)
        if stat and stat[0] not in ("Z", "X"):
            children.setdefault(int(stat[1]), []).append(pid)
    found: list[int] = []
    front = [root]
    while front:
        below = [child for pid in front for child in children.get(pid, ()) if not spare(child)]
        found += below
        front = below
    return found


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


def children() -> list[int]:
    """The direct children of this process, ended but not yet reaped ones included."""
    me = str(os.getpid())
    return [pid for pid in _pids() if (stat := process_stat(pid)) is not None and stat[1] == me]


def kill_descendants(marker: str, timeout_s: float = 10.0, spare: Iterable[int] = ()) -> None:
    """SIGKILL everything below this process until nothing is left, but for the children in *spare* and other attempts
    than *marker*.

    As a child subreaper this process also inherits what its children had put into the background. Reaps what it
    kills; call it when no exit status matters any more.
    """
    spared = set(spare)
    deadline = time.monotonic() + timeout_s
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


def marked_processes(attempt_dir: str, node: int | None = None) -> list[int]:
    """Processes of this user on this machine whose environment says that they belong to the attempt (and node)."""
    wanted = {os.fsencode(f"ORC_ATTEMPT_DIR={attempt_dir}")}
    if node is not None:
        wanted.add(os.fsencode(f"ORC_NODE_RANK={node}"))
    found = []
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted.issubset(file.read().split(b"\0")) and process_start(pid):
                    found.append(pid)
        except OSError:
            continue
    return found


def kill_attempt(attempt_dir: str, node: int | None = None, timeout_s: float = 10.0) -> int:
    """SIGKILL what an attempt (or one node of it) has left on this machine when its agent is gone.

    Returns how many processes were found. The sessions come from ``pids.json``; what escaped from them (or started
    before they were noted) is recognised by its environment.
    """
    killed: dict[int, str] = {}
    if node is not None:
        names = [f"node-{node}"]
    else:  # no directory: somebody has removed it under a running attempt
        names = [n for n in os.listdir(attempt_dir) if n.startswith("node-")] if os.path.isdir(attempt_dir) else []
    for name in names:
        noted = read_json(os.path.join(attempt_dir, name, "pids.json")) or {}
        for session in noted.get("sessions", ()):
            if is_running(session["pid"], session["start"], noted.get("boot_id", "")):
                killed[session["pid"]] = session["start"]
                signal_group(session["pid"], signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
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
        if (read_json(os.path.join(directory, "pids.json")) or {}).get("boot_id") == boot_id():
            for unfinished in os.listdir(directory):
                if unfinished.endswith((".tmp", ".new")):  # what was just being written
                    remove(os.path.join(directory, unfinished))
    return len(killed)


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
            complain(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return pid


def exit_of(status: int) -> tuple[int | None, str | None]:
    """``(exit code, None)`` or ``(None, "SIGKILL")`` of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return None, signal.Signals(number).name
        except ValueError:
            return None, f"SIG{number}"  # a real-time signal
    return os.WEXITSTATUS(status), None


def shell_status(code: int | None, name: str | None) -> int:
    """One number for both kinds of end, as shells count: 128 + n for signal n."""
    if name is None:
        return code or 0
    number = getattr(signal, name, None)
    return 128 + int(number if number is not None else name[3:])


def how_it_ended(code: int | None, name: str | None) -> str:
    """``exited with 1`` or ``was killed by SIGKILL``."""
    return f"was killed by {name}" if name else f"exited with {code}"


# --- what the ranks see --------------------------------------------------------------------------------------------


def prepend_path(env: dict[str, str], directory: str) -> None:
    """Put *directory* in front of PYTHONPATH, keeping what is there."""
    before = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{directory}{os.pathsep}{before}" if before else directory


def rank_variables(
    rank: int, local_rank: int, node: int, nnodes: int, nproc: int, addr: str, port: int
) -> dict[str, str]:
    """What ``torch.distributed`` (``init_method="env://"``) and its kin read."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "MASTER_ADDR": addr,
        "MASTER_PORT": str(port),
    }


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` for the known names only; every other brace stays as it is."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def make_work(tree: str, work: str) -> None:
    """Make the job's working copy of its snapshot, all at once under its final name. Kept if it is there."""
    if os.path.isdir(work):
        return
    import shutil
    import stat

    temporary = f"{work}.{os.uname().nodename}.{os.getpid()}.tmp"
    try:
        shutil.copytree(tree, temporary, symlinks=True)
        for directory, _, names in os.walk(temporary):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                mode = os.lstat(path).st_mode
                if not stat.S_ISLNK(mode):  # the snapshot is read-only, the working copy is not
                    os.chmod(path, stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o600))
        try:
            os.rename(temporary, work)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            shutil.rmtree(temporary)  # somebody else was faster, with the same content
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# --- one node ------------------------------------------------------------------------------------------------------


class Stop:
    """Why the ranks are being ended before they ended by themselves."""

    def __init__(
        self,
        outcome: str,
        reason: str,
        grace_s: float,
        *,
        forward: bool = True,
        failure: dict[str, Any] | None = None,
        exit_status: int = 1,
        lost: bool = False,
        lost_node: int | None = None,
        announced: bool = False,
    ) -> None:
        self.outcome = outcome
        self.reason = reason
        self.grace_s = grace_s
        self.forward = forward  # send SIGTERM at once; a rank that left with 75 shows that the others are leaving too
        self.failure = failure
        self.exit_status = exit_status
        self.lost = lost
        self.lost_node = lost_node  # which one, where that is known
        self.announced = announced  # learned from another node, so it need not be told


class Rank:
    """One rank (or one launcher) that this agent has started."""

    def __init__(self, rank: int | None, local_rank: int | None, pid: int, log: str, log_start: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.log = log
        self.log_start = log_start
        self.status: int | None = None
        self.at = 0.0


class Node:
    """One node's part in one incarnation (restart) of an attempt."""

    def __init__(
        self,
        config: dict[str, Any],
        node: int,
        owner: str,
        restart: int = 0,
        *,
        master_host: str | None = None,
        gang_pid: int | None = None,
    ) -> None:
        self.config = config
        self.gang_pid = gang_pid
        self.node = node
        self.owner = owner
        self.restart = restart
        self.master_host = master_host
        self.nnodes = int(config["nnodes"])
        self.nproc = int(config["nproc"])
        self.attempt_dir = str(config["attempt_dir"])
        self.work = str(config.get("work_dir") or os.path.join(config["job_dir"], "work"))
        self.logs = str(config.get("logs_dir") or os.path.join(self.attempt_dir, "logs"))
        self.private = str(config.get("private_dir") or self.attempt_dir)
        self.dir = os.path.join(self.attempt_dir, f"node-{node}")
        self.heartbeat_s = float(config.get("heartbeat_s") or 2.0)
        self.peer_timeout_s = float(config.get("peer_timeout_s") or 30.0)
        # A cut that heals in time must not look longer than it was.
        self.heartbeat_s = min(self.heartbeat_s, self.peer_timeout_s / 6)
        self.grace_s = float(config.get("grace_s") or 0.0)
        self.preempt_exit = int(config.get("preempt_exit") or EXIT_PREEMPTED)
        self.python = config.get("python") or sys.executable
        self.prepared: dict[str, Any] = {}  # what the environment step says: python, path, env, prefix
        self.me = identity()
        self.started_at = time.time()
        self.begun = time.monotonic()
        self.state = "setup"
        self.stop: Stop | None = None
        self.kill_at = float("inf")  # monotonic; when the grace period is over
        self.secrets: dict[str, str] = {}
        self.sessions: dict[int, str] = {}  # pid -> start time, every session leader that is not reaped
        self.ended: dict[int, int] = {}  # pid -> wait status
        self.ranks: list[Rank] = []
        self.port: Any = None
        command = config["command"]
        self.shims = command["spawn"] == "launcher"  # the ranks are a launcher's, each below a shim
        self.first_alone = self.shims and command.get("where") == "first" and self.nnodes > 1
        self.calls: Any = None  # what other nodes ask of this one, where the first node alone has the launcher
        self.ownership: Any = None  # against other runs of the same job
        self.superseded = False  # a newer one owns the job: nothing more is written where that writes too
        self.linked = bool(config.get("link")) and self.nnodes > 1
        self.link: Any = None  # to the other hosts, where they share no file system
        self.slots: Any = None  # what this node holds of its host
        self.own_env: dict[str, str] = {}  # variables of this node alone
        self.token = ""  # of the ranks of this incarnation
        self.fence: tuple[str, str] | None = None  # interface and address that the ranks are held to
        self.min_nodes = int(config.get("min_nodes") or self.nnodes)
        self.lost: set[int] = set()  # nodes that the gang goes on without
        self.stacks: Any = None  # what this node has been asked for
        self.stalled = False  # a rank has reported a stall
        self.unexplained: tuple[Rank, float] | None = None  # a failed launcher, until (monotonic) another node says why
        self.watch = [0] if node else list(range(1, self.nnodes))
        self.seen: dict[int, tuple[object, float]] = {}  # peer -> (its last heartbeat, when it was new, monotonic)
        self.next_beat = self.next_look = self.last_look = 0.0
        self.log_fd = -1

    # the whole life

    def run(self) -> int:
        """Do this node's part; returns the agent's exit status."""
        for directory in (self.logs, self.dir):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        if self.succeeded_before():
            return 0
        if not self.take_lease():
            return EXIT_HELD
        if self.node == 0 and self.config.get("nnodes_from"):
            write_json(os.path.join(self.attempt_dir, "agent.json"), self.config)  # with the real number of nodes
        return self.work_through()

    def work_through(self) -> int:
        """The rest, once the lease is held."""
        take_signals()
        become_subreaper()
        log = os.path.join(self.logs, f"node-{self.node}.log")
        self.log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.ownership = beside("fence").Fence(self)
        try:
            return self.work_alone()
        except Superseded as newer:
            return self.give_way(str(newer))

    def work_alone(self) -> int:
        """The rest, for as long as no newer run owns the job."""
        try:
            self.ownership.claim()
            self.reserve()
            self.note_pids()
            if self.linked:
                self.link = self.link or beside("link").Link(self)
                self.link.start()
            ending = self.live()
        except LaunchFailure as error:
            ending = self.ending("launch", str(error), EXIT_LAUNCH)
        except Superseded:
            raise
        except Exception as error:  # whatever happens, the ranks are ended and the record is written
            import traceback

            self.log("the agent failed:\n" + traceback.format_exc())
            ending = self.ending("launch", f"the agent failed: {type(error).__name__}: {error}", EXIT_LAUNCH)
        if ending["outcome"] == "launch":
            self.announce(Stop("launch", ending["reason"], 0.0, exit_status=EXIT_LAUNCH))
        self.kill_sessions()
        self.end_containers()
        self.ownership.lower()
        self.record(ending)
        kill_descendants(self.config["marker"], spare=[self.link.pid] if self.link else [])
        self.clean_up(ending)
        if self.link:
            self.link.settle(others_go_on=ending["outcome"] == "succeeded")
            self.link.close()
        elif ending["exit_status"] and not (self.stop and self.stop.lost):
            self.await_peers()
        return int(ending["exit_status"])

    def give_way(self, reason: str) -> int:
        """A newer run owns the job: end the ranks at once, without grace, because they would save."""
        self.superseded = True
        self.kill_sessions()
        self.ownership.lower()
        kill_descendants(self.config["marker"])
        self.end_containers()
        complain(f"{reason}; ended node {self.node} of {self.config['marker']}")
        stop = Stop("node_failure", f"{reason} (node failure; {self.me['host']})", 0.0, lost=True, lost_node=self.node)
        self.record(self.verdict(stop), self.exit_name())
        for held in filter(None, (self.port, self.slots, self.link)):
            held.close()
        # Not a failure: srun would have Slurm end the step of that number, which is by now that of the newer run.
        return 0

    def exit_name(self) -> str:
        """The name of this run's exit record: not that of the attempt any more when a later restart has the lease."""
        lease = read_json(os.path.join(self.dir, "lease.json")) or {}
        own = (lease.get("owner"), lease.get("restart"), lease.get("pid")) == (self.owner, self.restart, self.me["pid"])
        return "exit.json" if own else f"exit-r{self.restart}.json"

    def end_containers(self) -> None:
        """What a container runtime runs for this node is not below this process: it has to be told to end it."""
        if not self.prepared.get("container"):
            return
        script = os.path.join(self.config["runtime_tree"], "orc_environment.py")
        argv = [
            sys.executable,
            "-I",
            "-S",
            script,
            "clean",
            os.path.join(self.attempt_dir, "agent.json"),
            str(self.node),
        ]
        try:
            pid = spawn(argv, os.environ, output=self.log_fd)
        except LaunchFailure as error:
            self.log(str(error))
            return
        deadline = time.monotonic() + 30.0
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            if time.monotonic() >= self.next_beat:
                self.beat(self.state)
            time.sleep(HURRY_S)

    def await_peers(self) -> None:
        """Stay until the other nodes have recorded too, or had their grace.

        A scheduler that sees this agent fail kills the others within seconds, in the middle of saving.
        """
        deadline = time.monotonic() + (self.stop.grace_s if self.stop else self.grace_s) + 5.0
        while time.monotonic() < deadline and os.path.isdir(self.dir):
            if all(self.peer_record(node, "exit.json") for node in range(self.nnodes) if node not in self.lost):
                return
            time.sleep(HURRY_S)

    def live(self) -> dict[str, Any]:
        """From the lease to the end of the last rank."""
        self.beat("setup")
        try:
            self.load_secrets()
            cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
            if cancel is not None:  # it came before the start did
                self.on_cancel(cancel)
            if self.stop is None and self.be_alone() and self.prepare() and (where := self.meet()):
                self.start_ranks(*where)
        except LaunchFailure:
            self.stop_ranks_now()
            raise
        self.beat("running" if self.ranks or self.calls else "stopping")
        return self.supervise()

    def be_alone(self) -> bool:
        """Wait until no earlier run of the job has ranks any more; False when a stop came first."""
        if not self.ownership.alone():
            before = self.ownership.predecessors()
            hosts = ", ".join(sorted({str(lease.get("host")) for _, _, lease in before}))
            limit = f"it ends itself within {self.ownership.wait_s:g} s"
            self.log(f"an earlier run of this job on {hosts} has not ended; {limit}")
            if not self.until(self.ownership.alone):
                return False
        self.ownership.settle()
        self.ownership.raise_guard()
        return True

    def succeeded_before(self) -> bool:
        """Did an earlier restart of this attempt end well on every node?

        A scheduler that lost its memory (a killed Slurm controller) may requeue a job that has succeeded. The records
        stay as they are, so every agent of this restart sees the same.
        """
        if not self.restart:
            return False
        paths = [os.path.join(self.attempt_dir, f"node-{node}", "exit.json") for node in range(self.nnodes)]
        records = [read_json(path) for path in paths]
        return all(
            record is not None
            and record.get("owner") == self.owner
            and record.get("outcome") == "succeeded"
            and int(record.get("restart", 0)) < self.restart
            for record in records
        )

    def take_lease(self) -> bool:
        """Exactly one copy of this node's agent gets past this line."""
        path = os.path.join(self.dir, "lease.json")
        lease = {"owner": self.owner, "restart": self.restart, "marker": self.config["marker"], **self.me}
        if create_json(path, lease):
            return True
        held = read_json(path) or {}
        later = held.get("owner") == self.owner and int(held.get("restart", 0)) < self.restart
        # Of several copies of the same restart one wins this link; then the lease is its own to replace.
        if later and create_json(os.path.join(self.dir, f"lease-r{self.restart}.json"), lease):
            # Who comes later still has to know whom this one has replaced.
            create_json(os.path.join(self.dir, f"lease-r{int(held.get('restart', 0))}.json"), held)
            before = os.path.join(self.dir, "exit.json")
            if os.path.exists(before):
                os.rename(before, os.path.join(self.dir, f"exit-r{int(held.get('restart', 0))}.json"))
            write_json(path, lease)
            return True
        complain(
            f"node {self.node} of {self.config['marker']} is held by {held.get('owner')} "
            f"(pid {held.get('pid')} on {held.get('host')}); nothing was started"
        )
        return False

    # the loop

    def tick(self) -> None:
        """Wait for the next thing that happens, and take note of it."""
        now = time.monotonic()
        received = next_signal(min(self.next_beat, self.next_look) - now)
        if self.ownership and self.ownership.slept:  # who else runs comes before everything that has happened meanwhile
            self.beat(self.state)
        if received is not None:
            if received.si_signo in ENDING:
                self.on_signal(signal.Signals(received.si_signo))
            if received.si_signo == NEWS:  # however many there are, no more than some looks in a second
                self.next_look = min(self.next_look, self.last_look + HURRY_S)
            self.reap(received.si_pid if received.si_signo == signal.SIGCHLD else 0)
        now = time.monotonic()
        if self.calls:
            self.calls.look()
            self.next_look = min(self.next_look, now + self.calls.pace())
        if now >= self.next_beat:
            self.beat(self.state)
        if now >= self.next_look:
            self.look(now)

    def until(self, done: Callable[[], bool]) -> bool:
        """Tick until *done*; False when a stop came first or with it (the last rank may be the one that failed)."""
        while self.stop is None and not done():
            self.tick()
        return self.stop is None

    def reap(self, first: int = 0) -> None:
        """Collect the children that have ended, the one that was *first* before the others."""
        for pid, status in ended_children(first):
            if self.sessions.pop(pid, None) is not None:
                self.ended[pid] = status
            if self.link and pid == self.link.pid:
                self.link.on_end()
            if self.ownership:
                self.ownership.on_end(pid)
            for rank in self.ranks:
                if rank.pid == pid:
                    rank.status, rank.at = status, time.time()
                    self.on_rank_end(rank)

    def on_signal(self, number: signal.Signals) -> None:
        """The platform, or a person, wants this node's part to end."""
        if self.stop:
            return
        cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
        # A scheduler that sees one node's agent fail ends the others: their reason is that node's.
        told = read_json(os.path.join(self.attempt_dir, f"stop-r{self.restart}.json"))
        if cancel is not None:
            self.on_cancel(cancel)
        elif told is not None:
            self.on_told(told)
        elif number == signal.SIGINT:
            self.request(Stop("cancelled", "interrupted", self.grace_s, exit_status=EXIT_CANCELLED))
        else:
            self.request(Stop("preempted", f"preempted ({number.name})", self.grace_s, exit_status=EXIT_PREEMPTED))

    def on_cancel(self, cancel: dict[str, Any]) -> None:
        """``cancel.json`` is there."""
        grace = cancel.get("grace_s")
        reason = str(cancel.get("reason") or "cancelled")
        self.request(
            Stop(
                "cancelled",
                reason,
                self.grace_s if grace is None else float(grace),
                exit_status=EXIT_CANCELLED,
                announced=True,  # by the file itself
            )
        )

    def on_rank_end(self, rank: Rank) -> None:
        """A rank (or the launcher) has ended: was that the end of the attempt?"""
        code, name = exit_of(rank.status or 0)
        if self.stop:
            return
        if code == 0 and name is None:
            if rank.rank is None:
                self.ask_shims()
            return
        if name == "SIGTERM":
            # Schedulers signal every process at once. If our own SIGTERM is on its way, that is what happened.
            deadline = time.monotonic() + 0.5
            while (late := next_signal(deadline - time.monotonic())) is not None:
                if late.si_signo in ENDING:
                    self.on_signal(signal.Signals(late.si_signo))
                    break
            if self.stop:
                return
        if code == self.preempt_exit and rank.rank is not None:
            reason = f"rank {rank.rank} asked to be run again (exit code {code})"
            self.request(Stop("preempted", reason, self.grace_s, forward=False, exit_status=EXIT_PREEMPTED))
            return
        if rank.rank is None and self.launcher_preempted():
            return
        if self.first_alone and self.first_of_launcher() is None:
            self.unexplained = (rank, time.monotonic() + EXPLAIN_S)
        else:
            self.on_failure(self.failure_of(rank))

    def ask_shims(self) -> None:
        """The launcher says that all is well. Some say so although a rank has failed: the ranks' own records count."""
        first = self.first_of_launcher()
        if first is not None and not self.started_again(first) and not self.launcher_preempted():
            self.on_failure(self.failure_of(None))

    def started_again(self, failure: dict[str, Any]) -> bool:
        """Whether the launcher has started ranks after that failure."""
        running = self.shim_records(running=True).values()
        # A launcher that re-forms its gang without the ranks of a lost node stays in its round. With the others, a rank
        # that began later is one that was slow to start.
        stays = self.min_nodes < self.nnodes
        return any(r["round"] > failure["round"] or (stays and r.get("began", 0.0) > failure["at"]) for r in running)

    def on_failure(self, failure: dict[str, Any]) -> None:
        """Stop the others because of this first failure."""
        who = f"rank {failure['rank']}" if failure["rank"] is not None else "the launcher"
        reason = f"{who} {how_it_ended(failure['exit_code'], failure['signal'])}"
        if failure["stall"]:
            self.look_for_stacks()  # before the others are told to end
            reason += f"; {failure['stall']}"
        status = shell_status(failure["exit_code"], failure["signal"]) or 1
        grace = min(self.grace_s, FAILURE_GRACE_S)
        self.request(Stop("crash", reason, grace, failure=failure, exit_status=status))

    def launcher_preempted(self) -> bool:
        """Whether a rank of the launcher has left with the exit code of a preemption; then a stop is requested."""
        records = [r for r in self.shim_records().values() if r["exit_code"] == self.preempt_exit]
        if not records:
            return False
        first = min(records, key=lambda r: r["at"])
        reason = f"rank {first['rank']} asked to be run again (exit code {self.preempt_exit})"
        self.request(Stop("preempted", reason, self.grace_s, forward=False, exit_status=EXIT_PREEMPTED))
        return True

    def request(self, stop: Stop) -> None:
        """Begin to stop; the first reason counts."""
        if self.stop is None:
            self.stop = stop
            self.log(f"stopping: {stop.reason}")
            if not stop.announced:
                self.announce(stop)

    def announce(self, stop: Stop) -> None:
        """Tell the other nodes, and keep the first failure safe should this agent not live to write its record."""
        path = os.path.join(self.attempt_dir, f"stop-r{self.restart}.json")
        try:
            create_json(
                path,
                {
                    "node": self.node,
                    "host": self.me["host"],
                    "outcome": stop.outcome,
                    "reason": stop.reason,
                    "forward": stop.forward,
                    "grace_s": stop.grace_s,
                    "exit_status": stop.exit_status,
                    "first_failure": stop.failure,
                    "lost_node": stop.lost_node,
                    "at": time.time(),
                },
            )
        except OSError as error:
            self.log(f"cannot write {path}: {error}")
            remove(os.path.join(self.dir, ".reserve"))  # the exit record can do with less
        self.pass_on()

    def look(self, now: float) -> None:
        """See what others have written: a cancellation, a stop, silence."""
        asleep = now - self.last_look if self.last_look else 0.0
        slept = asleep > 5.0  # this process itself was stopped for a while
        self.last_look = now
        # The link tells when something comes; files that hosts share do not.
        hurry = self.state == "waiting" and now - self.begun < 10 and not self.link
        self.next_look = now + (HURRY_S if hurry else LOOK_S)
        deadline = self.config.get("deadline_s")
        if self.stop is None and deadline is not None and now - self.begun >= float(deadline):
            stall = self.stall()
            reason = f"time limit of {float(deadline):g} s reached" + (f"; {stall}" if stall else "")
            self.request(Stop("timeout", reason, self.grace_s, exit_status=EXIT_TIMEOUT))
        cancel = read_json(os.path.join(self.attempt_dir, "cancel.json"))
        if cancel is not None and self.stop is None:
            self.on_cancel(cancel)
        elif cancel is not None:  # a later cancellation can only make it shorter
            self.kill_at = min(self.kill_at, now + float(cancel.get("grace_s") or 0.0))
        self.look_for_stacks()
        self.look_at_launcher()
        if self.nnodes == 1 or self.stop:
            return
        told = read_json(os.path.join(self.attempt_dir, f"stop-r{self.restart}.json"))
        if told is not None:
            self.on_told(told)
            return
        if self.unexplained and now > self.unexplained[1]:
            self.on_failure(self.failure_of(self.unexplained[0]))
            return
        if self.link and asleep > self.peer_timeout_s:  # nobody counts on this node any more
            reason = f"node {self.node} was stopped for {asleep:.0f} s (node failure; {self.me['host']})"
            self.request(Stop("node_failure", reason, 0.0, lost=True, lost_node=self.node, announced=True))
            return
        gone = self.link.gone() if self.link else {}
        for peer in list(self.watch):
            over = self.peer_record(peer, "exit.json")
            # Node 0 stays until all have ended: whoever does not hear of it is cut off, and counted as lost.
            needed = over is None or (self.link is not None and peer == 0)
            if over is not None and over.get("peer_lost") and self.do_without(peer, "it was cut off"):
                continue
            if over is not None and over.get("exit_status"):  # its disk had no room for more
                self.on_told({"grace_s": min(self.grace_s, FAILURE_GRACE_S), **over})
                return
            if needed and str(peer) in gone:
                if self.do_without(peer, gone[str(peer)]):
                    continue
                self.on_silence(peer, f"node {peer} is lost: {gone[str(peer)]}")
                return
            beat = self.peer_record(peer, "heartbeat.json")
            if beat is None:
                continue
            last = self.seen.get(peer)
            if last is None or last[0] != beat.get("at") or slept:
                self.seen[peer] = (beat.get("at"), now)
            elif now - last[1] > self.peer_timeout_s and needed:
                how = f"has been silent for {self.peer_timeout_s:g} s"
                if not self.do_without(peer, how):
                    self.on_silence(peer, f"node {peer} {how}")
                    return

    def do_without(self, peer: int, how: str) -> bool:
        """Go on without a lost *peer*, where the launcher re-forms its gang (and does not live on that node)."""
        left = self.nnodes - len(self.lost) - 1
        if not self.ranks or self.node or left < self.min_nodes:
            return False
        path = os.path.join(self.attempt_dir, f"node-{peer}", "lost.json")
        try:
            write_json(path, {"reason": how, "at": time.time()})
        except OSError as error:  # what it says would still count
            self.log(f"cannot write {path}: {error}")
            return False
        self.log(f"node {peer} is lost ({how}); going on with {left} nodes, {self.min_nodes} are enough")
        self.lost.add(peer)
        self.watch.remove(peer)
        # They wait for the lost ranks, for as long as their process group does. When these are gone, their launcher
        # starts them anew, and those of the other nodes see that it wants to meet.
        for record in self.shim_records(running=True).values():
            program = record.get("program") or {}
            if program and process_start(program["pid"]) == program["start"]:
                signal_process(program["pid"], signal.SIGKILL)
        return True

    def look_for_stacks(self) -> None:
        """Has somebody asked for the stacks of the ranks? A rank that stalls asks for those of all."""
        if not self.stalled and self.state == "running" and self.stall():
            self.stalled = True
            try:
                beside("stacks").ask(self.attempt_dir, f"stall-r{self.restart}")
            except OSError as error:  # a full disk
                self.log(f"cannot ask for stacks: {error}")
        if self.stacks is None and os.path.isdir(os.path.join(self.attempt_dir, "stacks")):
            self.stacks = beside("stacks").Requests(self)
        if self.stacks is not None:
            self.stacks.look()

    def look_at_launcher(self) -> None:
        """Cut short a launcher that waits for ranks which hang because another one has failed."""
        if self.stop or self.unexplained or not (self.calls or any(rank.rank is None for rank in self.ranks)):
            return
        first = self.first_of_launcher()
        if first is not None and self.calls and not first["told"]:  # such launchers do not start ranks again
            if not self.launcher_preempted():
                self.on_failure(self.failure_of(None))
            return
        if self.calls and (failure := self.calls.failure(CALL_PATIENCE_S)):
            reason = (
                f"node {self.node} could not start what the launcher asked for (exit status {failure['exit_code']})"
            )
            self.request(Stop("crash", reason, 0.0, failure=failure, exit_status=failure["exit_code"]))
            return
        settle = float(self.config["command"].get("settle_s") or FAILURE_GRACE_S)
        if first is None or time.time() - first["at"] < settle:
            return
        if not self.started_again(first) and not self.launcher_preempted():
            self.on_failure(self.failure_of(None))

    def on_silence(self, peer: int, reason: str) -> None:
        """Stop because a peer is lost."""
        lease = read_json(os.path.join(self.attempt_dir, f"node-{peer}", "lease.json")) or {}
        reason += f" (node failure; {lease['host']})" if lease.get("host") else " (node failure)"
        stop = Stop(
            "node_failure",
            reason,
            min(self.grace_s, FAILURE_GRACE_S),
            exit_status=1,
            lost=True,
            lost_node=peer,
            announced=bool(self.node) and self.min_nodes < self.nnodes,  # the others may go on without this one
        )
        self.request(stop)

    def on_told(self, told: dict[str, Any]) -> None:
        """Stop because another node says so."""
        outcome = str(told.get("outcome"))
        if self.calls and outcome == "crash" and (first := self.first_of_launcher()) and not first["told"]:
            self.on_failure(self.failure_of(None))  # the launcher's node saw no more than that it ended
            return
        reason = f"node {told.get('node')} ({told.get('host')}): {told.get('reason')}"
        own = outcome in ("preempted", "cancelled", "timeout")
        self.request(
            Stop(
                outcome if own else "peer",
                str(told.get("reason")) if own else f"stopped because of {reason}",
                float(told.get("grace_s") or 0.0),
                forward=bool(told.get("forward", True)),
                exit_status=int(told.get("exit_status") or 1),
                lost=outcome == "node_failure",
                lost_node=told.get("lost_node"),
                announced=True,
            )
        )

    def peer_record(self, peer: int, name: str) -> dict[str, Any] | None:
        """A record of the peer's current incarnation."""
        record = read_json(os.path.join(self.attempt_dir, f"node-{peer}", name))
        return record if record is not None and int(record.get("restart", 0)) == self.restart else None

    # the way to running ranks

    def load_secrets(self) -> None:
        """Read the values of the job's secrets; they live in memory and in the ranks' environment only."""
        names = list(self.config.get("secrets") or ())
        if not names:
            return
        path = os.path.join(self.private, "secrets.json")
        values = read_json(path)
        if values is None:
            raise LaunchFailure(f"the job's secrets are gone: {path} cannot be read")
        missing = [name for name in names if name not in values]
        if missing:
            raise LaunchFailure(f"no value for the secret {', '.join(missing)} in {path}")
        self.secrets = {name: str(values[name]) for name in names}
        if not self.config.get("core_dumps"):  # this process and all that it starts have the values in their memory
            import resource

            # One byte is less than any core file; unlike 0 it also keeps the kernel from starting a program for it.
            # A limit of 0 that is set already cannot be raised.
            limit = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
            resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))

    def prepare(self) -> bool:
        """The working copy, then the setup lines; False when a stop came in between."""
        if (self.node == 0 or self.linked) and not os.path.isdir(self.work):
            status = self.step(background(lambda: make_work(self.config["code_tree"], self.work), self.log_fd))
            if status and self.stop is None:
                raise LaunchFailure(f"cannot copy the snapshot to {self.work}: {self.last_words()}")
        elif self.node and not self.linked and not self.until(lambda: os.path.isdir(self.work) or self.never_came(0)):
            return False
        if self.stop or (self.config.get("environment") and not self.make_environment()):
            return False
        env = self.environment()
        null = os.open(os.devnull, os.O_RDONLY)
        for line in self.config.get("setup") or ():
            self.log(f"setup: {line}")
            began = os.fstat(self.log_fd).st_size
            argv = ["/bin/sh", "-e", "-c", line]
            status = self.step(spawn(argv, env, cwd=self.work, stdin=null, output=self.log_fd, umask=users_umask))
            if self.stop:
                break
            if status:
                tail = log_tail(os.path.join(self.logs, f"node-{self.node}.log"), began, list(self.secrets.values()))
                how = how_it_ended(*exit_of(status))
                raise LaunchFailure(f"setup on node {self.node} failed: `{line}` {how}" + (f"\n{tail}" if tail else ""))
        os.close(null)
        return self.stop is None

    def make_environment(self) -> bool:
        """Have ``orc_environment.py`` make the job's environment here, and take its answer; False when a stop came."""
        config, answer = self.config, os.path.join(self.dir, "environment.json")
        script = os.path.join(config["runtime_tree"], "orc_environment.py")
        argv = [sys.executable, "-I", "-S", script, "prepare", os.path.join(self.attempt_dir, "agent.json"), answer]
        null = os.open(os.devnull, os.O_RDONLY)
        status = self.step(spawn(argv, self.environment(), cwd=self.work, stdin=null, output=self.log_fd))
        os.close(null)
        if self.stop:
            return False
        made = read_json(answer) or {}
        if status or "python" not in made:
            reason = made.get("error") or f"the step {how_it_ended(*exit_of(status))}"
            raise LaunchFailure(f"no environment on node {self.node}: {self.masked(str(reason))}")
        self.prepared, self.python = made, str(made["python"])
        return True

    def step(self, pid: int) -> int:
        """Wait for one child in its own session, ending it when a stop comes; returns its wait status."""
        self.sessions[pid] = process_start(pid) or ""
        self.note_pids()
        if not self.until(lambda: pid in self.ended):
            self.end_processes(lambda: [pid] if pid not in self.ended else [])
        return self.ended.get(pid, 0)

    def last_words(self) -> str:
        """The last line of this node's log."""
        tail = log_tail(os.path.join(self.logs, f"node-{self.node}.log"), 0, list(self.secrets.values()))
        return tail.splitlines()[-1] if tail else "no output"

    def never_came(self, peer: int) -> bool:
        """Whether the start of *peer* has taken too long; then a stop has been requested."""
        limit = float(self.config.get("startup_timeout_s") or (JOIN_TIMEOUT_S if self.linked else STARTUP_TIMEOUT_S))
        if peer not in self.seen and time.monotonic() - self.begun > limit:
            alternative = " or cannot reach this one" if self.linked else ""
            self.on_silence(peer, f"node {peer} did not start within {limit:g} s{alternative}")
        return self.stop is not None

    def meet(self) -> tuple[str, int] | None:
        """Agree with the other nodes on address and port; `None` when a stop came first."""
        if not self.node:
            self.token = self.link.token_of_ranks(self.rendezvous_id()) if self.link else os.urandom(32).hex()
        if self.nnodes == 1:
            self.port = beside("network").Port()
            if self.shims:
                self.publish("127.0.0.1", self.port.number)
            return "127.0.0.1", self.port.number
        if self.config.get("network"):
            self.fence = beside("network").fenced_address(self.config["network"])
        self.beat("waiting")
        self.next_look = 0.0
        if self.node == 0:
            peers = list(range(1, self.nnodes))
            late = list(peers)

            def all_ready() -> bool:
                while late and self.is_ready(late[-1]):
                    late.pop()
                return not late

            if not self.until(all_ready):
                return None
            if self.link and not self.until(lambda: self.link.state().get("address") is not None):
                return None
            self.port = beside("network").Port()
            addr = self.address(
                [read_json(os.path.join(self.attempt_dir, f"node-{p}", "lease.json")) or {} for p in peers]
            )
            self.publish(addr, self.port.number)
            return addr, self.port.number
        found: list[dict[str, Any]] = []
        path = os.path.join(self.attempt_dir, f"rendezvous-r{self.restart}.json")

        def published() -> bool:
            record = read_json(path)
            if record is not None:
                found.append(record)
            return record is not None or self.never_came(0)

        if not self.until(published) or not found:
            return None
        self.token = self.link.token_of_ranks(self.rendezvous_id()) if self.link else str(found[0].get("token") or "")
        return str(found[0]["addr"]), int(found[0]["port"])

    def publish(self, addr: str, port: int) -> None:
        """Tell the other nodes, and the shims below a launcher, where rank 0 will be."""
        record = {"addr": addr, "port": port, "id": self.rendezvous_id(), "at": time.time()}
        if self.nnodes > 1 and not self.link:  # the link is signed, not encrypted
            record["token"] = self.token
        path = os.path.join(self.attempt_dir, f"rendezvous-r{self.restart}.json")
        write_json(path, record, durable=self.nnodes > 1)
        self.pass_on()

    def is_ready(self, peer: int) -> bool:
        """Whether *peer* has finished its setup."""
        beat = self.peer_record(peer, "heartbeat.json")
        if beat is None:
            self.never_came(peer)
        return beat is not None and beat.get("state") != "setup"

    def address(self, leases: Sequence[dict[str, Any]]) -> str:
        """Where node 0 can be reached by the nodes that hold *leases*."""
        if self.fence:
            return self.fence[1]
        given = (self.config.get("rendezvous") or {}).get("addr") or self.master_host
        if given:
            return str(given)
        if self.link and (reached := self.link.state().get("address")):
            return str(reached)
        here = (self.me["boot_id"], self.me["net"])
        if all((lease.get("boot_id"), lease.get("net")) == here for lease in leases):
            return "127.0.0.1"
        return str(beside("network").own_address([str(lease["host"]) for lease in leases if lease.get("host")]))

    def rendezvous_id(self) -> str:
        """Fresh for every incarnation."""
        return f"{self.config['marker']}-r{self.restart}"

    def environment(self, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
        """What every process of the job sees, without what belongs to one rank; *defaults* are the command's."""
        config = self.config
        env = {name: value for name, value in os.environ.items() if name not in DERIVED}
        env.update(defaults or {})
        env.update(config.get("env") or {})
        env.update(self.secrets)
        env.update(
            {
                "ORC_JOB_ID": config["job"],
                "ORC_JOB_NAME": config["name"],
                "ORC_ATTEMPT": str(config["attempt"]),
                "ORC_RESTART": str(self.restart),
                "ORC_MARKER": config["marker"],
                "ORC_JOB_DIR": config["job_dir"],
                "ORC_ATTEMPT_DIR": self.attempt_dir,
                "ORC_NODE_RANK": str(self.node),
                "ORC_NNODES": str(self.nnodes),
                "ORC_NPROC": str(self.nproc),
                "ORC_RDZV_ID": self.rendezvous_id(),
            }
        )
        if config.get("logs_dir"):
            env["ORC_LOGS_DIR"] = self.logs
        env.update(self.own_env)
        env.setdefault("PYTHONUNBUFFERED", "1")
        env.setdefault("OMP_NUM_THREADS", "1")
        env.setdefault("PYTHONFAULTHANDLER", "1")  # a crash in C shows where Python was
        env.update(self.prepared.get("env") or {})
        if self.prepared.get("path"):
            env["PATH"] = os.pathsep.join([*self.prepared["path"], env.get("PATH") or os.defpath])
        prepend_path(env, config["runtime_tree"])
        return env

    def node_address(self, master: str) -> str:
        """Where the other nodes reach this one, given where they reach node 0."""
        if self.fence:
            return self.fence[1]
        if self.link and (own := self.link.state().get("address")):
            return str(own)
        if not self.node or master in ("127.0.0.1", "::1"):
            return master
        return str(beside("network").own_address([master]))

    def start_ranks(self, addr: str, port: int) -> None:
        """Start the ranks, or the launcher that starts them."""
        command = self.config["command"]
        if self.fence:
            self.own_env.update(dict.fromkeys(beside("network").LISTENING, self.fence[0]))
        elif addr in ("127.0.0.1", "::1"):  # whoever is on another machine has no business there
            self.own_env.update(beside("network").on_loopback({**os.environ, **(self.config.get("env") or {})}))
        elif self.link:
            given = {**os.environ, **(self.config.get("env") or {})}
            self.own_env.update({n: v for n, v in self.link.variables().items() if n not in given})
        if self.own_env:
            self.note_pids()
        values = {
            "python": self.python,
            "nnodes": str(self.nnodes),
            "node_rank": str(self.node),
            "nproc": str(self.nproc),
            "master_addr": addr,
            "master_port": str(port),
            "rdzv_id": self.rendezvous_id(),
            "world_size": str(self.nnodes * self.nproc),
            "min_nodes": str(self.config.get("min_nodes") or self.nnodes),
            "is_host": "0" if self.node else "1",
            "node_addr": self.node_address(addr),
            "attempt_dir": self.attempt_dir,
        }
        defaults = {n: substitute(v, values) for n, v in (command.get("env") or {}).items()}
        if command.get("host_env"):
            names = self.host_names()
            for name, text in command["host_env"].items():
                defaults[name] = ",".join(substitute(text, {"host": host}) for host in names)
        env = self.environment(defaults)
        env["ORC_TOKEN"] = self.token
        log = os.path.join(self.logs, f"node-{self.node}.log")
        if self.first_alone:
            calls = beside("calls")
            env["PATH"] = calls.install(os.path.join(self.dir, "bin")) + os.pathsep + (env.get("PATH") or os.defpath)
            self.calls = calls.Calls(self, env)
            if self.node:
                return  # node 0 calls
        program = list(command["program"])
        if program[0] == "{python}":
            program[0] = self.python
        if self.node == 0:
            self.write_hostfiles(command.get("hostfiles") or {})
        null = os.open(os.devnull, os.O_RDONLY)
        prefix = list(self.prepared.get("prefix") or ())  # of a container
        if command["spawn"] == "launcher":
            shim = [*own_argv(), "rank", "--"]
            argv = [substitute(word, values) for word in command["launcher"]]
            if prefix and command["launcher"][0] == "{python}":  # it runs inside, and so do its ranks
                argv, shim[0] = prefix + argv, self.python
            else:
                program = prefix + program
            argv += shim + program
            self.start_one(None, None, argv, env, null, log)
        else:
            for local_rank in range(self.nproc):
                rank = self.node * self.nproc + local_rank
                own = rank_variables(rank, local_rank, self.node, self.nnodes, self.nproc, addr, port)
                for name, texts in (command.get("rank_env") or {}).items():
                    if name not in (self.config.get("env") or {}):  # the job's own wins
                        own[name] = substitute(texts[local_rank], {**values, "rank": str(rank)})
                log = os.path.join(self.logs, f"rank-{rank}.log")
                self.start_one(rank, local_rank, prefix + program, {**env, **own}, null, log)
        os.close(null)
        self.note_pids()

    def host_names(self) -> list[str]:
        """What launchers call the nodes, in node order: the cluster's names, or the machines' own, or ``node-<n>``."""
        if self.nnodes == 1:
            return ["localhost"]  # any other name of it might be looked for on the network
        given = [str(host["name"]) for host in self.config.get("hosts") or ()][: self.nnodes]
        paths = [os.path.join(self.attempt_dir, f"node-{node}", "lease.json") for node in range(self.nnodes)]
        names = given or [str((read_json(path) or {}).get("host")) for path in paths]
        return names if len(set(names)) == self.nnodes else [f"node-{node}" for node in range(self.nnodes)]

    def write_hostfiles(self, templates: Mapping[str, str]) -> None:
        """One line for each node, in the form that the launcher reads."""
        for name, line in templates.items():
            values = [{"host": host, "nproc": str(self.nproc)} for host in self.host_names()]
            fd = os.open(os.path.join(self.attempt_dir, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.writelines(substitute(line, value) for value in values)

    def start_one(
        self, rank: int | None, local_rank: int | None, argv: Sequence[str], env: dict[str, str], null: int, log: str
    ) -> None:
        """Start a rank, or with no rank the launcher."""
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            start = os.fstat(fd).st_size
            pid = spawn(argv, env, cwd=self.work, stdin=null, output=fd, umask=users_umask)
        finally:
            os.close(fd)
        self.sessions[pid] = process_start(pid) or ""
        self.ranks.append(Rank(rank, local_rank, pid, log, start))

    # the way to the end

    def supervise(self) -> dict[str, Any]:
        """Until the last rank has ended; returns the exit record's verdict."""
        if self.calls and self.node:
            if self.until(lambda: self.peer_record(0, "exit.json") is not None):
                return self.follow_first()
        elif self.ranks and self.until(
            lambda: self.unexplained is None and all(rank.status is not None for rank in self.ranks)
        ):
            return self.ending("succeeded", "", 0)
        stop = self.stop
        if stop is None:
            raise AssertionError("neither ranks nor a reason to stop")
        self.beat("stopping")
        if not stop.forward:
            deadline = time.monotonic() + stop.grace_s
            while self.rank_processes() and time.monotonic() < min(deadline, self.kill_at):
                self.tick()
        self.end_processes(self.rank_processes)
        return self.verdict(stop)

    def follow_first(self) -> dict[str, Any]:
        """The verdict of a node without a launcher when the first node, which has it, has ended."""
        record = self.peer_record(0, "exit.json") or {}
        if record.get("outcome") != "succeeded":
            self.look(time.monotonic())  # a cancellation may be the reason of both
            # Otherwise it has left no word, or that has not come yet.
            self.request(Stop("peer", f"node 0 has ended: {record.get('reason')}", 0.0, announced=True))
            self.end_processes(self.rank_processes)
            return self.verdict(self.stop)  # type: ignore[arg-type]
        deadline = time.monotonic() + FAILURE_GRACE_S
        while self.sessions and time.monotonic() < deadline:  # the launcher's daemons
            self.next_look = time.monotonic() + HURRY_S
            self.tick()
        self.ask_shims()
        return self.verdict(self.stop) if self.stop else self.ending("succeeded", "", 0)

    def rank_processes(self) -> list[int]:
        """Whom to ask to end: the leading process of each rank. Its workers are its own to end."""
        if self.calls or any(rank.rank is None and rank.status is None for rank in self.ranks):
            shims = [
                r["pid"] for r in self.shim_records(running=True).values() if process_start(r["pid"]) == r["start"]
            ]
            if shims:
                return shims
        called = list(self.calls.running.values()) if self.calls else []
        return called + [rank.pid for rank in self.ranks if rank.status is None]

    def others_may_save(self) -> bool:
        """Whether a launcher that spans the nodes has lost its ranks here, but may have some elsewhere: it would end
        those at once if it were told to end. It ends by itself after its last rank, or with the grace period.
        """
        if not self.first_alone:
            return False
        shims = self.shim_records(running=True).values()
        return bool(shims) and not any(process_start(shim["pid"]) == shim["start"] for shim in shims)

    def end_processes(self, living: Callable[[], list[int]]) -> None:
        """SIGTERM, wait for the grace period, SIGKILL."""
        grace = self.stop.grace_s if self.stop else 0.0
        self.kill_at = min(self.kill_at, time.monotonic() + grace)
        told: set[int] = set()
        while (left := living()) and time.monotonic() < self.kill_at:
            if not self.others_may_save():
                for pid in left:
                    if pid not in told:  # a launcher's turn comes when its ranks are gone
                        signal_process(pid, signal.SIGTERM)
                told.update(left)
            self.next_look = min(self.next_look, self.kill_at)
            self.tick()
        if left:
            self.log("still running at the end of the grace period: killed")
        self.stop_ranks_now()

    def stop_ranks_now(self) -> None:
        """SIGKILL every session, and wait until their leaders are gone."""
        deadline = time.monotonic() + 10.0
        self.kill_sessions()
        while self.sessions and time.monotonic() < deadline:
            self.next_look = time.monotonic() + HURRY_S
            self.tick()

    def kill_sessions(self) -> None:
        """SIGKILL the process groups of everything that was started, leaders already gone included."""
        for pid in (*self.sessions, *(rank.pid for rank in self.ranks)):
            if pid in self.sessions or not process_start(pid):  # the number is not in use by somebody else
                signal_group(pid, signal.SIGKILL)

    def verdict(self, stop: Stop) -> dict[str, Any]:
        """What to record, given why the ranks were stopped and how they ended."""
        records = self.rank_records()
        codes = [record["exit_code"] for record in records.values()]
        clean = bool(codes) and len(codes) == self.nproc and all(code in (0, self.preempt_exit) for code in codes)
        if stop.outcome == "preempted":
            if clean and not any(codes):
                return self.ending("succeeded", "", 0)
            reason = stop.reason
            if self.ranks and not clean:
                bad = next(
                    (f"rank {r} {how_it_ended(v['exit_code'], v['signal'])}" for r, v in records.items()
                     if v["exit_code"] not in (0, self.preempt_exit)),
                    "not all ranks reported",
                )  # fmt: skip
                reason += f"; not saved: {bad}"
            return self.ending("preempted", reason, EXIT_PREEMPTED)
        ending = self.ending(stop.outcome, stop.reason, stop.exit_status)
        if stop.outcome == "node_failure":
            ending.update(outcome="peer")
        if stop.lost:
            ending["peer_lost"] = True
        if stop.lost_node is not None:
            ending["lost_node"] = stop.lost_node
        if stop.failure:
            ending["first_failure"] = stop.failure
        return ending

    def ending(self, outcome: str, reason: str, exit_status: int) -> dict[str, Any]:
        """The verdict part of an exit record."""
        return {"outcome": outcome, "reason": reason, "exit_status": exit_status, "first_failure": None}

    def failure_of(self, rank: Rank | None) -> dict[str, Any]:
        """The first failure among the ranks of this node, given the process that has ended, if it was the agent's."""
        if rank is None:
            rank = self.ranks[0] if self.ranks else Rank(None, None, 0, "", 0)
        code, name = exit_of(rank.status or 0)
        number, local_rank, at, log, start = rank.rank, rank.local_rank, rank.at, rank.log, rank.log_start
        if rank.rank is None and (first := self.first_of_launcher()):
            number, local_rank, at = first["rank"], first["local_rank"], first["at"]
            code, name = first["exit_code"], first["signal"]
            log, start = os.path.join(self.logs, f"rank-{number}.log"), first.get("log_start", 0)
        return {
            "rank": number,
            "local_rank": local_rank,
            "node": self.node,
            "host": self.me["host"],
            "exit_code": code,
            "signal": name,
            "at": at,
            "log_tail": log_tail(log, start, list(self.secrets.values())),
            "stall": self.stall(number),
        }

    def stall(self, rank: int | None = None) -> str:
        """What the runtime's watchdog has said of *rank* or of any rank of this node: one line, empty when nothing."""
        try:
            names = sorted(os.listdir(self.dir))
        except FileNotFoundError:  # the next heartbeat will notice
            return ""
        for name in names:
            if name.startswith("stall-") and name.endswith(".json"):
                report = read_json(os.path.join(self.dir, name)) or {}
                if report.get("restart") == self.restart and rank in (None, report.get("rank")):
                    return self.masked(str(report.get("summary") or ""))[:2000]
        return ""

    def masked(self, text: str) -> str:
        """*text* without the values of secrets: what a job prints stays in its own log, but travels no further."""
        return str(beside("masking").masked(text, self.secrets.values())) if self.secrets else text

    def first_of_launcher(self) -> dict[str, Any] | None:
        """The earliest failure that the shims have seen in the launcher's last round.

        A launcher tells the others to end after the first failure, so the end of one that was told counts last.
        """
        failed = [r for r in self.shim_records().values() if r["exit_code"] != 0]
        last = max((r["round"] for r in failed), default=0)
        failed = [r for r in failed if r["round"] == last]
        return min(failed, key=lambda r: (bool(r["told"]), r["at"]), default=None)

    def shim_records(self, running: bool = False) -> dict[int, dict[str, Any]]:
        """What the shims around a launcher's ranks have written: ends, or with *running* who is there."""
        suffix = f"-r{self.restart}.{'pid' if running else 'json'}"
        found = {}
        for name in os.listdir(self.dir):
            if name.startswith("rank-") and name.endswith(suffix):
                record = read_json(os.path.join(self.dir, name))
                if record is not None:
                    found[int(record["rank"])] = record
        return dict(sorted(found.items()))

    def rank_records(self) -> dict[int, dict[str, Any]]:
        """How each rank of this node ended, as far as known."""
        if self.shims:
            return {
                number: {"exit_code": r["exit_code"], "signal": r["signal"], "at": r["at"]}
                for number, r in self.shim_records().items()
            }
        found = {}
        for rank in self.ranks:
            if rank.rank is not None and rank.status is not None:
                code, name = exit_of(rank.status)
                found[rank.rank] = {"exit_code": code, "signal": name, "at": rank.at}
        return found

    # records of this node

    def log(self, message: str) -> None:
        """A line in this node's log."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            os.write(self.log_fd, f"[orc {stamp} node {self.node}] {message}\n".encode("utf-8", "replace"))
        except OSError as error:  # a full disk must not stop the agent from ending its ranks
            complain(f"{message} (not in the log: {error})")

    def beat(self, state: str) -> None:
        """Show the others that this node is alive, if the job is still its own: raises `Superseded`."""
        self.state = state
        self.next_beat = time.monotonic() + self.heartbeat_s
        if self.superseded:
            return
        alive = sum(rank.status is None for rank in self.ranks)
        if self.shims and (alive or self.calls):
            alive = self.nproc - len(self.shim_records())
        progress = read_json(os.path.join(self.dir, "progress.json")) or {}
        record = {
            "at": time.time(),
            "restart": self.restart,
            "state": state,
            "ranks_alive": alive,
            "progress": progress,
        }
        try:
            began = self.ownership.clock()
            self.ownership.check()
            refresh_json(os.path.join(self.dir, "heartbeat.json"), record)
            self.ownership.renew(began)
        except FileNotFoundError:  # nobody can see this attempt any more, nor reach it to cancel it
            reason = f"{self.attempt_dir} was removed"
            self.request(Stop("node_failure", reason, FAILURE_GRACE_S, exit_status=1, lost=True))
        except OSError as error:
            self.log(f"cannot write a heartbeat: {error}")
        self.pass_on()

    def pass_on(self) -> None:
        """There is a new record for other hosts."""
        if self.link:
            self.link.poke()

    def note_pids(self) -> None:
        """Note what has to be killed should this agent be killed."""
        record = {
            "host": self.me["host"],
            "boot_id": self.me["boot_id"],
            "agent": {"pid": self.me["pid"], "start": self.me["pid_start"]},
            "sessions": [{"pid": pid, "start": start} for pid, start in self.sessions.items()],
            "env": self.own_env,
        }
        try:
            write_json(os.path.join(self.dir, "pids.json"), record, durable=False)
        except OSError as error:
            self.log(f"cannot write pids.json: {error}")

    def reserve(self) -> None:
        """Keep room for the exit record: it is what counts when the job has filled the disk."""
        with open(os.path.join(self.dir, ".reserve"), "wb") as file:
            file.write(b"\0" * RESERVE_BYTES)

    def record(self, ending: dict[str, Any], name: str = "exit.json") -> None:
        """Write the exit record; where the disk refuses even a few bytes, standard error has it."""
        path = os.path.join(self.dir, name)
        record = {
            "format": FORMAT,
            "marker": self.config["marker"],
            "owner": self.owner,
            "node": self.node,
            "host": self.me["host"],
            "restart": self.restart,
            "started_at": self.started_at,
            "ended_at": time.time(),
            **ending,
            **({"lost_nodes": sorted(self.lost)} if self.lost else {}),
            "ranks": {str(number): end for number, end in self.rank_records().items()},
        }
        self.log(f"{ending['outcome']}: {ending['reason']}" if ending["reason"] else str(ending["outcome"]))
        for attempt in range(20):
            try:
                write_json(path, record)
                break
            except OSError as error:
                complain(f"cannot write {path}: {error}")
                if isinstance(error, FileNotFoundError):
                    break  # the directory was removed; it does not come back
                remove(os.path.join(self.dir, ".reserve"))
                if attempt == 1 and record["first_failure"]:
                    record["first_failure"] = {**record["first_failure"], "log_tail": ""}
                if attempt:
                    time.sleep(0.5)
        else:
            complain(json.dumps(record))
        remove(os.path.join(self.dir, ".reserve"))
        self.pass_on()

    def clean_up(self, ending: dict[str, Any]) -> None:
        """Secrets go when the attempt is over; one that will be run again in the same place still needs them."""
        if self.port:
            self.port.close()
        if self.slots:
            self.slots.close()
        if os.path.isdir(scratch := os.path.join(self.dir, "launcher")):
            import shutil

            shutil.rmtree(scratch, ignore_errors=True)  # what torchrun keeps for its ranks while they run
        if self.config.get("link"):  # nothing on this host is another node's
            for name in ("secrets.json", "link.json"):
                remove(os.path.join(self.private, name))
            return
        everyone = [self.peer_record(node, "exit.json") for node in range(self.nnodes)]
        if all(everyone) and self.gang_pid is not None and os.getppid() != self.gang_pid:
            beside("gang").finish(self.config)  # the gang process, whose task this is, was killed
        elif all(everyone) and self.gang_pid is None and ending["outcome"] != "preempted":
            for name in ("secrets.json", "link.json"):  # the latter where it turned out that hosts share their files
                remove(os.path.join(self.private, name))


# --- command line --------------------------------------------------------------------------------------------------

USAGE = """usage: orc_agent.py node <agent.json> --owner OWNER [--node-rank N|auto] [--restart N|auto]
                                              [--master-host HOST]
       orc_agent.py gang <agent.json> --owner OWNER
       orc_agent.py start <agent.json> --owner OWNER --node-rank N
       orc_agent.py stacks <attempt directory> [--timeout SECONDS]
       orc_agent.py rank -- program [arg ...]
       orc_agent.py rsh [options] host command [arg ...]"""


def _number(options: Mapping[str, str], name: str, variable: str) -> int:
    text = options.get(name, "auto")
    if text == "auto":
        text = os.environ.get(variable) or "0"
    if not text.isdigit():
        raise LaunchFailure(f"{name} {text!r} is not a number")
    return int(text)


def load_config(path: str) -> dict[str, Any]:
    """The agent's orders; raises `LaunchFailure` for a file that this agent cannot follow."""
    config = read_json(path)
    if config is None:
        raise LaunchFailure(f"{path}: no such file, or not a JSON object")
    if config.get("format") != FORMAT:
        raise LaunchFailure(f"{path}: format {config.get('format')!r}, this agent reads format {FORMAT}")
    given = os.environ.get(config.get("nnodes_from") or "", "")
    if given.isdigit():
        config["nnodes"] = int(given)
    return config


def main(arguments: Sequence[str]) -> int:
    """Run one of the roles; returns the exit status."""
    mode, *rest = arguments or ("",)
    if mode == "rank" and rest[:1] == ["--"]:
        beside("shim").run(rest[1:])
    if mode == "rsh":
        return int(beside("calls").rsh(rest))
    if mode == "stacks" and rest:
        return int(beside("stacks").main(rest))
    options = dict(zip(rest[1::2], rest[2::2]))  # noqa: B905 - Python 3.9
    known = {
        "node": {"--owner", "--node-rank", "--restart", "--master-host"},
        "gang": {"--owner"},
        "start": {"--owner", "--node-rank"},
    }.get(mode)
    if known is None or not rest or len(rest) % 2 == 0 or not set(options) <= known or "--owner" not in options:
        print(USAGE, file=sys.stderr)
        return 2
    private()
    config = load_config(rest[0])
    if mode == "gang":
        return int(beside("gang").Gang(config, options["--owner"]).run())
    node = _number(options, "--node-rank", "SLURM_NODEID")
    if mode == "start":
        return int(beside("host").start(config, node, options["--owner"]))
    restart = _number(options, "--restart", "SLURM_RESTART_COUNT")
    return Node(config, node, options["--owner"], restart, master_host=options.get("--master-host")).run()


def run(arguments: Sequence[str]) -> int:
    """`main`, with what cannot be followed told in one line."""
    try:
        return main(arguments)
    except LaunchFailure as failure:
        complain(str(failure))
        return EXIT_LAUNCH


def own_argv() -> list[str]:
    """How to start this file again: as a module from its directory (byte code) where that is how it was started."""
    here = os.path.abspath(__file__)
    return [sys.executable, "-I", "-S", here if __name__ == "__main__" else os.path.dirname(here)]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
