"""Where a backend's commands run and its files lie: behind one protocol, so that no backend assumes "this machine".

`LocalTransport` is the machine orc runs on, as on a cluster's login node. Paths are absolute POSIX paths over there.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, Self, cast

from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote import files

if TYPE_CHECKING:
    from orc.launchers.remote.programs import Program


class CommandTimeout(BackendUnreachable):
    """A command did not answer in time and was killed. Whether it had its effect is unknown."""


@dataclass(frozen=True)
class Completed:
    """How a command ended: its exit status (negative for a signal) and what it printed."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


class Process(Protocol):
    """A program that runs there while we talk to it. As a context manager it ends the program when it is left."""

    def write(self, data: bytes) -> None:
        """To its standard input; waits while it does not read. Raises `BackendUnreachable` when it is gone."""
        ...

    def close_stdin(self) -> None:
        """Nothing more will be written."""
        ...

    def read(self, size: int) -> bytes:
        """At least one and at most *size* bytes of its standard output; empty at the end. Raises `CommandTimeout`."""
        ...

    def wait(self) -> Completed:
        """Its exit status and what it said on standard error; ``stdout`` holds what was not read yet."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Close the channel; a program that still runs is ended there (its whole process group)."""
        ...


class Transport(Protocol):
    """A machine that can be told to do things."""

    name: str  # the host's name in its cluster; ``local`` for this machine

    def stream(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Process:
        """Start one command there and talk to it. *timeout_s* limits every single wait, not the whole.

        Raises `BackendError` when the program does not exist there, `BackendUnreachable`.
        """
        ...

    def close(self) -> None:
        """Let go of connections. The transport opens new ones when it is used again."""
        ...

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
        """Run one command there and wait for it; any exit status is an answer.

        ``drop_env`` are prefixes of variables that the command must not see (``SQUEUE_`` would change what squeue
        prints), ``keep_env`` are exceptions, ``env`` is set after that. Raises `CommandTimeout` after *timeout_s*
        seconds, `BackendError` when the program does not exist there, `BackendUnreachable` when the machine cannot
        be reached.
        """
        ...

    def run_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float, stdin: bytes = b""
    ) -> Completed:
        """`run` a program of ours with *python* there (3.9 or newer; may begin with ``~``)."""
        ...

    def stream_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float
    ) -> Process:
        """`stream` a program of ours with *python* there (3.9 or newer; may begin with ``~``)."""
        ...

    def expand(self, path: str) -> str:
        """*path* with a leading ``~`` replaced by the home directory there."""
        ...

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a whole file, durably and in one step (a reader sees all of it or the old one); makes parents, 0700.

        Raises `BackendError` (no space, no permission), `BackendUnreachable`.
        """
        ...

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """Make a directory and its parents; one that exists is left as it is."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        ...

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Bytes from *offset* on, at most *limit*. Raises `FileNotFoundError` when there is no such file."""
        ...

    def read_many(self, paths: Iterable[str]) -> dict[str, bytes]:
        """The small files among *paths* that exist, in one round trip."""
        ...

    def names(self, path: str) -> list[str]:
        """Sorted names in a directory; empty when there is none."""
        ...


class LocalProcess:
    """A program on this machine, see `Process`. One thread at a time may use it."""

    def __init__(self, argv: Sequence[str], timeout_s: float, env: Mapping[str, str]) -> None:
        self._argv = tuple(argv)
        self._timeout_s = timeout_s
        self._popen = _start(argv, env)
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        self._stdin, self._stdout, self._stderr = (cast(IO[bytes], pipe) for pipe in pipes)
        self._said = {self._stdout: bytearray(), self._stderr: bytearray()}
        self._ready = selectors.DefaultSelector()
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for source in (self._stdout, self._stderr):
            self._ready.register(source, selectors.EVENT_READ)
        self._end = os.pidfd_open(self._popen.pid)
        self._ready.register(self._end, selectors.EVENT_READ)

    def write(self, data: bytes) -> None:
        """See `Process.write`. What the program says meanwhile is kept, so that neither waits for the other."""
        view = memoryview(data)
        while view and not self._stdin.closed:
            self._ready.register(self._stdin, selectors.EVENT_WRITE)
            try:
                if not self._carry(self._timeout_s):
                    raise self._late(f"took no input for {self._timeout_s:g} s")
            finally:
                self._ready.unregister(self._stdin)
            view = view[self._feed(view) :]
        if view:
            raise BackendUnreachable(f"{self._name} ended before it had read all of its input")

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        self._stdin.close()

    def read(self, size: int) -> bytes:
        """See `Process.read`."""
        buffer = self._said[self._stdout]
        while not buffer and self._stdout in self._ready.get_map():
            if not self._carry(self._timeout_s):
                raise self._late(f"said nothing for {self._timeout_s:g} s")
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    def wait(self) -> Completed:
        """See `Process.wait`."""
        while self._ready.get_map():
            if not self._carry(self._timeout_s):
                raise self._late(f"did not end within {self._timeout_s:g} s")
        out, err = (bytes(said).decode(errors="replace") for said in self._said.values())
        self._said[self._stdout].clear()
        return Completed(self._argv, self._popen.wait(), out, err)

    def finish(self, stdin: bytes | None) -> Completed:
        """Give it all its input and wait for its end, *timeout_s* seconds in all. Raises `CommandTimeout`."""
        deadline = time.monotonic() + self._timeout_s
        view = memoryview(stdin or b"")
        while self._end in self._ready.get_map():
            feeding = bool(view) and not self._stdin.closed
            if feeding:
                self._ready.register(self._stdin, selectors.EVENT_WRITE)
            else:
                self.close_stdin()
            if not self._carry(max(0.0, deadline - time.monotonic())):
                raise self._late(f"did not answer within {self._timeout_s:g} s")
            if feeding:
                self._ready.unregister(self._stdin)
                view = view[self._feed(view) :]
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, 9)
        self._ready.close()
        os.close(self._end)
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()
        self._popen.wait()

    @property
    def _name(self) -> str:
        return Path(self._argv[0]).name

    def _late(self, how: str) -> CommandTimeout:
        return CommandTimeout(f"{self._name} {how}")

    def _feed(self, view: memoryview) -> int:
        """Give it some input; closes the pipe that it does not read any more. The bytes that it took."""
        try:
            return os.write(self._stdin.fileno(), view[:65536])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self._stdin.close()
            return 0

    def _carry(self, timeout_s: float) -> bool:
        """Wait until something happens, and read what can be read; false when nothing happened in *timeout_s*."""
        ready = self._ready.select(timeout_s)
        pipes = [source for source in self._said if source in self._ready.get_map()]
        if any(key.fileobj is self._end for key, _ in ready):
            # What it said is in the pipes by now. What comes later is from others who hold them open.
            for source in pipes:
                self._said[source] += (
                    os.read(source.fileno(), size) if (size := files.waiting(source.fileno())) else b""
                )
                self._ready.unregister(source)
            self._ready.unregister(self._end)
            return True
        for source in pipes:
            with suppress(BlockingIOError):
                data = os.read(source.fileno(), 65536)
                self._said[source] += data
                if not data:
                    self._ready.unregister(source)
        return bool(ready)


class LocalTransport:
    """This machine."""

    name = "local"

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
        """See `Transport.run`. The command gets no terminal, and its whole process group dies with a time-out."""
        dropped = tuple(drop_env)
        kept = {k: v for k, v in os.environ.items() if k in keep_env or not k.startswith(dropped)}
        with LocalProcess(argv, timeout_s, {**kept, **(env or {})}) as process:
            return process.finish(stdin)

    def stream(self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> LocalProcess:
        """See `Transport.stream`."""
        return LocalProcess(argv, timeout_s, {**os.environ, **(env or {})})

    def run_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float, stdin: bytes = b""
    ) -> Completed:
        """See `Transport.run_program`."""
        return run_anew(self, program, arguments, python=python, timeout_s=timeout_s, stdin=stdin)

    def stream_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float
    ) -> Process:
        """See `Transport.stream_program`."""
        return stream_anew(self, program, arguments, python=python, timeout_s=timeout_s)

    def close(self) -> None:
        """There is nothing to let go of."""

    def expand(self, path: str) -> str:
        """See `Transport.expand`."""
        return str(Path(path).expanduser())

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        try:
            files.write_file(path, data, mode)
        except OSError as error:
            raise BackendError(f"cannot write {path}: {error.strerror}", hint=disk_hint(error)) from error

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`."""
        try:
            files.make_directories(path, mode)
        except OSError as error:
            raise BackendError(f"cannot make {path}: {error.strerror}", hint=disk_hint(error)) from error

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        try:
            files.remove(path)
        except OSError as error:
            raise BackendError(f"cannot remove {path}: {error.strerror}", hint=disk_hint(error)) from error

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        return files.read_range(path, offset, limit)

    def read_many(self, paths: Iterable[str]) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        return files.read_existing(paths)

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return files.names(path)


