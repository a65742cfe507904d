"""Contents that clients send: written beside the store, checked, and made visible together.

The store is one for all, by digest. Whoever wants to use a content has to have sent it, so that nobody gets what others
have left by asking for its digest, which job views show.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from orc.launchers.errors import BundleError, LaunchError
from orc.launchers.snapshot.manifest import FILE, Entry
from orc.launchers.snapshot.tree_store import FULL, write_content
from orc.launchers.transfer.wire import WireError, receive_contents
from orc.orchestrator.ledger import content_holders
from orc.orchestrator.service.errors import ApiError

if TYPE_CHECKING:
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.orchestrator.ledger.store import Ledger


def note_holder(ledger: Ledger, user: str, digests: Sequence[str]) -> None:
    """Remember that *user* has what *digests* name. Raises `LedgerError`."""
    with ledger.transaction() as tx:
        content_holders.add(tx.connection, user, digests, tx.now)


def append(file: BinaryIO, piece: bytes) -> None:
    """Write the next bytes of a stream of contents. Raises `BundleError`."""
    try:
        file.write(piece)
    except OSError as error:
        raise _explained(error) from None


def publish(store: ContentStore, staging: Path, stream: Path) -> list[str]:
    """Check the contents of the file *stream*, and make all visible; return their hashes.

    Raises `BundleError` for what is no stream, or has a content twice; `ApiError` for one that is not what it says.
    """
    entries: list[Entry] = []
    try:
        with stream.open("rb") as file:
            for sha256, size, chunks in receive_contents(file, maybe_gzipped=False):
                entry = Entry(sha256, FILE, sha256, size)
                if not write_content(chunks, os.fsencode(staging / "objects" / sha256), entry, 0o400):
                    raise ApiError(422, "the content does not match its hash", where=sha256)
                entries.append(entry)
        store.publish(staging, entries)
    except WireError as error:
        raise BundleError(str(error), hint="submit again") from None
    except FileExistsError as error:
        raise BundleError("the same content comes twice", where=os.fsdecode(error.filename)[-64:]) from None
    except OSError as error:
        raise _explained(error) from None
    return [entry.sha256 for entry in entries]


def _explained(error: OSError) -> LaunchError:
    hint = "an administrator frees some space" if error.errno in FULL else ""
    return BundleError(f"the service cannot store the contents: {error.strerror or error}", hint=hint)
