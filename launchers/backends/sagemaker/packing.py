"""The source archive: the snapshot's trees as one ``tar.gz``, the same bytes for the same trees."""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.snapshot.listing import encode
from orc.launchers.snapshot.runtime_tree import SAGEMAKER_ENTRY

if TYPE_CHECKING:
    from orc.launchers.backends.base import Snapshot
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.snapshot.manifest import Bundle


def pack(snapshot: Snapshot, store: ContentStore, target: Path) -> None:
    """Write the trees ``code/``, ``runtime/`` and ``environment/`` from *store* to *target*. Raises `OSError`.

    Names, contents and the executable bit go in, nothing else: neither owners nor times nor paths of this machine.
    """
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, bundle in zip(("code", "runtime", "environment"), snapshot.bundles, strict=False):
            _add(archive, name, bundle, store)


def _add(archive: tarfile.TarFile, name: str, bundle: Bundle, store: ContentStore) -> None:
    root = tarfile.TarInfo(name)
    root.type, root.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(root)
    home = Path(store.tree_path(bundle.digest))
    for entry in bundle.entries:
        info = tarfile.TarInfo(f"{name}/{entry.path}")
        if entry.target is not None:
            info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            archive.addfile(info)
            continue
        info.mode, info.size = entry.mode, entry.size
        with (home / os.fsdecode(encode(entry.path))).open("rb") as content:
            archive.addfile(info, content)


def entry_program(snapshot: Snapshot, store: ContentStore) -> bytes:
    """The program that the container starts, which travels in the runtime's tree. Raises `OSError`."""
    return (Path(store.tree_path(snapshot.runtime.digest)) / SAGEMAKER_ENTRY).read_bytes()