def run_anew(
    transport: Transport, program: Program, arguments: Sequence[str], *, python: str, timeout_s: float, stdin: bytes
) -> Completed:
    """`Transport.run_program` with an interpreter that is started for it."""
    argv = program.argv(transport.expand(python), arguments)
    return transport.run(argv, timeout_s=timeout_s, stdin=program.preface + stdin)


def stream_anew(
    transport: Transport, program: Program, arguments: Sequence[str], *, python: str, timeout_s: float
) -> Process:
    """`Transport.stream_program` with an interpreter that is started for it."""
    process = transport.stream(program.argv(transport.expand(python), arguments), timeout_s=timeout_s)
    try:
        process.write(program.preface)
    except BackendUnreachable:
        return process  # it has ended already: whoever reads from it learns why
    except BaseException:
        process.__exit__()
        raise
    return process


def _start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C at the prompt must not cut a submission in half
        )
    except FileNotFoundError:
        raise BackendError(
            f"{argv[0]}: command not found",
            hint=f"orc runs {Path(argv[0]).name} where the cluster is entered; is this its login node?",
        ) from None
    except OSError as error:
        raise BackendError(f"{argv[0]} could not be started: {error.strerror}") from error


def disk_hint(error: OSError) -> str:
    """What to do about a file that could not be written."""
    import errno

    return {
        errno.ENOSPC: "the disk is full: free some space, or set `root:` of the cluster to another file system",
        errno.EDQUOT: "your disk quota is used up: free some space, or set `root:` of the cluster elsewhere",
        errno.EACCES: "check the permissions, or set `root:` of the cluster to a directory that you can write",
        errno.EROFS: "the file system is read-only; set `root:` of the cluster to a directory that you can write",
    }.get(error.errno or 0, "")
