"""File operations on this machine, those of `LocalTransport` too. All raise `OSError`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import BinaryIO

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # ENXIO: a device or a socket


def write_file(path: str, data: bytes | Iterable[bytes], mode: int, *, new: bool = False) -> None:
    """Write a whole file, durably and in one step: a reader sees all of it or the old one. Parents are made, 0700.

    With *new* it is never written over another one, whoever made that: `FileExistsError`.
    """
    parent, name = os.path.split(path)
    make_directories(parent or ".", 0o700)
    temporary = os.path.join(parent, f".{name}.{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        if new:
            os.link(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        remove(temporary)


def make_directories(path: str, mode: int) -> None:
    """Make a directory and its parents, all with *mode*; those that exist are left as they are."""
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
    """Remove a file; one that is not there is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def read_range(path: str, offset: int, limit: int | None) -> bytes:
    """Return at most *limit* bytes from *offset* on; none beyond the end, however far that is."""
    with open_regular(path) as file:
        if offset > os.fstat(file.fileno()).st_size:
            return b""
        file.seek(offset)
        return file.read() if limit is None else file.read(limit)


def open_regular(path: str) -> BinaryIO:
    """Open the file *path* for reading; a FIFO or a device, which could be waited for for ever, is as if not there.

    Raises `FileNotFoundError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", path)
    return open(descriptor, "rb")


def read_existing(paths: Iterable[str], limit: int) -> dict[str, bytes]:
    """Return the contents of those of *paths* that are files of at most *limit* bytes."""
    found = {}
    for path in paths:
        try:
            with open_regular(path) as file:
                data = file.read(limit + 1)
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise
            continue
        if len(data) <= limit:
            found[path] = data
    return found


def names(path: str) -> list[str]:
    """Return the sorted names in a directory; none when it does not exist."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
