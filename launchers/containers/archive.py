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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.containers.layout import SOURCE, TREES
from orc.launchers.errors import BackendError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.listing import encode
from orc.runtime.checkpoint.storage import s3

if TYPE_CHECKING:
    from orc.launchers.containers.objects import ObjectStore
    from orc.launchers.snapshot.manifest import Bundle, Snapshot

_PACKAGE = "orc/launchers/containers/"
_MODULES = ("output.py", "program.py")  # run in containers
PLAIN_ENTRY = Path(__file__).with_name("entry.py")


def stage(objects: ObjectStore, place: str, snapshot: Snapshot, state_dir: Path) -> None:
    """Upload the archive of *snapshot* to *place* (a URI that ends with a slash), unless it is there.

    Its trees are in the store of *state_dir*. Raises `BackendError`.
    """
    if objects.exists(place + SOURCE):
        return
    with _packing(snapshot, state_dir) as archive:
        objects.put(place + SOURCE, archive)


def packed(snapshot: Snapshot, state_dir: Path) -> bytes:
    """Return the archive of *snapshot*, whose trees are in the store of *state_dir*. Raises `BackendError`."""
    with _packing(snapshot, state_dir) as archive:
        return archive.read_bytes()


@contextmanager
def _packing(snapshot: Snapshot, state_dir: Path) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="archive-", dir=state_dir) as directory:
            archive = Path(directory) / SOURCE
            pack(snapshot, ContentStore(state_dir / "store"), archive)
            yield archive
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
    files |= {"mirror.py": here / "mirror.py", "s3.py": Path(s3.__file__)}  # for other interpreters, as they are
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in folders:
            archive.writestr(zipfile.ZipInfo(name), b"")
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return found.getvalue()
