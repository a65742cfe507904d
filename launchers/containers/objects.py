"""The object store that a platform's containers share with whoever submits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class ObjectStore(Protocol):
    """Objects by their URIs. All methods raise `BackendUnreachable` without an answer, `BackendError` otherwise."""

    def exists(self, uri: str) -> bool:
        """Return True when there is such an object."""
        ...

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        """Return at most *limit* bytes of an object from *offset* on; `None` when there is no object."""
        ...

    def get_many(self, uris: Sequence[str], limit: int) -> dict[str, bytes]:
        """Return the contents of the objects that exist and have at most *limit* bytes."""
        ...

    def put(self, uri: str, data: bytes | Path) -> None:
        """Write an object (the bytes, or those of a file), encrypted, in one step."""
        ...

    def delete(self, uri: str) -> None:
        """Remove an object, if it is there."""
        ...
