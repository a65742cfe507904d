"""Inputs of the containers of an attempt: code and runtime as one archive, their program, private files.

And the records that they leave in an object store.

The same input makes the same archive: names, contents and the executable bit go in, neither owners nor times nor paths
of this machine.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.attempts.reader import AttemptRecords, read_attempts
from orc.launchers.containers.layout import AGENT, ENTRY, LINK, SECRETS, SOURCE, TREES
from orc.launchers.errors import BackendError
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.listing import encode
from orc.runtime.checkpoint.storage import s3

if TYPE_CHECKING:
    from orc.launchers.containers.objects import ObjectStore
    from orc.launchers.remote.transport import Transport
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
    # Namespace packages: what is unpacked later has parts of them.
    folders = ["orc/", "orc/launchers/", _PACKAGE]
    files = {"__main__.py": platform, **{_PACKAGE + name: here / name for name in _MODULES}}
    files |= {"mirror.py": here / "mirror.py", "s3.py": Path(s3.__file__)}  # for other interpreters, as they are
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in folders:
            archive.writestr(zipfile.ZipInfo(name), b"")
        for name, path in files.items():
            archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return found.getvalue()


def upload_inputs(objects: ObjectStore, place: str, agents: str, secrets: Mapping[str, str], platform: Path) -> None:
    """Upload what the containers of an attempt read to *place* (a URI that ends with a slash), their program last.

    *agents* is the content of ``agent.json``, *secrets* are values by name, *platform* is as of `entry_program`.
    """
    objects.put(place + AGENT, agents.encode())
    for name, text in private_inputs(agents, secrets).items():
        # What an earlier try has left may be read by its containers at this moment.
        if name != LINK or not objects.exists(place + LINK):
            objects.put(place + name, text.encode())
    objects.put(place + ENTRY, entry_program(platform))


def private_inputs(agents: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the files that only the containers of an attempt may read: a new token of its agents, and the secrets."""
    found = {LINK: json.dumps({"token": new_link_token()}) + "\n"} if json.loads(agents).get("link") else {}
    return {**found, SECRETS: json.dumps(dict(secrets)) + "\n"} if secrets else found


def remove_private(objects: ObjectStore, place: str, config: Mapping[str, Any]) -> None:
    """Delete the secrets of an attempt, and the token of its agents; *config* is its ``agent.json``."""
    if config.get("secrets"):
        objects.delete(place + SECRETS)
    if config.get("link"):
        objects.delete(place + LINK)


class _Objects:
    """As much of a `Transport` as reading records takes; ``agent.json`` is where the submission has put it."""

    def __init__(self, objects: ObjectStore, configs: Mapping[str, Mapping[str, Any]]) -> None:
        self._objects = objects
        self._agents = {f"{uri}/{AGENT}": config for uri, config in configs.items()}

    def read_many(self, paths: Iterable[str], *, limit: int) -> dict[str, bytes]:
        wanted = list(paths)
        own = {path: json.dumps(self._agents[path]).encode() for path in wanted if path in self._agents}
        return {**self._objects.get_many([path for path in wanted if path not in own], limit), **own}


def read_records(objects: ObjectStore, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, AttemptRecords]:
    """Return the agents' records of many attempts by the URI of their directories; *configs* has the ``agent.json``."""
    return read_attempts(cast("Transport", _Objects(objects, configs)), list(configs))
