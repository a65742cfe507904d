"""The containers of one training job on this machine, without docker: each host is a set of namespaces.

Run as a program (``python -I -S sagemaker_namespaces.py SPEC.json``), standard library only. It makes user, mount, PID
and network namespaces, becomes the first process there and starts every host in namespaces of its own: mounts
(``/opt/ml``, ``/tmp``, ``/dev/shm``, ``/etc/hosts``), host name, PIDs. When this process ends, however it does, the
kernel ends everything in them and the mounts are gone; it ends when its standard input does.

It reads lines ``term HOST`` and ``kill HOST``, and prints a line of JSON for each event: ``{"started": HOST}``,
``{"ended": HOST, "status": n}`` (128 + n for signal n), ``{"error": text}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_SET_PDEATHSIG = 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
EXIT_SETUP = 125
EXIT_REFUSED = 3

_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceError(Exception):
    """The kernel, or who administers this machine, does not allow it."""


def unshare(flags: int, what: str) -> None:
    """unshare(2). Raises `NamespaceError`."""
    if _libc.unshare(flags):
        raise NamespaceError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """mount(2). Raises `NamespaceError`."""
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), data.encode() if data is not None else None):
        raise NamespaceError(f"cannot mount {kind or source} on {target}: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    """SIGKILL for this process when the one that has forked it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tell(event: Mapping[str, Any]) -> None:
    """Print an event as one line for the parent process."""
    with contextlib.suppress(BrokenPipeError):  # it is gone, and so will be this process
        os.write(1, json.dumps(event).encode() + b"\n")


def enter_namespaces() -> None:
    """Become root of namespaces of our own. Raises `NamespaceError`."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET, "this machine does not allow user namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        except OSError as error:
            raise NamespaceError(f"this machine does not allow user namespaces: {name}: {error.strerror}") from None


def raise_loopback() -> None:
    """A new network has a loopback interface that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


