"""A command that runs on a host in an SSH session of its own, while we talk to it."""

from __future__ import annotations

import re
import select
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from types import FrameType
from typing import Any, Protocol, Self

import paramiko

from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote.ssh.errors import HostAccessError, LinkLost
from orc.launchers.remote.ssh.watchdog import VARIABLE
from orc.launchers.remote.transport import CommandTimeout, Completed

NOT_FOUND, NOT_EXECUTABLE = 127, 126
# A session of its own, whose leader is the shell behind it, as it is where sshd starts the shell; `~` is root's home.
_AS_ROOT = ("sudo", "-n", "-H", "setsid", "-w")
_DECODE = 'eval "exec $(printf %b "$1")"'
# Says who leads the command's processes, on both streams, because a login may have printed something before. The words
# are put together there: a shell that shows what it runs must not show them. Waits for the command, to tell its signal.
_LEAD = f"""\
say() {{ printf '\\n%s:%s:%s:%s:\\n' orc "$token" $$ "$1"; }}
token=$1; shift
trap : HUP INT TERM
case $1 in */*) test -x "$1" ;; *) command -v -- "$1" >/dev/null 2>&1 ;; esac || {{
test -e "$1" && set {NOT_EXECUTABLE} || set {NOT_FOUND}; say $1; exit $1; }}
say 0; say 0 >&2; exec 3>&2 2>/dev/null
"""
_DROP = """\
for name in $(env | sed -n 's/^\\([A-Za-z_][A-Za-z_0-9]*\\)=.*/\\1/p'); do
case $name in {keep}) ;; {drop}) unset $name ;; esac; done
"""


def command_line(
    argv: Sequence[str],
    token: str,
    env: Mapping[str, str],
    drop_env: Sequence[str] = (),
    keep_env: Sequence[str] = (),
    *,
    mark_end: bool = False,
    sudo: bool = False,
) -> str:
    """Return the command line for *argv*, run as root with *sudo*; `marks` recognises its start (and end)."""
    script = _LEAD
    if drop_env:
        keep = "|".join(shlex.quote(name) for name in keep_env) or "''"
        script += _DROP.format(keep=keep, drop="|".join(f"{shlex.quote(prefix)}*" for prefix in drop_env))
    # The same again where the output ends: what the command leaves behind may hold it open.
    end = "; status=$?; say 0; say 0 >&3; exit $status" if mark_end else ""
    settings = shlex.join(f"{name}={value}" for name, value in env.items())
    script += f'/usr/bin/env {VARIABLE}="$token-$$" {settings} "$@" 2>&3 3>&-{end}'
    return any_shell((*(_AS_ROOT if sudo else ()), "/bin/sh", "-c", script, "orc", token, *argv))


def any_shell(argv: Sequence[str]) -> str:
    """Return *argv* as one line that sh, csh and fish read alike: no newline, exclamation mark or backslash in it."""
    line = shlex.join(argv)
    if not re.search(r"[\n!\\]", line):
        return f"exec {line}"
    escaped = re.sub(r"[\n!\\]", lambda match: f"\\0{ord(match[0]):03o}", line)
    return f"exec /bin/sh -c {shlex.quote(_DECODE)} orc {shlex.quote(escaped)}"


def marks(token: str) -> re.Pattern[bytes]:
    """Return the pattern of what stands around the output of a command: its process group, and why it did not start."""
    return re.compile(rb"\norc:%s:(\d+):(\d+):\n" % token.encode())


_CHUNK = 1 << 16
_KILLED_WITHIN_S = 5.0  # a killed group has ended, or its disk hangs
_LOOK_S = 0.05  # between looks at the output of a command that takes no input
_SETTLE_S = 2.0  # of silence after its end, where others hold its output open
_UNTIL_CUT_S = 0.5  # between the end of the sessions of a connection and its own
_NOISE = 1 << 20  # bytes that a login may print before the command starts


class Sessions(Protocol):
    """Sessions of one connection, see `orc.launchers.remote.ssh.link.Link`."""

    name: str
    token: str
    sudo: bool

    def session(self, command: str, timeout_s: float) -> Any:
        """Start a command in a new session."""
        ...

    def release(self, session: Any) -> None:
        """Close a session."""
        ...

    def kill(self, group: int) -> None:
        """End a process group there."""
        ...

    def outlives(self, pause_s: float) -> bool:
        """Return whether the connection still works after a pause."""
        ...

    def failure(self) -> LinkLost:
        """Return the reason why it cannot be used any more."""
        ...


