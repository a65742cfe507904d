"""Connection to a host with a `watchdog` at its other end, and the commands that run over it in sessions of their own.

Each side notices when the other falls silent.
"""

from __future__ import annotations

import json
import secrets
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import paramiko

from orc.launchers.errors import BackendError, BackendUnreachable, HostAccessError, LinkLost, NoSession
from orc.launchers.remote.programs import Program
from orc.launchers.remote.ssh.command import command_line, marks, unstarted
from orc.launchers.remote.ssh.watchdog import TICK_S
from orc.launchers.remote.transport import CommandTimeout, Completed

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.connection import HostConnection

_CHUNK = 1 << 16
_KILLED_WITHIN_S = 5.0  # a killed group has ended, or its disk hangs
_PEEK_S = 0.05  # between looks at the output of a command that takes no input
_SETTLE_S = 2.0  # of silence after its end, where others hold its output open
_UNTIL_CUT_S = 0.5  # between the end of the sessions of a connection and its own
_NOISE = 1 << 20  # bytes that a login may print before the command starts


class SshProcess:
    """See `Process`. One thread at a time may use it."""

    def __init__(
        self,
        link: Link,
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
                raise BackendUnreachable(
                    f"{self._name} ended before it had read all of its input", where=self._link.name
                )
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
            self._receive(_PEEK_S)

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

    def _late(self, how: str) -> CommandTimeout:
        return CommandTimeout(f"{self._name} {how}", where=self._link.name)

    def _send(self, view: memoryview) -> int:
        """Send some input and take pending output; return how much was sent, 0 when there is no room or no end."""
        self._receive(0)
        self._channel.settimeout(_PEEK_S)
        try:
            with InterruptsWait():
                return int(self._channel.send(view[:_CHUNK]))
        except TimeoutError:
            return 0
        except (OSError, EOFError, paramiko.SSHException):
            self._channel.status_event.wait(_PEEK_S)
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
        pause = min(max(0.0, deadline - time.monotonic()), _PEEK_S)
        if self._silent():
            return bool(self._channel.status_event.wait(pause))
        return bool(self._ready.poll(1000 * pause))

    def _look_for_start(self) -> None:
        if found := self._pattern.search(self._out):
            self._group, status = (int(number) for number in found.groups())
            del self._out[: found.end()]
            if status:
                raise unstarted(self._argv[0], status, self._link.name)
        elif len(self._out) > _NOISE:
            raise HostAccessError(
                "the login prints so much that orc's answers are lost",
                where=self._link.name,
                hint="Look for programs that print in ~/.bashrc (or the like) there.",
            )

    def _check_start(self) -> None:
        if self._group is None:
            self._check_link()
            raise HostAccessError(
                f"no command can be started there (status {self._channel.exit_status}){_last_words(bytes(self._err))}",
                where=self._link.name,
                hint="Does the user have a login shell that runs commands?",
            )

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


def _last_words(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


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


_WATCHDOG = Program("remote.ssh.watchdog")
_LEAST_SILENCE_S = 3.0  # a machine under load may be that late
_LOOK_S = 0.5  # between two looks; where one takes much longer, it was we who were stopped, or asleep
_AGAIN_S = 0.05  # until a session is asked for again
_HOST_PATIENCE = 2  # times as long the host waits for us, before it ends what we run there
_SESSIONS = 8  # at a time; sshd takes 10 (MaxSessions)
# The interpreter that is configured, or the usual one where that is not there (yet).
_CHOOSE = (
    'p=$1; shift; case "$p" in "~/"*) p="$HOME/${p#??}";; esac; command -v "$p" >/dev/null 2>&1 || p=python3; '
    'exec "$p" "$@"'
)


class Link:
    """The sessions of one connection. Any number of threads may use it.

    When nothing comes from the host for *silence_s* seconds, the connection is closed, and everything underway raises
    `LinkLost`.
    """

    def __init__(self, name: str, connection: HostConnection, python: str | None) -> None:
        self.name = name
        self.token = secrets.token_hex(8)
        self.sudo = connection.access.sudo
        self._connection = connection
        connection.open()
        self._transport: Any = connection.transport
        self._silence_s = max(connection.access.connect_timeout_s, _LEAST_SILENCE_S)
        self._room = threading.BoundedSemaphore(_SESSIONS + 1)
        self._failure = ""
        self._saying = threading.Lock()
        threading.Thread(target=self._listen, name=f"orc-listen-{name}", daemon=True).start()
        try:
            command = _WATCHDOG.argv(python or "python3", (self.token, f"{_HOST_PATIENCE * self._silence_s:g}"))
            self._watchdog = SshProcess(self, ("/bin/sh", "-c", _CHOOSE, "orc", *command), 3 * self._silence_s)
            self._watchdog.write(_WATCHDOG.packed)
            self.home = self._greeted()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._tick, name=f"orc-tick-{name}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Return whether the link still works."""
        return not self._failure and bool(self._transport.is_active())

    def outlives(self, pause_s: float) -> bool:
        """Return whether the link still works after a pause: sessions end a moment before a cut link counts as cut."""
        self._transport.join(pause_s)
        return self.alive

    def failure(self) -> LinkLost:
        """Return the reason why it cannot be used any more, to be raised."""
        return LinkLost(self._failure or "the connection was cut", where=self.name)

    def session(self, command: str, timeout_s: float) -> Any:
        """Start a command in a new session, to be given to `release`. Raises `LinkLost`, `HostAccessError`."""
        if not self._room.acquire(timeout=timeout_s):
            raise LinkLost(f"{_SESSIONS} commands are underway and none has ended for {timeout_s:g} s", where=self.name)
        try:
            session = self._open(min(timeout_s, 3 * self._silence_s))
            try:
                session.exec_command(command.encode())
            except (paramiko.SSHException, EOFError, OSError) as error:
                if self._transport.is_active():
                    raise HostAccessError(f"no command can be started there: {error}", where=self.name) from error
                raise LinkLost(self.failure().what, where=self.name) from error
            return session
        except BaseException:
            self._room.release()
            raise

    def _open(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._transport.open_session(timeout=self._silence_s)
            except (paramiko.SSHException, EOFError, OSError) as error:
                if not self._transport.is_active():
                    raise NoSession(self.failure().what, where=self.name) from error
                # Less are allowed there than usual, or one is not quite closed yet. paramiko does not always say which.
                if time.monotonic() > deadline:
                    raise HostAccessError(
                        f"it logs us in, but opens no session: {error}",
                        where=self.name,
                        hint="Its sshd needs MaxSessions 2 at least; 10 is usual.",
                    ) from error
                time.sleep(_AGAIN_S)

    def release(self, session: Any) -> None:
        """Close a session."""
        with suppress(OSError, EOFError, paramiko.SSHException):  # closed with the whole connection
            session.close()
        self._room.release()

    def kill(self, group: int) -> None:
        """End a process group there."""
        self._say(f"{group}\n".encode())

    def close(self) -> None:
        """Close the connection; the host ends what still runs there for us."""
        self._fail("the connection was closed")

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        with suppress(EOFError, OSError):  # the way below it, through a jump host, has just broken off
            self._transport.close()
        self._connection.on_close()

    def _greeted(self) -> str:
        """Return the home directory there, which the watchdog reports. Raises `HostAccessError`, `LinkLost`."""
        said = b""
        while not said.endswith(b"\n"):
            piece = self._watchdog.read(1 << 16)
            if not piece:
                done = self._watchdog.wait()
                words = _last_words(done.stderr.encode())
                raise HostAccessError(
                    f"orc's program could not be started there (status {done.status}){words}",
                    where=self.name,
                    hint="It needs Python 3.9 or newer: `python3` on the PATH, or `python:` of cluster or host.",
                )
            said += piece
        return str(json.loads(said.partition(b"\n")[0])["home"])

    def _say(self, words: bytes) -> None:
        try:
            with self._saying:
                self._watchdog.write(words)
        except BackendUnreachable as error:  # nothing would end the commands of this connection any more
            self._fail(f"the watchdog there has ended: {error.what}")

    def _tick(self) -> None:
        while self.alive:
            self._say(b"\n")
            time.sleep(TICK_S)

    def _listen(self) -> None:
        """Notice that nothing comes any more."""
        heard, awake = self._transport.sock, time.monotonic()
        while self.alive:
            began = time.monotonic()
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if now - began > 4 * _LOOK_S:
                awake = now
            if now - max(heard.at, awake) > self._silence_s:
                self._fail(f"it has been silent for {self._silence_s:g} s")
