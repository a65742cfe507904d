"""Transports: commands and files of a machine behind one protocol, so that no backend assumes "this machine".

`LocalTransport` is the machine orc runs on, as on a cluster's login node. Paths are absolute POSIX paths over there.
"""

from __future__ import annotations

import abc
import errno
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from orc.launchers.agent.records import RECORD_BYTES
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote import files

if TYPE_CHECKING:
    from orc.launchers.remote.programs import Program


class CommandTimeout(BackendUnreachable):
    """A command did not answer in time and was killed. Whether it had its effect is unknown."""


@dataclass(frozen=True)
class Completed:
    """Result of a command: its exit status (negative for a signal) and its output."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


class WholeFile(NamedTuple):
    """A file to be written."""

    path: str
    data: bytes
    mode: int = 0o644


NO_LINKS: Mapping[str, str] = {}
_WRITERS = 8  # threads: a disk makes files durable together


class Process(Protocol):
    """A running program with pipes. As a context manager it ends the program when it is left."""

    def write(self, data: bytes) -> None:
        """Write to its standard input; waits while it does not read. Raises `BackendUnreachable` when it has ended."""
        ...

    def close_stdin(self) -> None:
        """Close its standard input."""
        ...

    def read(self, size: int) -> bytes:
        """Return 1 to *size* bytes of its standard output, none at the end. Raises `CommandTimeout`."""
        ...

    def wait(self) -> Completed:
        """Wait for its end; return its status and standard error. ``stdout`` holds what was not read yet."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None:
        """Close the channel; a program that still runs is ended there (its whole process group)."""
        ...


class Transport(abc.ABC):
    """Commands and files of one machine."""

    name: str  # the host's name in its cluster; ``local`` for this machine

    @abc.abstractmethod
    def stream(self, argv: Sequence[str], *, timeout_s: float) -> Process:
        """Start a command and return it with its pipes. *timeout_s* limits every single wait, not the whole.

        Raises `BackendError` when the program does not exist there, `BackendUnreachable`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close its connections. The transport opens new ones when it is used again."""

    @abc.abstractmethod
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
        """Run a command and wait for it; any exit status is an answer.

        ``drop_env`` are prefixes of variables that the command must not see (``SQUEUE_`` would change what squeue
        prints), ``keep_env`` are exceptions, ``env`` is set after that. Raises `CommandTimeout` after *timeout_s*
        seconds, `BackendError` when the program does not exist there, `BackendUnreachable` when the machine cannot
        be reached.
        """

    @abc.abstractmethod
    def expand(self, path: str) -> str:
        """Return *path* with a leading ``~`` replaced by the home directory there."""

    @abc.abstractmethod
    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a whole file, durably and in one step (a reader sees all of it or the old one); makes parents, 0700.

        Raises `BackendError` (no space, no permission), `BackendUnreachable`.
        """

    def write_many(
        self, files: Sequence[WholeFile], directories: Sequence[str] = (), links: Mapping[str, str] = NO_LINKS
    ) -> None:
        """Make *directories*, 0700, and symbolic *links* (their targets, by path), and write *files* as `write` does.

        Raises what `write` raises; `NotImplementedError` of hosts that no scheduler submits from.
        """
        raise NotImplementedError(f"{self.name}: files are written one by one")

    @abc.abstractmethod
    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """Make a directory and its parents; one that exists is left as it is."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""

    @abc.abstractmethod
    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """Return bytes from *offset* on, at most *limit*. Raises `FileNotFoundError` when there is no such file."""

    @abc.abstractmethod
    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """Return the contents of those of *paths* that are files of at most *limit* bytes, in one command."""

    @abc.abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; none when it does not exist."""

    # -- programs of ours, in an interpreter that is started for each

    def run_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float, stdin: bytes = b""
    ) -> Completed:
        """`run` a program of ours with *python* there (3.9 or newer; may begin with ``~``)."""
        argv = program.argv(self.expand(python), arguments)
        return self.run(argv, timeout_s=timeout_s, stdin=program.packed + stdin)

    def ask_program(
        self, program: Program, question: Mapping[str, Any], *, python: str, timeout_s: float
    ) -> tuple[dict[str, Any] | None, Completed]:
        """`run_program` with a JSON object as its input; return the one on its last line of output, if that is one."""
        stdin = json.dumps(question).encode()
        done = self.run_program(program, python=python, timeout_s=timeout_s, stdin=stdin)
        try:
            answer = json.loads(done.stdout.strip().rpartition("\n")[2])
        except ValueError:
            answer = None
        return (answer if isinstance(answer, dict) else None), done

    def stream_program(
        self, program: Program, arguments: Sequence[str] = (), *, python: str, timeout_s: float
    ) -> Process:
        """`stream` a program of ours with *python* there (3.9 or newer; may begin with ``~``)."""
        process = self.stream(program.argv(self.expand(python), arguments), timeout_s=timeout_s)
        try:
            process.write(program.packed)
        except BackendUnreachable:
            return process  # it has ended already: whoever reads from it learns why
        except BaseException:
            process.__exit__()
            raise
        return process


class LocalProcess:
    """A program on this machine, see `Process`. One thread at a time may use it."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self._argv, self._timeout_s = tuple(argv), timeout_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process is left
        self._popen = _start(argv, os.environ, subprocess.PIPE, subprocess.PIPE, self._stderr)
        self._stdin, self._stdout = cast(IO[bytes], self._popen.stdin), cast(IO[bytes], self._popen.stdout)
        os.set_blocking(self._stdin.fileno(), False)
        self._out, self._open = bytearray(), True

    def write(self, data: bytes) -> None:
        """See `Process.write`. Output meanwhile is kept, so that neither side waits for the other."""
        view = memoryview(data)
        try:
            while view and not self._stdin.closed:
                if self._await("took no input", writing=True):
                    view = view[os.write(self._stdin.fileno(), view[:65536]) :]
        except BrokenPipeError:
            self._stdin.close()
        if view:
            raise BackendUnreachable(f"{self._name} ended before it had read all of its input")

    def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        self._stdin.close()

    def read(self, size: int) -> bytes:
        """See `Process.read`."""
        while not self._out and self._open:
            self._await("said nothing")
        data = bytes(self._out[:size])
        del self._out[:size]
        return data

    def wait(self) -> Completed:
        """See `Process.wait`."""
        while self._open:
            self._await("did not end", "within")
        try:
            status = self._popen.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandTimeout(f"{self._name} did not end within {self._timeout_s:g} s") from None
        return Completed(self._argv, status, self.read(len(self._out)).decode(errors="replace"), _text(self._stderr))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_group(self._popen)
        for file in (self._stdin, self._stdout, self._stderr):
            file.close()

    @property
    def _name(self) -> str:
        return Path(self._argv[0]).name

    def _await(self, what: str, how: str = "for", *, writing: bool = False) -> bool:
        """Take pending output; return whether the process takes input. Raises `CommandTimeout` when nothing happens."""
        outputs, inputs = [self._stdout] if self._open else [], [self._stdin] if writing else []
        readable, writable, _ = select.select(outputs, inputs, [], self._timeout_s)
        if not readable and not writable:
            raise CommandTimeout(f"{self._name} {what} {how} {self._timeout_s:g} s")
        if readable:
            data = os.read(self._stdout.fileno(), 65536)
            self._out += data
            self._open = bool(data)
        return bool(writable)


