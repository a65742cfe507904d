"""Hashes of files that may change meanwhile, and a cache of the hashes of those that did not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orc.launchers.errors import BundleError
from orc.launchers.strict_modes import make_private

_CHUNK = 1 << 20
_FORMAT = 1
# A file written twice within one tick of the file system's clock can change without a change of its times. Hashes of
# files younger than this are not kept ("racily clean" in git's words). FAT and old NFS servers tick every 2 seconds.
RACY_NS = 2_000_000_000

Stamp = tuple[int, int, int, int]


def stamp(status: os.stat_result) -> Stamp:
    """Return the values that change when a file changes: size, modification and change time (ns), inode."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def hash_file(path: bytes, on_read: Callable[[int], None] | None = None) -> tuple[str, os.stat_result]:
    """Return SHA-256 and status of a regular file, consistent with each other.

    *on_read* is called with the number of bytes of each piece that was read. A file that changes while it is read is
    read once more. Raises `BundleError` when it does not hold still, `OSError` when it cannot be read.
    """
    for _ in range(2):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            before = os.fstat(fd)
            hashed, size = hashlib.sha256(), 0
            # Not to the end of the file: it may grow as fast as it is read.
            while size <= before.st_size and (chunk := os.read(fd, min(before.st_size + 1, _CHUNK))):
                hashed.update(chunk)
                size += len(chunk)
                if on_read is not None:
                    on_read(len(chunk))
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if stamp(before) == stamp(after) and size == after.st_size:
            return hashed.hexdigest(), after
    raise BundleError(
        "the file changes while it is read",
        where=os.fsdecode(path),
        hint="Wait until it is written, or exclude it in .orcignore or workdir.exclude.",
    )


class StatCache:
    """Hashes of files by path, valid while their stamps are the same. A lost or damaged cache costs time only.

    ``with`` saves it when something changed. Paths that were not asked for are forgotten.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._old: Mapping[str, list[int | str]] = {}
        self._new: dict[str, list[int | str]] = {}
        self._changed = False
        self._started_ns = time.time_ns()

    def __enter__(self) -> StatCache:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                data = json.loads(self._file.read_bytes())
                if isinstance(data, dict) and data.get("format") == _FORMAT and isinstance(data.get("files"), dict):
                    self._old = data["files"]
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None and self._file is not None and (self._changed or len(self._new) != len(self._old)):
            # A cache that cannot be written must not stop a submission.
            with contextlib.suppress(OSError):
                self._save(self._file)

    def digest(
        self, key: str, path: bytes, status: os.stat_result, on_read: Callable[[int], None] | None = None
    ) -> tuple[str, os.stat_result]:
        """Return SHA-256 and status of the file at *path*, whose last status was *status*. As `hash_file`."""
        known = self._old.get(key)
        if known is not None and tuple(known[:4]) == stamp(status) and isinstance(known[4], str):
            self._new[key] = known
            if on_read is not None:
                on_read(status.st_size)
            return known[4], status
        digest, status = hash_file(path, on_read)
        if max(status.st_mtime_ns, status.st_ctime_ns) < self._started_ns - RACY_NS:
            self._new[key] = [*stamp(status), digest]
            self._changed = True
        return digest, status

    def _save(self, file: Path) -> None:
        text = json.dumps({"format": _FORMAT, "files": self._new}, separators=(",", ":"))
        temporary = file.with_name(f".{file.name}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            make_private(file.parent)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as out:
                out.write(text)
            temporary.replace(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
