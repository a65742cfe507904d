"""Content-addressed store as it is on every machine: ``cas/``, ``trees/``, ``tmp/``.

`orc.launchers.snapshot.content_store.ContentStore` fills it from a working tree here;
`orc.launchers.transfer.receiver` fills it from a stream on another machine, to which this module travels as it is:
standard library only, Python >= 3.9.

Nothing partial is ever visible. Whatever is written goes to ``tmp/`` first, is made durable, and appears by rename:
contents, then the tree, then its manifest ``trees/<digest>.json``, which is what makes a snapshot exist. Writers need
no lock against each other: two of the same snapshot do the same work and one rename wins. They share one against
`orc.launchers.snapshot.gc`, which removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import EXECUTABLE, SHA256, SYMLINK, Bundle, Entry
from orc.launchers.snapshot.presence import has, locked, open_lock, use
from orc.launchers.strict_modes import Untrusted, check_root, make_private

CHUNK = 1 << 20
_STALE_S = 24 * 3600.0
_MANY = 64  # files from which threads pay: the time goes into fsync, which runs side by side
# Contents carry this modification time (2 January 1980: the zip format knows no earlier one). A program that writes
# through a hard link into a tree moves it, so a damaged content is noticed without reading it.
CONTENT_TIME_NS = 315_619_200 * 10**9
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# No links here, too many of this one, or replaced by another writer at this moment (Linux then says ENOENT).
_NO_LINK = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class DamagedContent(BundleError):
    """The content differs from its manifest."""


_KEPT = 4  # manifests that are not read again while their files stay as they are


class TreeStore:
    """Snapshots below *root* (``<cluster root>/store``), which is made, private, when something is first stored."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(root))
        self._loaded: dict[str, tuple[tuple[int, int, int], Bundle]] = {}  # with what its file was like

    def tree_path(self, digest: str) -> Path:
        """Return the directory of a snapshot, which exists when `has` is true. Raises `BundleError` for no digest."""
        return self.root / "trees" / checked(digest)

    def manifest_path(self, digest: str) -> Path:
        """Return the file that makes a snapshot exist. Raises `BundleError` for no digest."""
        return self.root / "trees" / f"{checked(digest)}.json"

    def has(self, digest: str) -> bool:
        """Return whether the snapshot is here, complete."""
        return has(str(self.root), checked(digest))

    def use(self, digest: str) -> bool:
        """Return the same as `has`, and keep a snapshot that is here from being collected for a while (``orc gc``).

        Raises `BundleError` where others could have written it.
        """
        self.refuse_untrusted()
        return use(str(self.root), checked(digest))

    def refuse_untrusted(self) -> None:
        """Raise `BundleError` where others than its user and root could have written to it or the jobs beside."""
        try:
            check_root(os.path.dirname(self.root))
        except Untrusted as error:
            raise BundleError(
                f"the root {self.root.parent} is not to be trusted", where=str(error.filename), hint=str(error.strerror)
            ) from None

    def load(self, digest: str) -> Bundle:
        """Return the manifest of a snapshot. Raises `BundleError` when it is not here or is damaged."""
        path = self.manifest_path(digest)
        try:
            status = path.stat()
            was = (status.st_ino, status.st_mtime_ns, status.st_size)
            if digest in self._loaded and self._loaded[digest][0] == was:
                return self._loaded[digest][1]
            bundle = Bundle.from_dict(json.loads(path.read_bytes()))
        except FileNotFoundError:
            raise BundleError(f"no snapshot {digest}", where=str(self.root), hint="Submit the job again.") from None
        except (OSError, ValueError, BundleError) as error:
            raise BundleError(
                f"the snapshot's manifest is damaged: {error}",
                where=str(path),
                hint=f"Remove {path} and submit the job again.",
            ) from None
        if bundle.digest != digest:
            raise BundleError(f"the manifest is that of another snapshot, {bundle.digest}", where=str(path))
        self._loaded[digest] = (was, bundle)
        if len(self._loaded) > _KEPT:
            self._loaded.pop(next(iter(self._loaded)))
        return bundle

    def remove(self, digest: str) -> None:
        """Forget a snapshot. Its contents stay for others. Raises `OSError`."""
        self.manifest_path(digest).unlink(missing_ok=True)
        doomed = self.root / "tmp" / f"removed-{os.getpid()}-{os.urandom(4).hex()}"
        with contextlib.suppress(FileNotFoundError):
            self.tree_path(digest).rename(doomed)
        remove(doomed)

    @contextlib.contextmanager
    def staging(self, label: str) -> Iterator[Path]:
        """Make a directory of one's own in ``tmp/``, gone at the end; while it is there nothing is collected.

        What killed writers of this machine left is removed first: each holds a lock on its directory for as long as
        it lives. Raises `OSError`.
        """
        self.refuse_untrusted()
        for name in ("cas", "trees", "tmp"):
            make_private(self.root / name)
        with self.shared():
            self.sweep()
            staging = self.root / "tmp" / f"{label}-{_machine()}-{os.getpid()}-{os.urandom(4).hex()}"
            lock = None
            try:
                staging.mkdir(mode=0o700)
                (staging / "objects").mkdir(mode=0o700)
                # The file is not seen before it is locked.
                lock = os.open(staging / "locking", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                if locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.rename(staging / "locking", staging / "lock")
                yield staging
            finally:
                remove(staging)
                if lock is not None:
                    os.close(lock)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock under which nothing is removed; wait for a collection to end. Raises `OSError`."""
        with self._lock_file() as fd:
            locked(fd, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[bool | None]:
        """Hold the lock under which nothing is written.

        Yields false when there still is a writer after *timeout_s* seconds, `None` where there are no locks.
        """
        with self._lock_file() as fd:
            deadline = time.monotonic() + timeout_s
            while (held := locked(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)) is False and time.monotonic() < deadline:
                time.sleep(0.05)
            yield held

    @contextlib.contextmanager
    def _lock_file(self) -> Iterator[int]:
        make_private(self.root)
        fd = open_lock(str(self.root))
        try:
            yield fd
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Remove what killed writers left in ``tmp/``: those of this machine at once, others after a day."""
        limit = time.time() - _STALE_S
        mine = f"-{_machine()}-"
        try:
            entries = list(os.scandir(self.root / "tmp"))
        except FileNotFoundError:
            return
        for entry in entries:
            with contextlib.suppress(OSError):  # another process sweeps too
                if entry.stat(follow_symlinks=False).st_mtime < limit or (
                    mine in entry.name and _abandoned(os.path.join(entry.path, "lock"))
                ):
                    remove(Path(entry.path))

    def missing(self, bundles: Iterable[Bundle]) -> list[Entry]:
        """Return one entry for each content of *bundles* that is not here, in order of hash."""
        wanted = {entry.sha256: entry for bundle in bundles for entry in bundle.entries if entry.mode != SYMLINK}
        return [entry for _, entry in sorted(wanted.items()) if not self.sound(entry)]

    def sound(self, entry: Entry) -> bool:
        """Return whether the content is there and untouched since it was stored. A suspect one is stored anew."""
        try:
            status = os.lstat(f"{self.root}/cas/{entry.sha256}")
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == entry.size and status.st_mtime_ns == CONTENT_TIME_NS

    def publish(self, staging: Path, entries: Iterable[Entry]) -> None:
        """Make contents visible that lie, verified and durable, in ``objects/`` of *staging*."""
        moved = False
        for entry in entries:
            if not self.sound(entry):  # another writer may have been faster
                os.rename(f"{staging}/objects/{entry.sha256}", f"{self.root}/cas/{entry.sha256}")
                moved = True
        if moved:
            fsync_directory(self.root / "cas")

    def build(self, bundle: Bundle, staging: Path) -> None:
        """Lay the tree out from its contents under a temporary name, make it durable, and rename it into place.

        Raises `DamagedContent` when a content that has to be copied is not what its name says, `OSError`.
        """
        laid_out = staging / "tree"
        laid_out.mkdir(mode=0o700)
        cas = os.fsencode(self.root / "cas")
        made = {"": os.fsencode(laid_out)}

        def directory(path: str) -> bytes:
            full = made.get(path)
            if full is None:
                full = os.path.join(directory(path.rpartition("/")[0]), path.rpartition("/")[2].encode())
                os.mkdir(full, 0o700)
                made[path] = full
            return full

        copies: list[tuple[Entry, bytes]] = []
        for entry in bundle.entries:
            parent, _, name = entry.path.rpartition("/")
            destination = os.path.join(directory(parent), name.encode())
            if entry.target is not None:
                os.symlink(entry.target.encode(), destination)
                continue
            # A hard link shares its mode with the content, so executables are copies.
            if entry.mode == EXECUTABLE or not _link(os.path.join(cas, entry.sha256.encode()), destination):
                copies.append((entry, destination))

        def copy(item: tuple[Entry, bytes]) -> None:
            entry, destination = item
            mode = 0o500 if entry.mode == EXECUTABLE else 0o400
            content = os.path.join(cas, entry.sha256.encode())
            if not write_content(read_chunks(content), destination, entry, mode):
                with contextlib.suppress(OSError):
                    os.unlink(content)  # the next writer stores it anew
                raise DamagedContent(
                    "a stored content was damaged and has been removed",
                    where=os.fsdecode(content),
                    hint="Try again: it is stored anew.",
                )

        for _ in side_by_side(copy, copies):
            pass
        for full in reversed(list(made.values())):
            fsync_directory(full)
        try:
            os.rename(laid_out, self.tree_path(bundle.digest))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Another writer was first, or was killed before it wrote the manifest. Trees appear complete.
            remove(laid_out)
        fsync_directory(self.root / "trees")
        text = json.dumps(bundle.to_dict(), separators=(",", ":"), ensure_ascii=False)
        manifest = staging / "manifest.json"
        fd = os.open(manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(fd)
        os.rename(manifest, self.manifest_path(bundle.digest))
        fsync_directory(self.root / "trees")


def checked(digest: str) -> str:
    """Return *digest* if it is one, so that nothing else ever becomes a path. Raises `BundleError`."""
    if not SHA256.fullmatch(digest):
        raise BundleError(f"not a snapshot digest: {digest!r}", hint="A digest is 64 hexadecimal digits.")
    return digest


def read_chunks(path: bytes) -> Iterator[bytes]:
    """Yield the content of a regular file that is not reached through a link. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while chunk := os.read(fd, CHUNK):
            yield chunk
    finally:
        os.close(fd)


def write_content(
    chunks: Iterable[bytes], destination: bytes, entry: Entry, mode: int, *, durable: bool = True
) -> bool:
    """Write a new file as contents are kept; false when *chunks* do not match *entry*. Raises `OSError`."""
    hashed, written = hashlib.sha256(), 0
    fd = os.open(destination, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for chunk in chunks:
            hashed.update(chunk)
            written += len(chunk)
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
            if written > entry.size:
                break
        os.fchmod(fd, mode)
        os.utime(fd, ns=(CONTENT_TIME_NS, CONTENT_TIME_NS))
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    return (hashed.hexdigest(), written) == (entry.sha256, entry.size)


def side_by_side(work: Callable[[_Item], _Result], items: list[_Item]) -> Iterator[_Result]:
    """Yield results as ``map`` does, with threads when there is much to wait for."""
    if len(items) < _MANY:
        yield from map(work, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8, "orc-store") as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def fsync_file(path: str) -> None:
    """Make a file durable that was written before."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directory(path: bytes | Path) -> None:
    """Make names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Remove a directory and what is in it, as far as that can be done."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


def _link(content: bytes, destination: bytes) -> bool:
    """Hard-link a content into a tree; False where that cannot be, and the file must be copied."""
    try:
        os.link(content, destination)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def _abandoned(lock: str) -> bool:
    """Return whether the process that held *lock* is gone. Raises `OSError` when there is no such file."""
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return locked(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) is True
    finally:
        os.close(fd)


def _machine() -> str:
    """Return a name that differs between machines that share a file system. Locks may not reach across."""
    try:
        identity = Path("/etc/machine-id").read_bytes()
    except OSError:
        identity = b""
    return hashlib.sha256(identity + b"\0" + os.uname().nodename.encode()).hexdigest()[:12]
