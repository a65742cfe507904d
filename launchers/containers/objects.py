"""The object store that a platform's containers share with the submitting machine, opened by its URL.

``s3://...`` is reached through boto3, all others (``gs://...``) through fsspec's drivers. Credentials, region and
endpoint come from where the library takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from orc.launchers.agent.records import RECORD_BYTES
from orc.launchers.containers.mirror import open_url
from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.remote.transport import Transport
from orc.runtime.checkpoint.storage import s3

SIDE_BY_SIDE = 16


class ObjectStore(Protocol):
    """Objects by their URIs. All methods raise `BackendUnreachable` without an answer, `BackendError` otherwise."""

    def exists(self, uri: str) -> bool:
        """Return True when there is such an object."""
        ...

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return at most *limit* bytes of an object from *offset* on; `None` when there is no object."""
        ...

    def get_many(self, uris: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return the contents of the objects that exist and have at most *limit* bytes, fetched side by side."""

        def get(uri: str) -> bytes | None:
            return self.get(uri, limit=limit + 1)

        found = list(map(get, uris[:1]))  # a client is made once, not in every thread
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            found += pool.map(get, uris[1:])
        return {uri: data for uri, data in zip(uris, found, strict=True) if data is not None and len(data) <= limit}

    def put(self, uri: str, data: bytes | Path) -> None:
        """Write an object (the bytes, or those of a file), encrypted, in one step."""
        ...

    def delete(self, uri: str) -> None:
        """Remove an object, if it is there."""
        ...


@contextmanager
def _errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, ValueError, PermissionError) as error:
        raise BackendError(str(error), where=uri) from None
    except Exception as error:  # noqa: BLE001 - drivers of fsspec have errors of their own
        raise BackendUnreachable(str(error) or type(error).__name__, where=uri) from None


class UrlObjects(ObjectStore):
    """Objects by their URLs."""

    def exists(self, uri: str) -> bool:
        """See `ObjectStore.exists`."""
        with _errors(uri):
            system, path = open_url(s3, uri)
            system.invalidate_cache()
            return bool(system.exists(path))

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """See `ObjectStore.get`."""
        with _errors(uri), suppress(FileNotFoundError):
            system, path = open_url(s3, uri)
            return bytes(system.cat_file(path, start=offset, end=None if limit is None else offset + limit))
        return None

    def put(self, uri: str, data: bytes | Path) -> None:
        """See `ObjectStore.put`."""
        with _errors(uri):
            system, path = open_url(s3, uri)
            system.pipe_file(path, data if isinstance(data, bytes) else data.read_bytes())

    def delete(self, uri: str) -> None:
        """See `ObjectStore.delete`."""
        with _errors(uri), suppress(FileNotFoundError):
            system, path = open_url(s3, uri)
            system.rm_file(path)

    def names(self, uri: str) -> list[str]:
        """Return the sorted names directly below."""
        with _errors(uri), suppress(FileNotFoundError):
            system, path = open_url(s3, uri)
            system.invalidate_cache()
            return sorted(str(each).rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False))
        return []


class UrlTransport(Transport):
    """Files of an object store; no command runs there."""

    def __init__(self, name: str) -> None:
        self.name, self.objects = name, UrlObjects()

    def stream(self, argv: Sequence[str], *, timeout_s: float) -> NoReturn:
        """See `Transport.stream`."""
        raise BackendError(f"{argv[0]}: no command runs in an object store", where=self.name)

    def run(self, argv: Sequence[str], **_: Any) -> NoReturn:
        """See `Transport.run`."""
        self.stream(argv, timeout_s=0.0)

    def close(self) -> None:
        """See `Transport.close`."""

    def expand(self, path: str) -> str:
        """See `Transport.expand`; there is no home directory."""
        return path

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `Transport.write`."""
        self.objects.put(path, data)

    def mkdir(self, path: str, *, mode: int = 0o700) -> None:
        """See `Transport.mkdir`; there are no directories."""

    def remove(self, path: str) -> None:
        """See `Transport.remove`."""
        self.objects.delete(path)

    def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """See `Transport.read`."""
        if (data := self.objects.get(path, offset, limit)) is None:
            raise FileNotFoundError(path)
        return data

    def read_many(self, paths: Iterable[str], *, limit: int = RECORD_BYTES) -> dict[str, bytes]:
        """See `Transport.read_many`."""
        return self.objects.get_many(list(paths), limit)

    def names(self, path: str) -> list[str]:
        """See `Transport.names`."""
        return self.objects.names(path)
