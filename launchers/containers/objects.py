"""The object store that a platform's containers share with whoever submits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

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
