"""What a `Transport` promises about files and pipes, as it is done on the machine itself. All raise `OSError`.

Standard library alone, Python 3.9: this module is also sent to hosts, see `launchers/remote/ssh/remote_hand.py`.
"""

from __future__ import annotations

import array
import fcntl
import os
import signal
import termios
from collections.abc import Iterable


class Writer:
    """A whole file, durably and in one step: a reader sees all of it or the old one. Parents are made, mode 0700."""

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._mode = mode
        parent, name = os.path.split(path)
        make_directories(parent or ".", 0o700)
        self._temporary = os.path.join(parent, f".{name}.{os.urandom(6).hex()}.tmp")
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """More of it. After an error the file is abandoned."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except BaseException:
            self.abandon()
            raise

    def commit(self) -> None:
        """That was all; it appears under its name."""
        try:
            os.fchmod(self._descriptor, self._mode)
            os.fsync(self._descriptor)
            os.replace(self._temporary, self._path)
        except BaseException:
            self.abandon()
            raise
        self._close()

    def abandon(self) -> None:
        """Leave no trace of it."""
        if self._descriptor >= 0:
            self._close()
            os.unlink(self._temporary)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def write_file(path: str, data: bytes, mode: int) -> None:
    """See `Writer`."""
    writer = Writer(path, mode)
    writer.write(data)
    writer.commit()


def make_directories(path: str, mode: int) -> None:
    """A directory and its parents, all with *mode*; those that exist are left as they are."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, mode)
        except FileExistsError:
            if not os.path.isdir(directory):  # otherwise somebody else was faster
                raise


def remove(path: str) -> None:
    """A file; one that is not there is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def read_range(path: str, offset: int, limit: int | None) -> bytes:
    """At most *limit* bytes from *offset* on; none beyond the end, however far that is."""
    with open(path, "rb") as file:
        if offset > os.fstat(file.fileno()).st_size:
            return b""
        file.seek(offset)
        return file.read() if limit is None else file.read(limit)


def read_existing(paths: Iterable[str]) -> dict[str, bytes]:
    """Those of *paths* that are there."""
    found = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                found[path] = file.read()
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def names(path: str) -> list[str]:
    """Sorted names in a directory; empty when there is none."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def waiting(descriptor: int) -> int:
    """Bytes that can be read from a pipe now."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


def kill_group(pid: int) -> None:
    """End the process group of a child that leads one, or is just about to. It was not reaped, so the number is its."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
            return
        except OSError:
            continue  # no such group (yet)
