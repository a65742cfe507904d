"""Checkpoints on object stores: ``s3://bucket/run`` through boto3, all others (``gs://...``) through fsspec's drivers.

Such stores have no rename, but one object appears complete or not at all. So the manifest is the commit: it is
written last, and files without it are no checkpoint. A checkpoint that is saved again gets its new files under a new
prefix; the new manifest takes the place of the old one, and only then do the old files go.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import NAME, NUMBERED, Manifest, manifest_from, wrong_sizes
from orc.runtime.checkpoint.storage import s3
from orc.runtime.checkpoint.storage.durable import Checksum, FileRecord, Hashing

_READ = 4 * 1024 * 1024  # bytes per read
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Remote:
    """A directory of an object store."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rstrip("/").rpartition("/")[2]

    @cached_property
    def system(self) -> tuple[Any, str]:
        """The file system, and the path in it. Raises `CheckpointError` when there is no driver."""
        try:
            return _open(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(f"{self.url} cannot be opened: {error}") from None

    def make_directory(self) -> None:
        """For stores that have directories (SFTP, HDFS); others ignore it."""
        system, path = self.system
        # Some stores look whether the bucket is there, which a role that may only write objects may not.
        with suppress(PermissionError):
            system.makedirs(path, exist_ok=True)

    def read(self) -> bytes:
        """The whole object."""
        system, path = self.system
        system.invalidate_cache()
        return bytes(system.cat_file(path))

    def replace(self, data: bytes) -> None:
        """Make the object be *data*, in one step."""
        system, path = self.system
        system.pipe_file(path, data)

    def remove(self) -> None:
        """Remove the object, if it is there."""
        system, path = self.system
        with suppress(FileNotFoundError):
            system.rm_file(path)

    def remove_all(self, names: Collection[str]) -> None:
        """Remove the objects *names* below, those that are there, in as few requests as the store allows."""
        system, path = self.system
        try:
            system.rm([f"{path}/{name}" for name in names])
        except FileNotFoundError:  # some are not there: the others one by one
            in_parallel(lambda name: (self / name).remove(), names)

    def remove_tree(self) -> None:
        """Remove everything below; the manifest first, so that no half of it looks whole."""
        (self / NAME).remove()
        system, path = self.system
        system.invalidate_cache()
        with suppress(FileNotFoundError):
            system.rm(path, recursive=True)

    def size(self, name: str) -> int | None:
        """Bytes of the object *name* below; `None` where there is none."""
        system, path = self.system
        system.invalidate_cache()
        try:
            return int(system.info(f"{path}/{name}")["size"])
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Bytes of all objects below, however deep, by name: one listing."""
        system, path = self.system
        system.invalidate_cache()
        start = len(path.rstrip("/")) + 1
        return {str(name)[start:]: int(one["size"]) for name, one in system.find(path, detail=True).items()}

    def entries(self) -> list[str]:
        """Names directly below."""
        system, path = self.system
        system.invalidate_cache()
        try:
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in system.ls(path, detail=False))
        except FileNotFoundError:
            return []


def _open(url: str) -> tuple[Any, str]:
    if urlsplit(url).scheme in s3.SCHEMES:
        return s3.open_url(url)
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("it needs fsspec: pip install fsspec") from None
    system, path = fsspec.core.url_to_fs(url)
    return system, str(path)


Location = Path | Remote


def place(text: object) -> Location:
    """A `Path` for what is one, also in the form ``file:///...``; else a `Remote`."""
    name = str(text)
    if "://" not in name:
        return Path(name)
    parts = urlsplit(name)
    return Path(unquote(parts.path)) if parts.scheme in ("file", "local") else Remote(name)


class RemoteFile(Hashing):
    """A new object; it is there after `close`."""

    chunk = 64 * 1024 * 1024

    def __init__(self, remote: Remote) -> None:
        super().__init__()
        system, path = remote.system
        self._file: Any = system.open(path, "wb")

    def _put(self, data: memoryview) -> int:
        self._file.write(data)
        return len(data)

    def _finish(self) -> None:
        self._file.close()

    def _drop(self) -> None:
        # Closing would make half of it appear.
        if hasattr(self._file, "discard"):
            self._file.discard()
        self._file.closed = True


def upload(path: Path, remote: Remote) -> FileRecord:
    """Copy a local file."""

    def copy(target: Hashing) -> None:
        with path.open("rb") as source:
            while data := source.read(_READ):
                target.write(data)

    return RemoteFile(remote).fill(copy)


def read_manifest(directory: Remote) -> Manifest:
    """The manifest of the checkpoint *directory*. Raises `CheckpointError` when it is none."""
    return manifest_from(directory, (directory / NAME).read)


def problems(directory: Remote, manifest: Manifest) -> list[str]:
    """Return what `wrong_sizes` says of *directory*."""
    sizes = directory.sizes()
    return wrong_sizes(manifest, lambda name: sizes.get(manifest.prefix + name))


def fetch(directory: Remote, manifest: Manifest, names: Iterable[str], target: Path) -> list[str]:
    """Copy the files *names* into the local directory *target*; which of them do not hold what was saved.

    A file is there once it is whole, so that several ranks may copy the same one.
    """

    def copy(name: str) -> str | None:
        if name not in manifest.files:
            return f"{name} is missing"
        total, size = Checksum(), 0
        incomplete = target / f"{name}.{secrets.token_hex(8)}"
        incomplete.parent.mkdir(parents=True, exist_ok=True)
        system, path = directory.system
        with system.open(f"{path}/{manifest.prefix}{name}", "rb") as source, incomplete.open("wb") as sink:
            while data := source.read(_READ):
                sink.write(data)
                total.update(memoryview(data))
                size += len(data)
        if FileRecord(size, total.value()) != manifest.files[name]:
            return f"{name} does not hold what was saved (checksum differs)"
        incomplete.replace(target / name)
        return None

    return [line for line in in_parallel(copy, names) if line is not None]


def in_parallel(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what *action* gives for each of *items*: requests to a store are waited for together."""
    items = list(items)
    with ThreadPoolExecutor(min(s3.AT_ONCE, max(len(items), 1))) as pool:
        pending = [s3.submit(pool, action, item) for item in items]
        try:
            return [one.result() for one in pending]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True)
class RemoteRoot:
    """A directory of ``checkpoint_<n>`` on an object store; see `CheckpointRoot`."""

    path: Remote

    def committed(self) -> list[tuple[int, Remote]]:
        """Complete checkpoints with their numbers, oldest first."""
        return _committed(self._numbered())

    def numbered(self, number: int) -> Remote:
        """The directory of checkpoint *number*, there or not."""
        return self.path / f"checkpoint_{number}"

    def next(self, at_least: int = 0) -> int:
        """Number of the next checkpoint: after every one that is there, complete or not."""
        return max([at_least, *(number + 1 for number, _ in self._numbered())])

    def retain(self, keep: int | None) -> None:
        """Remove complete checkpoints beyond the *keep* newest, and incomplete ones before the newest."""
        there = self._numbered()
        whole = _committed(there)
        kept = {number for number, _ in (whole if keep is None else whole[-max(keep, 1) :])}
        removed = [directory for number, directory in there if number not in kept and whole and number < whole[-1][0]]
        in_parallel(Remote.remove_tree, removed)

    def _numbered(self) -> list[tuple[int, Remote]]:
        matches = [(match, name) for name in self.path.entries() if (match := NUMBERED.fullmatch(name))]
        return sorted(((int(match[1]), self.path / name) for match, name in matches), key=lambda pair: pair[0])


def _committed(directories: Sequence[tuple[int, Remote]]) -> list[tuple[int, Remote]]:
    def complete(numbered: tuple[int, Remote]) -> bool:
        try:
            return not problems(numbered[1], read_manifest(numbered[1]))
        except CheckpointError:
            return False

    return [pair for pair, whole in zip(directories, in_parallel(complete, directories), strict=True) if whole]