class LocalTransport(Transport):
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
        # Files and no pipes: what the command leaves behind may hold them open for as long as it likes.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin or b"")
            given.seek(0)
            popen = _start(argv, {**kept, **(env or {})}, given, out, err)
            try:
                status = popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                what = f"{Path(argv[0]).name} did not answer within {timeout_s:g} s"
                raise CommandTimeout(what) from None
            finally:
                kill_group(popen)
            return Completed(tuple(argv), status, _text(out), _text(err))

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> LocalProcess:
        """See `Transport.stream`."""
        return LocalProcess(argv, timeout_s)

    def close(self) -> None:
        """See `Transport.close`; there are no connections."""

    def expand(self, path: str) -> str:
        """See `Transport.expand`."""
        return str(Path(path).expanduser())

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        with _refused(f"cannot write {path}"):
            files.write_file(path, data, mode)

    def write_many(
        self, files: Sequence[WholeFile], directories: Sequence[str] = (), links: Mapping[str, str] = NO_LINKS
    ) -> None:
        """See `Transport.write_many`."""
        from concurrent.futures import ThreadPoolExecutor

        for directory in directories:
            self.mkdir(directory)
        for path, target in links.items():
            self.mkdir(str(Path(path).parent))
            self.remove(path)
            with _refused(f"cannot make {path}"):
                Path(path).symlink_to(target)
        with ThreadPoolExecutor(_WRITERS) as threads:
            list(threads.map(lambda file: self.write(file.path, file.data, mode=file.mode), files))

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`."""
        with _refused(f"cannot make {path}"):
            files.make_directories(path, mode)

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        with _refused(f"cannot remove {path}"):
            files.remove(path)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        return files.read_range(path, offset, limit)

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        return files.read_existing(paths, limit)

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return files.names(path)


@contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackendError(f"{what}: {error.strerror}", hint=disk_hint(error.errno)) from error


def kill_group(popen: subprocess.Popen[bytes]) -> None:
    """End a child that still runs, with its process group."""
    if popen.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _start(
    argv: Sequence[str], env: Mapping[str, str], stdin: IO[bytes] | int, stdout: IO[bytes] | int, stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
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


def disk_hint(number: int | None) -> str:
    """Return the hint for a file that could not be written, by its error number."""
    return {
        errno.ENOSPC: "the disk is full: free some space, or set `root:` of the cluster to another file system",
        errno.EDQUOT: "your disk quota is used up: free some space, or set `root:` of the cluster elsewhere",
        errno.EACCES: "check the permissions, or set `root:` of the cluster to a directory that you can write",
        errno.EROFS: "the file system is read-only; set `root:` of the cluster to a directory that you can write",
    }.get(number or 0, "")