class Host:
    """Container of one host."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.name = str(spec["name"])
        self.ml = str(spec["ml"])  # what it sees as /opt/ml
        self.scratch = str(spec["scratch"])
        self.hosts_file = str(spec["hosts_file"])
        self.read_only = [str(path) for path in spec.get("read_only") or ()]
        self.argv = [str(word) for word in spec["argv"]]
        self.env = {str(name): str(value) for name, value in spec["env"].items()}
        self.log = os.open(str(spec["log"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.keeper = 0  # ends when the container's first process does, with its status
        self.pid = 0  # of that first process

    def start(self) -> None:
        """Fork twice: the first child stays outside of the new PID namespace and has the PID that signals need."""
        read, write = os.pipe()
        self.keeper = os.fork()
        if self.keeper == 0:
            os.close(read)
            self._keep(write)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            self.pid = int(pipe.readline() or b"0")

    def _keep(self, report: int) -> NoReturn:
        status = EXIT_SETUP
        try:
            die_with_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID, "no namespaces for a host")
            pid = os.fork()
            if pid == 0:
                os.close(report)
                self._become()
            os.write(report, b"%d\n" % pid)
            os.close(report)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            status = 128 - code if code < 0 else code
        except BaseException as error:
            self._complain(error)
        finally:
            os._exit(status)

    def _become(self) -> NoReturn:
        try:
            die_with_parent()
            os.setsid()
            self._mount()
            socket.sethostname(self.name)
            null = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, null), (1, self.log), (2, self.log)):
                os.dup2(source, target)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.umask(0o022)
            os.chdir("/")
            os.execvpe(self.argv[0], self.argv, self.env)
        except BaseException as error:
            self._complain(error)
        finally:
            os._exit(127 if os.getpid() == 1 else EXIT_SETUP)

    def _complain(self, error: BaseException) -> None:
        what = f"{self.argv[0]}: {error.strerror}" if isinstance(error, OSError) else str(error)
        os.write(self.log, f"the container of {self.name} cannot be started: {what}\n".encode())

    def _mount(self) -> None:
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        if os.path.isdir("/dev/shm"):
            mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        mount(self.hosts_file, "/etc/hosts", flags=MS_BIND)
        for path in self.read_only:
            protect(path)
        opt = os.path.join(self.scratch, "opt")
        prepare_host(opt, self.ml)
        mount(opt, "/opt", flags=MS_BIND | MS_REC)
        needed = [self.argv[0], *self.env.get("PATH", "").split(":"), os.path.realpath(sys.executable)]
        own = os.path.join(self.scratch, "tmp")
        os.makedirs(own, exist_ok=True)
        for name in {path.split("/")[2] for path in needed if path.startswith("/tmp/")}:
            if os.path.isdir(f"/tmp/{name}"):  # a Python that is kept there
                os.makedirs(os.path.join(own, name), exist_ok=True)
                mount(f"/tmp/{name}", os.path.join(own, name), flags=MS_BIND | MS_REC)
        mount(own, "/tmp", flags=MS_BIND | MS_REC)


def protect(path: str) -> None:
    """Let nothing below *path* be changed. What a mount forbids already has to be forbidden again."""
    mount(path, path, flags=MS_BIND)
    # The bits of statvfs(2) for nosuid, nodev and noexec are those of mount(2).
    kept = os.statvfs(path).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("none", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def prepare_host(opt: str, ml: str) -> None:
    """A copy of this machine's ``/opt``, made of bind mounts, that has an ``ml`` of its own."""
    os.makedirs(opt, exist_ok=True)
    for name in os.listdir("/opt"):
        theirs, ours = f"/opt/{name}", os.path.join(opt, name)
        mode = os.lstat(theirs).st_mode
        if name == "ml":
            continue
        if stat.S_ISLNK(mode):
            if not os.path.lexists(ours):
                os.symlink(os.readlink(theirs), ours)
        elif stat.S_ISDIR(mode):
            os.makedirs(ours, exist_ok=True)
            mount(theirs, ours, flags=MS_BIND | MS_REC)
        else:
            os.close(os.open(ours, os.O_CREAT | os.O_WRONLY, 0o600))
            mount(theirs, ours, flags=MS_BIND)
    os.makedirs(os.path.join(opt, "ml"), exist_ok=True)
    mount(ml, os.path.join(opt, "ml"), flags=MS_BIND | MS_REC)


def init(hosts: Sequence[Host]) -> int:
    """The first process of the job's namespaces: starts the hosts, passes signals on, records their ends."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    raise_loopback()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for host in hosts:
        host.start()
        tell({"started": host.name})
    running = {host.keeper: host for host in hosts}
    commands = b""
    while running:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return 0  # nobody is there any more
            *lines, commands = (commands + data).split(b"\n")
            for line in lines:
                obey(line.decode(), running.values())
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if pid in running:
                host = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                tell({"ended": host.name, "status": 128 - code if code < 0 else code})
    return 0


def obey(line: str, hosts: Any) -> None:
    """``term HOST`` or ``kill HOST``."""
    word, _, name = line.partition(" ")
    number = {"term": signal.SIGTERM, "kill": signal.SIGKILL}[word]
    for host in hosts:
        if host.name == name and host.pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(host.pid, number)


def main(arguments: Sequence[str]) -> int:
    """Run the containers of ``SPEC.json``, with ``--check`` none; returns when the last one has ended."""
    if arguments[0] == "--check":
        hosts = []
    else:
        with open(arguments[0], encoding="utf-8") as file:
            hosts = [Host(one) for one in json.load(file)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: whoever has started this decides
    try:
        enter_namespaces()
        pid = os.fork()
        if pid == 0:
            status = EXIT_REFUSED
            try:
                die_with_parent()
                status = init(hosts)
            except NamespaceError as error:
                tell({"error": str(error)})
            finally:
                os._exit(status)  # and with it everything in its namespaces
    except NamespaceError as error:
        tell({"error": str(error)})
        return EXIT_REFUSED
    os.close(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
