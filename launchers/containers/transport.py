"""`Transport` into a container of a platform that can run a command there: by way of `containers.command_program`.

`HelperTransport` makes the container that it needs, `attach` gives a command the streams of this process.
"""

from __future__ import annotations

import abc
import io
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from orc.launchers.agent.records import RECORD_BYTES
from orc.launchers.containers.http import GONE, ApiRefusal
from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import CommandTimeout, Completed, Process, Transport

DISK_S = 60.0  # a file operation that takes longer hangs
PIECE = 1 << 16
START_S = 180.0  # until a helper runs: its image may have to be pulled
_LOOK_S = 0.25
COMMAND_PROGRAM = Program("containers.command_program", ("remote.files",))


class Channel(Protocol):
    """The streams of a command in a container."""

    def send(self, data: bytes) -> None:
        """Write to its standard input. Raises `OSError` when it has ended."""
        ...

    def receive(self) -> tuple[str, bytes]:
        """Wait for what comes next: ``out`` or ``err`` with some output, ``end`` with the exit status in digits.

        Raises `OSError` when the connection was cut, `BackendError` when the command could not be started.
        """
        ...

    def close(self) -> None:
        """End the connection, from any thread."""
        ...


def command_request(argv: Sequence[str]) -> dict[str, Any]:
    """Return what `containers.command_program` takes for a command."""
    return {"argv": list(argv), "env": {}, "drop": [], "keep": []}


