"""Code and runtime of an attempt as one archive, and the program that its containers start.

The same input makes the same bytes: names, contents and the executable bit go in, neither owners nor times nor paths of
this machine.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.containers.layout import SOURCE, TREES
from orc.launchers.errors import BackendError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.listing import encode

if TYPE_CHECKING:
    from orc.launchers.containers.objects import ObjectStore
    from orc.launchers.snapshot.manifest import Bundle, Snapshot

_PACKAGE = "orc/launchers/containers/"
_MODULES = ("output.py", "program.py")  # run in containers


def stage(objects: ObjectStore, place: str, snapshot: Snapshot, state_dir: Path) -> None:
    """Upload the archive of *snapshot* to *place* (a URI that ends with a slash), unless it is there.

    Its trees are in the store of *state_dir*. Raises `BackendError`.
    """
    if objects.exists(place + SOURCE):
        return
    try:
        with tempfile.TemporaryDirectory(prefix="archive-", dir=state_dir) as directory:
            archive = Path(directory) / SOURCE
            pack(snapshot, ContentStore(state_dir / "store"), archive)
            objects.put(place + SOURCE, archive)
    except OSError as error:
        raise BackendError(
            f"cannot pack the snapshot: {error.strerror or error}", where=str(error.filename or state_dir)
        ) from None


def pack(snapshot: Snapshot, store: ContentStore, target: Path) -> None:
    """Write the trees ``code/``, ``runtime/`` and ``environment/`` from *store* to *target*. Raises `OSError`."""
    with (
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, bundle in zip(TREES, snapshot.bundles, strict=False):
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


def entry_program(platform: Path) -> bytes:
    """Return what a container starts, ``python3 -I -S entry.pyz``: *platform*, a program that calls `program.main`."""
    here = Path(__file__).parent
    folders = [
        "orc/",
        "orc/launchers/",
        _PACKAGE,
    ]  # namespace packages: what is unpacked later has parts of them
    files = {"__main__.py": platform, **{_PACKAGE + name: here / name for name in _MODULES}}
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in folders:
            archive.writestr(zipfile.ZipInfo(name), b"")
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return found.getvalue()
