"""Contents that clients send: written beside the store, checked, and made visible together.

The store is one for all, by digest. Whoever wants to use a content has to have sent it, so that nobody gets what others
have left by asking for its digest, which job views show.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from orc.launchers.errors import BundleError, LaunchError
from orc.launchers.snapshot.manifest import FILE, Entry
from orc.launchers.snapshot.tree_store import CONTENT_TIME_NS, FULL
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.service.errors import ApiError

if TYPE_CHECKING:
    from types import TracebackType

    from orc.launchers.snapshot.content_store import ContentStore
    from orc.orchestrator.ledger.store import Ledger


def note_holder(ledger: Ledger, user: str, digests: Sequence[str]) -> None:
    """Remember that *user* has what *digests* name. Raises `LedgerError`."""
    with ledger.transaction() as tx:
        content_holders.add(tx.connection, user, digests, tx.now)


class ReceivedContents:
    """Contents of one upload, in a directory of their own until `publish`. A context manager; leaving it removes them.

    Their names are their hashes, which were checked to be some. Raises `BundleError` for a content that is not what it
    says.
    """

    def __init__(self, store: ContentStore) -> None:
        self._store, self._stack = store, ExitStack()
        self._entries: list[Entry] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._entry = Entry("", FILE, "", 0)

    def __enter__(self) -> ReceivedContents:
        self._staging: Path = self._stack.enter_context(self._store.staging("upload"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._stack.close()

    def begin(self, sha256: str, size: int) -> None:
        """Get ready for a content."""
        self._entry = Entry(sha256, FILE, sha256, size)
        self._hash = hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(self._staging / "objects" / sha256, flags, 0o600), "wb", buffering=0)
        except FileExistsError:
            raise BundleError("the same content comes twice", where=sha256) from None
        except OSError as error:
            raise _explained(error) from None

    def write(self, data: bytes) -> None:
        """Take the next bytes of it."""
        assert self._file is not None
        self._hash.update(data)
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise _explained(error) from None

    def end(self) -> None:
        """Check the content, and make it durable. Raises `ApiError`."""
        assert self._file is not None
        if self._hash.hexdigest() != self._entry.sha256:
            raise ApiError(422, "a content is not what its hash says", where=self._entry.sha256)
        descriptor = self._file.fileno()
        try:
            os.fchmod(descriptor, 0o400)
            os.utime(descriptor, ns=(CONTENT_TIME_NS, CONTENT_TIME_NS))
            os.fsync(descriptor)
        except OSError as error:
            raise _explained(error) from None
        self._file.close()
        self._file = None
        self._entries.append(self._entry)

    @property
    def hashes(self) -> list[str]:
        """Hashes of the contents that were taken."""
        return [entry.sha256 for entry in self._entries]

    def publish(self) -> int:
        """Make all contents visible; return their number."""
        try:
            self._store.publish(self._staging, self._entries)
        except OSError as error:
            raise _explained(error) from None
        return len(self._entries)


def _explained(error: OSError) -> LaunchError:
    hint = "an administrator frees some space" if error.errno in FULL else ""
    return BundleError(f"the service cannot store the contents: {error.strerror or error}", hint=hint)
