"""Objects of S3 as files of this machine: ``s3://bucket/key`` is ``<root>/bucket/key``."""

from __future__ import annotations

import shutil
from pathlib import Path

from orc.launchers.errors import BackendError
from orc.launchers.remote.files import read_range, write_file
from orc.launchers.strict_modes import make_private
from orc.runtime.core.names import safe_relative_name


class LocalStorage:
    """See `training.Storage`; and what a `Service` does with objects."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, uri: str) -> Path:
        """The file of an object, or the directory of a prefix. Raises `BackendError` for what is no S3 address."""
        try:
            if not uri.startswith("s3://"):
                raise ValueError(uri)
            return self.root / safe_relative_name(uri.removeprefix("s3://").rstrip("/"))
        except ValueError:
            raise BackendError(f"not an address in S3: {uri!r}") from None

    def has(self, uri: str) -> bool:
        """Return True when there is an object of that name, or one below it."""
        return uri.startswith("s3://") and self.path(uri).exists()

    def write(self, uri: str, data: bytes | Path) -> None:
        """Store an object, in one step."""
        path = self.path(uri)
        make_private(path.parent)
        write_file(str(path), data.read_bytes() if isinstance(data, Path) else data, 0o600)

    def read(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return at most *limit* bytes of an object from *offset* on; `None` when there is none."""
        try:
            return read_range(str(self.path(uri)), offset, limit)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def fetch(self, uri: str, directory: Path) -> None:
        """Copy the objects below *uri*, or that one object, into *directory*."""
        source = self.path(uri)
        if source.is_file():
            shutil.copyfile(source, directory / source.name)
            return
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.name.endswith(".tmp"):
                target = directory / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    def put(self, uri: str, path: Path) -> None:
        """Store the file at *path* as an object."""
        self.write(uri, path)
