"""Recall of a snapshot from a host's store into the one here, for a job that is taken over from another machine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BundleError
from orc.launchers.paths import Layout
from orc.launchers.snapshot.manifest import SYMLINK, Bundle
from orc.launchers.snapshot.scan import SourceTree
from orc.launchers.snapshot.tree_store import DamagedContent
from orc.launchers.transfer.fetch import fetch

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore

SILENCE_S = 30.0


def recall(digest: str, transport: Transport, root: str, store: ContentStore) -> Bundle:
    """Make the snapshot *digest* of the host's *root* one of *store*; every content is verified.

    Raises `BundleError` when the host has it not or not whole, and what the transport raises.
    """
    if store.has(digest):
        return store.load(digest)
    layout = Layout.at(transport.expand(root))
    try:
        bundle = Bundle.from_dict(json.loads(transport.read(f"{layout.tree(digest)}.json")))
    except FileNotFoundError:
        raise BundleError(f"no snapshot {digest[:12]}", where=transport.name) from None
    except ValueError as error:
        raise BundleError(f"the manifest of snapshot {digest[:12]} is damaged: {error}", where=transport.name) from None
    if bundle.digest != digest:
        raise BundleError(f"snapshot {digest[:12]} has the manifest of another one", where=transport.name)
    missing = {entry.sha256 for entry in store.missing([bundle])}
    with tempfile.TemporaryDirectory(prefix="orc-recall-") as directory:
        if missing:
            fetch(missing, transport, str(layout.store / "cas"), Path(directory), "the snapshot", SILENCE_S)
        contents = {
            entry.path: os.fsencode(f"{directory}/{entry.sha256}")
            for entry in bundle.entries
            if entry.mode != SYMLINK and entry.sha256 in missing
        }
        try:
            return store.ingest(SourceTree(bundle, contents))
        except DamagedContent as error:
            raise BundleError(
                f"a content of snapshot {digest[:12]} is damaged: {Path(error.where).name}", where=transport.name
            ) from None