class SshProcess:
    """See `Process`. One thread at a time may use it."""

    def __init__(
        self,
        link: Sessions,
        argv: Sequence[str],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        drop_env: Sequence[str] = (),
        keep_env: Sequence[str] = (),
        *,
        whole: bool = False,
    ) -> None:
        """With *whole* it is run with `finish` or `gather`, which do not wait for what it leaves behind."""
        self._link = link
        self._argv = tuple(argv)
        self._timeout_s = timeout_s
        self._out, self._err = bytearray(), bytearray()
        self._group: int | None = None  # its process group, when it has started
        self._pattern = marks(link.token)
        self._input_closed = False
        self._settling: float | None = None
        self._whole = whole
        line = command_line(argv, link.token, env or {}, drop_env, keep_env, mark_end=whole, sudo=link.sudo)
        self._channel: Any = link.session(line, timeout_s)
        self._ready = select.poll()
        self._ready.register(self._channel.fileno(), select.POLLIN)

    def await_start(self) -> None:
        """Return when it runs. Raises `BackendError` when there is no such program."""
        while self._group is None and not self._finished():  # its end may be here before what it has said
            if not self._receive(self._timeout_s):
                raise self._late(f"did not start within {self._timeout_s:g} s")
        self._check_start()

    def write(self, data: bytes) -> None:
        """See `Process.write`. Output meanwhile is kept, so that neither side waits for the other."""
        view, deadline = memoryview(data), time.monotonic() + self._timeout_s
        while view:
            if count := self._send(view):
                view, deadline = view[count:], time.monotonic() + self._timeout_s
            elif self._ended():
                self._check_link()
                raise BackendUnreachable(f"{self._name} ended before it had read all of its input", where=self._where)
            elif time.monotonic() > deadline:
                raise self._late(f"took no input for {self._timeout_s:g} s")

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if not self._input_closed:
            self._input_closed = True
            with suppress(OSError, EOFError, paramiko.SSHException):  # it has ended
                self._channel.shutdown_write()

    def read(self, size: int) -> bytes:
        """See `Process.read`."""
        while not (self._group and self._out) and not self._finished() and not (self._silent() and self._drained()):
            if not self._receive(self._timeout_s):
                raise self._late(f"said nothing for {self._timeout_s:g} s")
        self._check_start()
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def wait(self) -> Completed:
        """See `Process.wait`."""
        while not self._finished():
            if not self._receive(self._timeout_s):
                raise self._late(f"did not end within {self._timeout_s:g} s")
        return self._completed(*self._outcome())

    def finish(self, stdin: bytes | None) -> Completed:
        """Give it all its input and wait for its end, *timeout_s* seconds in all."""
        return self._completed(*self.gather(stdin or b""))

    def gather(self, stdin: bytes, *, patient: bool = False) -> tuple[int, bytes, bytes]:
        """See `finish`; return status and outputs. When *patient*, the time counts from when something happened."""
        deadline = time.monotonic() + self._timeout_s
        view = memoryview(stdin)
        while not self._finished():
            left = deadline - time.monotonic()
            moved = False
            if view:
                count = self._send(view)
                view, moved = view[count:], count > 0
            else:
                self.close_stdin()
                moved = self._receive(left)
            if left <= 0:
                raise self._late(f"did not answer within {self._timeout_s:g} s")
            if moved and patient:
                deadline = time.monotonic() + self._timeout_s
        return self._outcome()

    def end(self) -> None:
        """End its process group, if it still runs, and wait until that has happened."""
        deadline, killed = time.monotonic() + _KILLED_WITHIN_S, False
        while not self._ended() and time.monotonic() < deadline:
            if self._group is not None and not killed:
                self._link.kill(self._group)
                killed = True
            self._receive(_LOOK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(BackendError, BackendUnreachable):
                self.end()
        finally:
            self._link.release(self._channel)

    @property
    def _name(self) -> str:
        return PurePosixPath(self._argv[0]).name

    @property
    def _where(self) -> str:
        return self._link.name

    def _late(self, how: str) -> CommandTimeout:
        return CommandTimeout(f"{self._name} {how}", where=self._where)

    def _send(self, view: memoryview) -> int:
        """Send some input and take pending output; return how much was sent, 0 when there is no room or no end."""
        self._receive(0)
        self._channel.settimeout(_LOOK_S)
        try:
            with InterruptsWait():
                return int(self._channel.send(view[:_CHUNK]))
        except TimeoutError:
            return 0
        except (OSError, EOFError, paramiko.SSHException):
            self._channel.status_event.wait(_LOOK_S)
            return 0

    def _receive(self, timeout_s: float) -> bool:
        """Wait for output, or the end; false when nothing happened in *timeout_s*."""
        deadline = time.monotonic() + timeout_s
        while not self._poll(deadline) and not self._ended():
            if time.monotonic() >= deadline:
                return False
        with InterruptsWait():
            while self._channel.recv_ready():
                self._out += self._channel.recv(_CHUNK)
            while self._channel.recv_stderr_ready():
                self._err += self._channel.recv_stderr(_CHUNK)
        if self._group is None:
            self._look_for_start()
        return True

    def _poll(self, deadline: float) -> bool:
        """Wait for output a little while."""
        pause = min(max(0.0, deadline - time.monotonic()), _LOOK_S)
        if self._silent():
            return bool(self._channel.status_event.wait(pause))
        return bool(self._ready.poll(1000 * pause))

    def _look_for_start(self) -> None:
        if found := self._pattern.search(self._out):
            self._group, status = (int(number) for number in found.groups())
            del self._out[: found.end()]
            if status:
                raise _unstarted(self._argv[0], status, self._where)
        elif len(self._out) > _NOISE:
            raise HostAccessError(
                "the login prints so much that orc's answers are lost",
                where=self._where,
                hint="Look for programs that print in ~/.bashrc (or the like) there.",
            )

    def _check_start(self) -> None:
        if self._group is None:
            self._check_link()
            raise HostAccessError(
                f"no command can be started there (status {self._channel.exit_status}){self._last_words()}",
                where=self._where,
                hint="Does the user have a login shell that runs commands?",
            )

    def _last_words(self) -> str:
        lines = self._err.decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""

    def _silent(self) -> bool:
        """Return whether the output of the command has ended."""
        return bool(self._channel.closed or self._channel.eof_received)

    def _drained(self) -> bool:
        self._receive(0)
        return not self._out

    def _ended(self) -> bool:
        return bool(self._channel.exit_status_ready())

    def _finished(self) -> bool:
        """Return whether the command has ended and all of its output is here."""
        if not self._ended():
            return False
        self._check_link()
        silent, before = self._silent(), len(self._out) + len(self._err)
        self._receive(0)
        if silent:
            return True
        if self._whole:  # the shell that leads it said so on both
            return bool(self._pattern.search(self._out)) and len(self._pattern.findall(self._err)) > 1
        # Others hold its output open. What it has said itself is on the way.
        if self._settling is None or before < len(self._out) + len(self._err):
            self._settling = time.monotonic()
        return time.monotonic() - self._settling > _SETTLE_S

    def _check_link(self) -> None:
        """Raise `LinkLost` when the end of the session is that of the connection."""
        if self._channel.exit_status < 0 and not self._link.outlives(_UNTIL_CUT_S):
            raise self._link.failure()

    def _completed(self, status: int, out: bytes, err: bytes) -> Completed:
        return Completed(self._argv, status, out.decode(errors="replace"), err.decode(errors="replace"))

    def _outcome(self) -> tuple[int, bytes, bytes]:
        self._check_start()
        out, err = self._pattern.split(self._out)[0], self._pattern.split(self._err)[::3][:2][-1]
        self._out.clear()
        status = self._channel.exit_status
        if status < 0:  # even the shell that led it was killed
            status = -signal.SIGKILL
        elif 128 < status <= 128 + signal.SIGRTMAX:
            status = 128 - status
        return int(status), bytes(out), bytes(err)


class InterruptsWait:
    """Context of a short call of paramiko, in which Ctrl-C waits for its end: it takes locks that an exception would
    leave taken. Without effect outside of the main thread."""

    def __enter__(self) -> Self:
        self._came: tuple[int, FrameType | None] | None = None
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # ignored, or of the system: nothing is raised
                self._handler = handler
                signal.signal(signal.SIGINT, self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame


def _unstarted(program: str, status: int, where: str) -> BackendError:
    if status == NOT_FOUND:
        name = PurePosixPath(program).name
        python = "Set `python:` of the cluster or the host to a Python 3.9 or newer that is there."
        hint = python if name.startswith("python") else f"Install {name} there."
        return BackendError(f"{program}: command not found", where=where, hint=hint)
    return BackendError(f"{program} could not be started: Permission denied", where=where)
