"""Outputs of a job, brought into the store here: listed where they are, fetched, and verified by their digests."""

from __future__ import annotations

import os
import posixpath
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendError, BundleError
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.snapshot.manifest import SYMLINK, Bundle
from orc.launchers.snapshot.scan import SourceTree
from orc.launchers.snapshot.tree_store import DamagedContent
from orc.launchers.transfer.fetch import fetch
from orc.launchers.transfer.output_listing import listing

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore

LISTING_S = 3600.0  # many gigabytes are read for their digests
SILENCE_S = 60.0
LISTER = Program(
    "transfer.output_listing",
    ("errors", "strict_modes", "snapshot.hashing", "snapshot.manifest", "orc.runtime.core.names"),
)


def collect(path: str, transport: Transport, python: str, store: ContentStore) -> Bundle:
    """Make the file or directory *path* of another machine, or of this one, a snapshot of *store*.

    It is in the store whole, or not at all. Raises `BundleError` for what is not there or changes meanwhile, and what
    the transport raises.
    """
    if type(transport) is LocalTransport:  # a kind of its own may have other files
        bundle, parent = listing(path), posixpath.dirname(path)
        return _ingest(bundle, parent, store, path)
    answer, done = transport.ask_program(LISTER, {"path": path}, python=python, timeout_s=LISTING_S)
    try:
        if failure := (answer or {}).get("error"):
            raise BundleError(str(failure["what"]), where=f"{transport.name}: {failure['where']}")
        bundle = Bundle.from_dict((answer or {})["manifest"])
    except (ValueError, KeyError, TypeError, AttributeError):
        last = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.status}"
        raise BackendError(f"the listing of an output failed: {last}", where=transport.name) from None
    if store.use(bundle.digest):
        return bundle
    with tempfile.TemporaryDirectory(prefix="orc-output-") as directory:
        names = {entry.path for entry in bundle.entries if entry.mode != SYMLINK}
        fetch(names, transport, posixpath.dirname(path), Path(directory), "the output", SILENCE_S)
        return _ingest(bundle, directory, store, f"{transport.name}: {path}")


def _ingest(bundle: Bundle, parent: str, store: ContentStore, where: str) -> Bundle:
    sources = {e.path: os.fsencode(f"{parent}/{e.path}") for e in bundle.entries if e.mode != SYMLINK}
    try:
        return store.ingest(SourceTree(bundle, sources))
    except DamagedContent as error:
        raise BundleError(f"the output changed while it was collected: {error.where}", where=where) from None
