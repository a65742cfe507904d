"""Fetching of files from another machine, in one stream of tar, into the store here; every content is verified.

Outputs of a job are listed where they are. A snapshot of a host's store is recalled for a job that is taken over.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.errors import BackendError, BundleError
from orc.launchers.paths import Layout
from orc.launchers.remote.programs import Program
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.snapshot.manifest import SYMLINK, Bundle
from orc.launchers.snapshot.scan import SourceTree
from orc.launchers.snapshot.tree_store import DamagedContent
from orc.launchers.transfer.output_listing import listing
from orc.launchers.transfer.wire import CHUNK, ByteSource

if TYPE_CHECKING:
    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore


def fetch(names: Collection[str], transport: Transport, source: str, target: Path, what: str, timeout_s: float) -> None:
    """Write the files *names* below *source* on another machine below *target*.

    Args:
        names: Safe relative names of files; nothing else that the machine sends is written.
        transport: The machine.
        source: The directory there.
        target: The directory here.
        what: What the files are, for messages.
        timeout_s: Of silence.

    Raises:
        BundleError: Files are missing, or something else was sent.
        BackendUnreachable: The machine does not answer.
    """
    wanted = set(names)
    argv = ("tar", "-C", source, "-cf", "-", "--no-recursion", "--null", "--files-from", "-")
    with transport.stream(argv, timeout_s=timeout_s) as process:
        process.write("".join(f"./{name}\0" for name in sorted(wanted)).encode())
        process.close_stdin()
        got = set()
        try:
            with tarfile.open(fileobj=io.BufferedReader(ByteSource(process.read), CHUNK), mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    content = archive.extractfile(member) if member.isreg() else None
                    if name not in wanted or content is None:
                        raise BundleError(f"the host sent {name!r}, which was not asked for", where=transport.name)
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    with (target / name).open("xb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
                    got.add(name)
        except tarfile.TarError as error:
            raise BundleError(f"{what} came damaged: {error}", where=transport.name) from None
        ended = process.wait()
    if got != wanted:
        reason = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BundleError(f"{len(wanted - got)} files of {what} are missing: {reason}", where=transport.name)


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


RECALL_SILENCE_S = 30.0


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
            fetch(missing, transport, str(layout.store / "cas"), Path(directory), "the snapshot", RECALL_SILENCE_S)
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
