"""A connection to a host with a `watchdog` at its other end: each side notices when the other falls silent."""

from __future__ import annotations

import json
import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import paramiko

from orc.launchers.errors import BackendUnreachable
from orc.launchers.remote.programs import Program
from orc.launchers.remote.ssh.errors import HostAccessError, LinkLost, NoSession
from orc.launchers.remote.ssh.process import SshProcess
from orc.launchers.remote.ssh.watchdog import TICK_S

if TYPE_CHECKING:
    from orc.launchers.remote.ssh.connection import HostConnection

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
                words = done.stderr.strip().splitlines()[-1:]
                raise HostAccessError(
                    f"orc's program could not be started there (status {done.status})"
                    + "".join(f": {word[:300]}" for word in words),
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
