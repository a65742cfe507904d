"""Snapshots of working trees in the local store: scanned, stored, copied to other stores, verified."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from orc.launchers.errors import BundleError
from orc.launchers.findings import Finding
from orc.launchers.snapshot.hashing import hash_file
from orc.launchers.snapshot.listing import encode
from orc.launchers.snapshot.manifest import EXECUTABLE, SYMLINK, Bundle, Entry
from orc.launchers.snapshot.scan import ScanWatch, SourceTree, format_size, scan
from orc.launchers.snapshot.tree_store import FULL, DamagedContent, TreeStore, read_chunks, side_by_side, write_content

Progress = Callable[[int, int], None]


class ContentStore(TreeStore):
    """A `TreeStore` on this machine that is filled from working trees."""

    @property
    def scan_cache(self) -> Path:
        """Directory in which `scan` may keep hashes of unchanged files."""
        return self.root / "scan-cache"

    def snapshot(
        self,
        workdir: str | Path,
        exclude: Iterable[str] = (),
        *,
        on_progress: Progress | None = None,
        watch: ScanWatch | None = None,
    ) -> SourceTree:
        """Scan *workdir* and store it, leaving out the cluster root if it lies inside. Raises `BundleError`.

        A file that changes between the scan and the copy makes for a second scan, which *watch* is not told about.
        """
        patterns, skip = tuple(exclude), (self.root.parent, self.root)
        tree = scan(workdir, patterns, cache=self.scan_cache, skip=skip, watch=watch)
        try:
            self.ingest(tree, on_progress=on_progress)
        except DamagedContent:
            tree = scan(workdir, patterns, cache=self.scan_cache, skip=skip)
            self.ingest(tree, on_progress=on_progress)
        return tree

    def ingest(self, tree: SourceTree, *, on_progress: Progress | None = None) -> Bundle:
        """Store *tree*. Idempotent, safe when killed at any moment and when several do it at once.

        *on_progress* gets bytes stored and bytes to store. Raises `BundleError` for a full disk, a file that changed
        since the scan, or an unusable store; nothing is left behind then.
        """
        bundle = tree.bundle
        if self.use(bundle.digest):
            return bundle
        try:
            with self.staging(bundle.digest[:16]) as staging:
                self._store_contents(tree, staging, on_progress)
                self.build(bundle, staging)
        except OSError as error:
            raise self._explained(error, bundle) from None
        return bundle

    def copy_to(self, other: ContentStore, digest: str) -> Bundle:
        """Bring a snapshot to another store; contents are verified on the way. Raises `BundleError`."""
        bundle = self.load(digest)
        return other.ingest(SourceTree(bundle, self.sources(bundle)))

    def sources(self, bundle: Bundle) -> dict[str, bytes]:
        """Return the places of the regular files of a stored snapshot, by their path in it."""
        home = os.fsencode(self.tree_path(bundle.digest))
        return {e.path: os.path.join(home, encode(e.path)) for e in bundle.entries if e.mode != SYMLINK}

    def verify(self, digest: str) -> list[Finding]:
        """Read a whole snapshot and return a finding for each difference from its manifest.

        Byte code that Python put beside the sources is not reported.
        """
        bundle = self.load(digest)
        home = os.fsencode(self.tree_path(digest))
        problems = [problem for entry in bundle.entries if (problem := _inspect(home, entry))]
        for directory, subdirectories, names in os.walk(home):
            subdirectories[:] = [name for name in subdirectories if name != b"__pycache__"]
            linked = [name for name in subdirectories if os.path.islink(os.path.join(directory, name))]
            for name in [*names, *linked]:
                path = os.fsdecode(os.path.relpath(os.path.join(directory, name), home))
                if path not in bundle:
                    problems.append((path, "does not belong to the snapshot"))
        return [
            Finding(
                "error",
                f"snapshot {digest[:12]}: {path}: {what}",
                where=str(self.tree_path(digest)),
                hint="Remove the snapshot and submit again from the working tree.",
            )
            for path, what in sorted(problems)
        ]

    def _store_contents(self, tree: SourceTree, staging: Path, on_progress: Progress | None) -> None:
        """Put the contents that are missing into ``cas/``. None appears before all of them are on the disk."""
        missing = self.missing([tree.bundle])
        total, done = sum(entry.size for entry in missing), 0

        def store(entry: Entry) -> Entry:
            _copy_verified(tree.sources[entry.path], os.fsencode(f"{staging}/objects/{entry.sha256}"), entry)
            return entry

        for entry in side_by_side(store, missing):
            done += entry.size
            if on_progress is not None:
                on_progress(done, total)
        self.publish(staging, missing)

    def _explained(self, error: OSError, bundle: Bundle) -> BundleError:
        if error.errno in FULL:
            return BundleError(
                f"no space for the snapshot of {format_size(bundle.size)}: {error.strerror}",
                where=str(self.root),
                hint="Free some space, or exclude large files in .orcignore or workdir.exclude.",
            )
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(self.root)
        return BundleError(f"cannot store the snapshot: {error.strerror or error}", where=place)


def _copy_verified(source: bytes, destination: bytes, entry: Entry) -> None:
    """Copy a content and make it durable. Raises `DamagedContent` when it does not match *entry*."""
    if not write_content(_reading(source), destination, entry, 0o400):
        raise DamagedContent(
            "the file changed while the snapshot was taken",
            where=os.fsdecode(source),
            hint="Submit again when nothing writes to it, or exclude it in .orcignore or workdir.exclude.",
        )


def _reading(source: bytes) -> Iterator[bytes]:
    """Yield chunks of a source file; that it cannot be opened is its owner's doing, not the store's."""
    chunks = read_chunks(source)
    try:
        first = next(chunks, b"")
    except OSError as error:
        raise DamagedContent(f"cannot read the file any more: {error.strerror}", where=os.fsdecode(source)) from None
    yield first
    yield from chunks


def _inspect(home: bytes, entry: Entry) -> tuple[str, str] | None:
    full = os.path.join(home, encode(entry.path))
    try:
        status = os.lstat(full)
        if entry.target is not None:
            same = stat.S_ISLNK(status.st_mode) and os.readlink(full) == entry.target.encode()
            return None if same else (entry.path, "is not the link it was")
        if not stat.S_ISREG(status.st_mode):
            return entry.path, "is not a file any more"
        if hash_file(full)[0] != entry.sha256:
            return entry.path, "was changed"
        if bool(status.st_mode & stat.S_IXUSR) != (entry.mode == EXECUTABLE):
            return entry.path, "has another mode"
    except FileNotFoundError:
        return entry.path, "is missing"
    except OSError as error:
        return entry.path, f"cannot be read: {error.strerror}"
    return None
