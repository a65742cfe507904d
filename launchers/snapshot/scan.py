"""Scan of a working tree: the snapshot of a job's code, named by one digest, before a byte of it is copied.

`scan` looks at a directory and hashes it; `orc.launchers.snapshot.content_store.ContentStore` keeps what it found.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orc.launchers.errors import BundleError
from orc.launchers.findings import Finding
from orc.launchers.snapshot.hashing import StatCache
from orc.launchers.snapshot.listing import Listing, encode
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, Bundle, Entry, follow

__all__ = [
    "Bundle",
    "Entry",
    "ScanWatch",
    "SourceTree",
    "TreeSize",
    "scan",
    "size_findings",
    "tree_size",
]

_EXCLUDE_HINT = "Exclude it in .orcignore or workdir.exclude"
TOTAL_WARNING = 100 * 1000**2  # bytes
FILE_WARNING = 50 * 1000**2
_NEARLY_ALL = 0.9
_LARGEST_FOLDERS, _LARGEST_FILES = 3, 5  # that are named


@dataclass(frozen=True)
class SourceTree:
    """Scanned tree: its manifest, the place of each file, and findings."""

    bundle: Bundle
    sources: Mapping[str, bytes]  # path in the bundle -> absolute path on this machine; regular files only
    findings: tuple[Finding, ...] = ()

    @property
    def digest(self) -> str:
        """The digest of the bundle."""
        return self.bundle.digest


@dataclass(frozen=True)
class TreeSize:
    """Size of a tree before a byte of it is read."""

    files: int
    size: int  # bytes
    folders: tuple[tuple[str, int], ...]  # the largest ones with their bytes, largest first


@dataclass(frozen=True)
class ScanWatch:
    """Functions that a scan calls: `listed` before anything is read, `hashed` with bytes done and bytes in all.

    What `listed` raises ends the scan.
    """

    listed: Callable[[TreeSize], None]
    hashed: Callable[[int, int], None]


def scan(
    workdir: str | Path,
    exclude: Sequence[str] = (),
    *,
    cache: Path | None = None,
    skip: Sequence[Path] = (),
    watch: ScanWatch | None = None,
) -> SourceTree:
    """Return the working tree at *workdir* as git sees it, uncommitted work included, less what ``.orcignore`` names.

    *exclude* are further patterns in gitignore syntax. *cache* is a directory for hashes of unchanged files. *skip*
    are directories that are left out silently; *watch* is told how large it is and how far it has come. An empty tree
    is fine. Raises `BundleError` for a tree that cannot be
    read completely, names that are not UTF-8, and symbolic links that lead out of the tree.
    """
    root = os.path.realpath(os.fsencode(workdir))
    if not os.path.isdir(root):
        problem = "not a directory" if os.path.exists(root) else "no such directory"
        raise BundleError(f"{problem}: the working directory of the job", where=os.fsdecode(root))
    if not os.access(root, os.R_OK | os.X_OK):
        raise BundleError("cannot read the working directory of the job", where=os.fsdecode(root))
    listing = Listing(root, exclude, [os.path.realpath(os.fsencode(path)) for path in skip])
    entries: list[Entry] = []
    sources: dict[str, bytes] = {}
    on_read = _announce(watch, listing.files) if watch is not None else None
    with StatCache(cache_file(cache, root)) as hashes:
        for path, status in listing.files.items():
            full = os.path.join(root, encode(path))
            try:
                _check_name(path)
                if stat.S_ISLNK(status.st_mode):
                    entries.append(_link(path, os.readlink(full)))
                    continue
                digest, status = hashes.digest(path, full, status, on_read)
            except FileNotFoundError:
                continue  # deleted since the tree was listed
            except OSError as error:
                raise BundleError(
                    f"cannot read: {error.strerror or error}",
                    where=os.fsdecode(full),
                    hint=f"Make it readable. {_EXCLUDE_HINT} if the job does not need it.",
                ) from None
            mode = EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE
            entries.append(Entry(path, mode, digest, status.st_size))
            sources[path] = full
    dangling = _check_links(entries)
    bundle = Bundle.of(entries)
    findings = (*listing.findings, *dangling, *size_findings(bundle), *credential_findings(sources))
    return SourceTree(bundle, sources, findings)


def _announce(watch: ScanWatch, files: Mapping[str, os.stat_result]) -> Callable[[int], None]:
    """Report the size of the *files* to *watch*; return a counter of bytes read, which reports at most 100 times."""
    found = tree_size({path: status.st_size for path, status in files.items()})
    watch.listed(found)
    done = reported = 0

    def on_read(count: int) -> None:
        nonlocal done, reported
        done = min(done + count, found.size)
        if done - reported >= found.size / 100:
            reported = done
            watch.hashed(done, found.size)

    return on_read


def tree_size(sizes: Mapping[str, int]) -> TreeSize:
    """Return the size of files of these *sizes* (bytes by path), and the largest folders among them.

    A folder that is nearly all of the one above it is named instead of that one.
    """
    folders: dict[str, int] = {}
    for path, size in sizes.items():
        folder = path.rpartition("/")[0]
        while folder:
            folders[folder] = folders.get(folder, 0) + size
            folder = folder.rpartition("/")[0]
    inner: dict[str, list[str]] = {}
    for folder in folders:
        inner.setdefault(folder.rpartition("/")[0], []).append(folder)
    named = []
    for folder in inner.get("", ()):
        while deeper := [f for f in inner.get(folder, ()) if folders[f] >= _NEARLY_ALL * folders[folder] > 0]:
            folder = deeper[0]
        named.append((folder, folders[folder]))
    named.sort(key=lambda item: (-item[1], item[0]))
    return TreeSize(len(sizes), sum(sizes.values()), tuple(named[:_LARGEST_FOLDERS]))


def size_findings(bundle: Bundle) -> list[Finding]:
    """Return a warning for a snapshot over 100 MB or a file over 50 MB, with the names that are worth excluding."""
    if bundle.size <= TOTAL_WARNING and all(entry.size <= FILE_WARNING for entry in bundle.entries):
        return []
    largest = sorted(bundle.entries, key=lambda entry: (-entry.size, entry.path))[:_LARGEST_FILES]
    names = ", ".join(f"{entry.path} ({format_size(entry.size)})" for entry in largest)
    files = f"{len(bundle.entries)} file{'' if len(bundle.entries) == 1 else 's'}"
    return [
        Finding(
            "warning",
            f"the snapshot is large: {files}, {format_size(bundle.size)}; largest: {names}",
            hint=f"{_EXCLUDE_HINT} what the job does not need, and read data from a shared path instead.",
        )
    ]


def format_size(size: int) -> str:
    """Return bytes in decimal units: ``999 B``, ``1.5 kB``, ``120.0 MB``."""
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def cache_file(cache: Path | None, root: bytes) -> Path | None:
    """Return the file in *cache* that keeps the hashes of the tree at *root*."""
    return cache / f"{hashlib.sha256(root).hexdigest()[:32]}.json" if cache is not None else None


def _check_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BundleError(
            "the file name is not UTF-8", where=repr(encode(path))[1:], hint=f"Rename it. {_EXCLUDE_HINT} otherwise."
        ) from None


def _link(path: str, target: bytes) -> Entry:
    try:
        return Entry.link(path, target.decode())
    except UnicodeDecodeError:
        raise BundleError(
            "the target of the symbolic link is not UTF-8", where=path, hint=f"{_EXCLUDE_HINT}."
        ) from None


def _check_links(entries: Sequence[Entry]) -> list[Finding]:
    """Refuse links that lead out of the tree; return warnings of those that lead to something left out."""
    links = {entry.path: entry.target for entry in entries if entry.target is not None}
    if not links:
        return []
    present = {""}
    for entry in entries:
        path = entry.path
        while path not in present:
            present.add(path)
            path = path.rpartition("/")[0]
    findings = []
    for path, target in links.items():
        end = follow(path, links)
        if end is None:
            raise BundleError(
                f"the symbolic link points outside the working directory, to {target!r}",
                where=path,
                hint=f"{_EXCLUDE_HINT}, and pass the real path to the script as an argument.",
            )
        if end not in present:
            findings.append(
                Finding("warning", f"the symbolic link leads to {end!r}, which is not in the snapshot", where=path)
            )
    return findings


_SHOWN = 5
_BYTES = 4096  # in which a file shows that it holds a private key
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----")
# By their names alone. What is a template for others to fill in is none.
_NAMED = re.compile(
    r"""(?:^|/)(?:
        \.env(?:\.(?!(?:example|sample|template|dist|defaults?)$)[^/]+)?
        | id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)? | [._]netrc | \.pgpass | \.git-credentials | \.pypirc | \.htpasswd
        | \.aws/credentials | \.kube/config | \.docker/config\.json
        | [^/]+\.(?:p12|pfx|jks|keystore|kdbx|ppk|token)
    )$""",
    re.VERBOSE,
)
# These may also hold certificates or public keys: their content tells.
_PERHAPS = re.compile(r"\.(?:pem|key|asc|gpg)$|(?:credential|service.?account)[^/]*\.json$", re.IGNORECASE)


def credential_findings(sources: Mapping[str, bytes]) -> list[Finding]:
    """Return a warning that names the files with credentials among *sources* (path in the tree -> place on disk)."""
    found = [path for path, full in sources.items() if _NAMED.search(path) or (_PERHAPS.search(path) and _holds(full))]
    if not found:
        return []
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [
        Finding(
            "warning",
            f"the snapshot holds what looks like credentials: {', '.join(sorted(found)[:_SHOWN])}{more}",
            hint="Exclude them in .orcignore or workdir.exclude, and pass values to the ranks by `secrets:`.",
        )
    ]


def _holds(path: bytes) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone since the tree was read
    try:
        return _PRIVATE_KEY.search(os.read(fd, _BYTES)) is not None
    finally:
        os.close(fd)