class ContainerProcess(Process):
    """A program in a container: what `containers.command_program` does for *request*, the first that it is sent."""

    def __init__(self, channel: Channel, request: Mapping[str, Any], timeout_s: float, name: str) -> None:
        self._channel, self._timeout_s, self._name = channel, timeout_s, name
        self._argv = tuple(request.get("argv", ()))
        self._changed = threading.Condition()
        self._streams = {"out": bytearray(), "err": bytearray(), "end": bytearray()}
        self._open = True
        self._why: BackendError = BackendUnreachable(f"{name}: the connection was cut")
        threading.Thread(target=self._receive, name=f"container {name}", daemon=True).start()
        self._send(COMMAND_PROGRAM.packed)
        self.send(json.dumps(dict(request)).encode())

    def _receive(self) -> None:
        kind = ""
        try:
            while kind != "end":
                kind, data = self._channel.receive()
                with self._changed:
                    self._streams[kind] += data
                    self._changed.notify_all()
        except BackendError as error:
            self._why = type(error)(f"{self._name}: {error.what}", where=error.where, hint=error.hint)
        except OSError as error:
            self._why = BackendUnreachable(f"{self._name}: the connection was cut: {error}")
        finally:
            with self._changed:
                self._open = False
                self._changed.notify_all()

    def send(self, data: bytes) -> None:
        """Send a frame to the program. Raises `BackendUnreachable` when it has ended."""
        self._send(struct.pack(">I", len(data)) + data)

    def _send(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), PIECE):
                self._channel.send(data[start : start + PIECE])
        except OSError:
            raise BackendUnreachable(f"{self._name} ended before it had read all of its input") from None

    def write(self, data: bytes) -> None:
        """See `Process.write`."""
        for start in range(0, len(data), PIECE):
            if not self._open:
                raise BackendUnreachable(f"{self._name} ended before it had read all of its input")
            self.send(data[start : start + PIECE])

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if self._open:
            self.send(b"")

    def read(self, size: int) -> bytes:
        """See `Process.read`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._streams["out"] or not self._open, self._timeout_s):
                raise CommandTimeout(f"{self._name} said nothing for {self._timeout_s:g} s")
            data = bytes(self._streams["out"][:size])
            del self._streams["out"][:size]
            return data

    def gather(self) -> tuple[int, bytes, str]:
        """Wait for the end; return the exit status, what is left of the output, and standard error."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open, self._timeout_s):
                raise CommandTimeout(f"{self._name} did not end within {self._timeout_s:g} s")
        if not self._streams["end"]:
            raise self._why
        return int(self._streams["end"]), bytes(self._streams["out"]), self._streams["err"].decode(errors="replace")

    def wait(self) -> Completed:
        """See `Process.wait`."""
        status, out, err = self.gather()
        return Completed(self._argv, status, out.decode(errors="replace"), err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()


class ContainerTransport(Transport):
    """Files and commands of a container that *python* is in; `channel` starts a command there."""

    def __init__(self, name: str, python: str) -> None:
        self.name, self._python = name, python

    @abc.abstractmethod
    def channel(self, command: Sequence[str]) -> Channel:
        """Start a command. Raises `BackendError`, `BackendUnreachable`."""

    def expand(self, path: str) -> str:
        """See `Transport.expand`; there is no home directory."""
        return path

    def _start(self, request: Mapping[str, Any], timeout_s: float, name: str) -> ContainerProcess:
        return ContainerProcess(self.channel(COMMAND_PROGRAM.argv(self._python)), request, timeout_s, name)

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> ContainerProcess:
        """See `Transport.stream`."""
        return self._start(command_request(argv), timeout_s, argv[0].rpartition("/")[2])

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        drop_env: Sequence[str] = (),
        keep_env: Sequence[str] = (),
        stdin: bytes | None = None,
    ) -> Completed:
        """See `Transport.run`."""
        request = {"argv": list(argv), "env": dict(env or {}), "drop": list(drop_env), "keep": list(keep_env)}
        with self._start(request, timeout_s, argv[0].rpartition("/")[2]) as process:
            process.write(stdin or b"")
            process.close_stdin()
            return process.wait()

    def _ask(self, do: str, data: bytes | None = None, **request: Any) -> bytes:
        with self._start({"do": do, **request}, DISK_S, f"{do} {request.get('path', '')}".strip()) as process:
            if data is not None:
                process.send(data)
            status, out, err = process.gather()
        if out[:1] == b"+":
            return out[1:]
        if out[:1] != b"-":
            raise BackendUnreachable(f"{do}: {err.strip()[-300:] or f'exit status {status}'}", where=self.name)
        number, why = json.loads(out[1:])
        raise OSError(number, why, request.get("path"))

    def _change(self, do: str, path: str, **request: Any) -> None:
        try:
            self._ask(do, path=path, **request)
        except OSError as error:
            raise BackendError(f"cannot {do} {path}: {error.strerror}", where=self.name) from None

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        self._change("write", path, data=data, mode=mode)

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`."""
        self._change("mkdir", path, mode=mode)

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        self._change("remove", path)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        return self._ask("read", path=path, offset=offset, limit=limit)

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        if not (wanted := list(paths)):
            return {}
        sizes, _, data = self._ask("read_many", paths=wanted, limit=limit).partition(b"\n")
        contents = io.BytesIO(data)
        return {path: contents.read(size) for path, size in json.loads(sizes).items()}

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return [str(name) for name in json.loads(self._ask("names", path=path))]


def wait_for(done: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether *done* has become true in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class HelperTransport(ContainerTransport):
    """Files and commands through a helper, which *what* names for people; it stays when the transport is closed."""

    def __init__(self, name: str, python: str, what: str, where: str) -> None:
        super().__init__(name, python)
        self._what, self._where, self._ready = what, where, False

    @abc.abstractmethod
    def status(self) -> tuple[bool, str, bool]:
        """Return whether the helper runs; else why it does not (yet), and whether it never will. Makes it."""

    @abc.abstractmethod
    def start(self, command: Sequence[str]) -> Channel:
        """Start a command in the helper. Raises `ApiRefusal` where it has gone."""

    def close(self) -> None:
        """See `Transport.close`."""
        self._ready = False

    def channel(self, command: Sequence[str]) -> Channel:
        """See `ContainerTransport.channel`."""
        for last in (False, True):
            if not self._ready:
                self._open()
            try:
                return self.start(command)
            except ApiRefusal as error:
                if last or error.code not in GONE:
                    raise
                self._ready = False  # it has gone meanwhile
        raise AssertionError

    def _open(self) -> None:
        why, never = "", False

        def decided() -> bool:
            nonlocal why, never
            self._ready, why, never = self.status()
            return self._ready or never

        wait_for(decided, START_S)
        if not self._ready:
            what = f"{self._what} {self.name} does not start: {why or 'it is pending'}"
            raise (BackendError if never else BackendUnreachable)(what, where=self._where)


def attach(start: Callable[[Sequence[str]], Channel], python: str, words: Sequence[str]) -> int:
    """Run a command that *start* starts by way of `containers.command_program`; returns its exit status."""
    channel = start(COMMAND_PROGRAM.argv(python))
    with ContainerProcess(channel, command_request(words), threading.TIMEOUT_MAX, words[0]) as process:

        def feed() -> None:
            try:
                while data := os.read(0, PIECE):
                    process.write(data)
                process.close_stdin()
            except (LaunchError, OSError):
                return  # it has ended

        threading.Thread(target=feed, daemon=True).start()
        while data := process.read(PIECE):
            os.write(1, data)
        status, _, errors = process.gather()
        os.write(2, errors.encode())
        return status


def attach_terminal(channel: Channel, resize: Callable[[int, int], None]) -> int:
    """Show a command that has a terminal over there at this one; returns its exit status.

    *resize* takes columns and lines.
    """
    import termios
    import tty

    def resized(*_: object) -> None:
        resize(*shutil.get_terminal_size())

    def feed() -> None:
        while data := os.read(0, PIECE):
            channel.send(data)
        channel.send(b"\x04")  # the end, as a terminal says it

    saved = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        if saved:
            tty.setraw(0)
            signal.signal(signal.SIGWINCH, resized)
        resized()
        threading.Thread(target=feed, daemon=True).start()
        while (said := channel.receive())[0] != "end":
            os.write(1, said[1])
        return int(said[1])
    finally:
        if saved:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
