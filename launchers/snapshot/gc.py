"""Garbage collection below one cluster root: snapshots, environments and working copies that no job needs.

Travels to the hosts as it is: standard library only, Python >= 3.9.

Kept is what the ledger names, what an attempt that has not ended for long mentions in its records, and what was used
lately: storing a snapshot, or finding it there, counts as use. Nothing is removed while the store is written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orc.launchers.errors import BundleError
from orc.launchers.snapshot.manifest import SHA256, SYMLINK
from orc.launchers.snapshot.tree_store import TreeStore, remove

# A snapshot is staged some time before the attempt that needs it leaves a trace, perhaps in another user's ledger.
GRACE_S = 3600.0
_WRITERS_S = 30.0  # to wait for those who write to the store
_DIGEST = re.compile(r"[0-9a-f]{32,64}")
_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class GcRequest:
    """Limits of one collection."""

    root: str  # of the cluster; may begin with ``~``
    older_than_s: float  # since the last use; `GRACE_S` at least
    keep: frozenset[str] = frozenset()  # digests that jobs of the ledger need
    ended: frozenset[str] = frozenset()  # jobs that have ended for good, by the ledger
    work: bool = False  # the working copies of ended jobs too
    dry_run: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {**asdict(self), "keep": sorted(self.keep), "ended": sorted(self.ended)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GcRequest:
        """Invert `to_dict`; further keys do not matter."""
        known = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "keep": frozenset(known["keep"]), "ended": frozenset(known["ended"])})


@dataclass
class GcReport:
    """Snapshots, contents, environments and working copies that were removed, or would be."""

    snapshots: list[str] = field(default_factory=list)  # digests
    contents: int = 0
    environments: list[str] = field(default_factory=list)  # digests
    work: list[str] = field(default_factory=list)  # job ids
    size: int = 0  # bytes of all that
    kept: int = 0  # snapshots
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GcReport:
        """Invert `to_dict`."""
        return cls(**data)


def collect(request: GcRequest) -> GcReport:
    """Remove what *request* allows. Raises `BundleError` when the store is in use, `OSError`."""
    root = Path(os.path.expanduser(request.root))
    found = GcReport()
    now, age = time.time(), max(request.older_than_s, GRACE_S)
    if not root.is_dir():
        return found
    attempts = list(_attempts(root))
    used = set(request.keep)
    for job, attempt in attempts:
        if not _ended(attempt, now - age) and job not in request.ended:
            used |= _mentioned(attempt)
    store = TreeStore(root / "store")
    if store.root.is_dir():
        if request.dry_run:
            _collect_store(store, used, now - age, found, True, dry_run=True)
        else:
            with store.exclusive(_WRITERS_S) as alone:
                if alone is False:
                    raise BundleError(
                        "another process is writing to the store", where=str(store.root), hint="Try again later."
                    )
                _collect_store(store, used, now - age, found, alone is True, dry_run=False)
    _collect_environments(root / "envs", used, now - age, found, request.dry_run)
    if request.work:
        _collect_work(root, attempts, request, now - age, found)
    return found


def main() -> None:
    """Read a request from standard input; print the report of the collection, or its error."""
    os.umask(0o077)
    request = GcRequest.from_dict(json.load(sys.stdin))
    answer: dict[str, Any]
    try:
        answer = {"report": collect(request).to_dict()}
    except BundleError as error:
        answer = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
    except OSError as error:
        what = f"cannot collect: {error.strerror or error}"
        answer = {"error": {"what": what, "where": str(error.filename or request.root), "hint": ""}}
    sys.stdout.write(json.dumps(answer))


def doomed(last_used: Mapping[str, float], used: Collection[str], before: float) -> list[str]:
    """Return the names that are not *used* and that were last used *before* that time."""
    return sorted(name for name, at in last_used.items() if at < before and name not in used)


# --- snapshots --------------------------------------------------------------------------------------------------------


def _collect_store(
    store: TreeStore, used: Collection[str], before: float, found: GcReport, alone: bool, *, dry_run: bool
) -> None:
    trees = store.root / "trees"
    last_used: dict[str, float] = {}
    for entry in _scan(trees):  # a directory comes before its manifest, whose time is that of the last use
        digest = entry.name[: -len(".json")] if entry.name.endswith(".json") else entry.name
        if SHA256.fullmatch(digest):
            last_used[digest] = entry.stat(follow_symlinks=False).st_mtime
    found.snapshots = doomed(last_used, used, before)
    found.kept = len(last_used) - len(found.snapshots)
    needed: set[str] = set()
    readable = True
    for digest in set(last_used) - set(found.snapshots):
        path = store.manifest_path(digest)
        try:
            manifest = json.loads(path.read_bytes())
            needed |= {str(e["sha256"]) for e in manifest["entries"] if e["mode"] != f"{SYMLINK:04o}"}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            readable = False
            found.problems.append(f"{path}: cannot be read, so no contents are removed: {error}")
    stale: list[str] = []
    for entry in _scan(store.root / "cas"):
        status = entry.stat(follow_symlinks=False)
        # Without locks another writer may have put it there a moment ago.
        if readable and entry.name not in needed and (alone or status.st_ctime < before):
            stale.append(entry.path)
            found.size += status.st_size
    found.contents = len(stale)
    if dry_run:
        return
    store.sweep()
    for digest in found.snapshots:
        store.remove(digest)
    for content in stale:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(content)


# --- environments -----------------------------------------------------------------------------------------------------


def _collect_environments(envs: Path, used: Collection[str], before: float, found: GcReport, dry_run: bool) -> None:
    """Remove those whose ``<digest>.json``, touched with every use, is old. Preparing one holds ``<digest>.lock``."""
    last_used = {
        entry.name[: -len(".json")]: entry.stat().st_mtime
        for entry in _scan(envs)
        if entry.name.endswith(".json") and _DIGEST.fullmatch(entry.name[: -len(".json")])
    }
    for digest in doomed(last_used, used, before):
        marker = envs / f"{digest}.json"
        if dry_run:
            found.environments.append(digest)
            found.size += _size(envs / digest)
            continue
        fd = os.open(envs / f"{digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if marker.stat().st_mtime >= before:
                continue
            size = _size(envs / digest)
            marker.unlink()
            shutil.rmtree(envs / digest, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):  # in use at this moment, or removed by another
            continue
        finally:
            os.close(fd)
        found.environments.append(digest)
        found.size += size


# --- jobs -------------------------------------------------------------------------------------------------------------


def _collect_work(
    root: Path, attempts: list[tuple[str, Path]], request: GcRequest, before: float, found: GcReport
) -> None:
    """Remove the working copies of jobs that have ended; logs, records and checkpoints stay."""
    jobs: dict[str, bool] = {}
    for job, attempt in attempts:
        jobs[job] = jobs.get(job, True) and (job in request.ended or _ended(attempt, before))
    for job in sorted(job for job, ended in jobs.items() if ended):
        work = root / "jobs" / job / "work"
        with contextlib.suppress(FileNotFoundError):
            if work.is_symlink() or work.stat().st_mtime >= before:
                continue
            found.work.append(job)
            found.size += _size(work)
            if not request.dry_run:
                aside = work.with_name(f".work-removed-{os.getpid()}")
                work.rename(aside)
                remove(aside)


def _attempts(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield job id and directory of every attempt here."""
    for job in _scan(root / "jobs"):
        if job.is_dir(follow_symlinks=False):
            for attempt in _scan(Path(job.path)):
                if re.fullmatch(r"a[1-9][0-9]*", attempt.name) and attempt.is_dir(follow_symlinks=False):
                    yield job.name, Path(attempt.path)


def _ended(attempt: Path, before: float) -> bool:
    """Return whether all nodes that have begun here have ended *before* that time: later ones may be retried."""
    begun = False
    for node in _scan(attempt):
        if node.name.startswith("node-") and os.path.exists(os.path.join(node.path, "lease.json")):
            begun = True
            try:
                if os.stat(os.path.join(node.path, "exit.json")).st_mtime >= before:
                    return False
            except FileNotFoundError:
                return False
    return begun


def _mentioned(attempt: Path) -> set[str]:
    """Return the words in the records of an attempt that look like digests."""
    found: set[str] = set()
    for path in (*attempt.glob("*.json"), *attempt.glob("node-*/*.json")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            found.update(_DIGEST.findall(file.read(_RECORD_BYTES).decode("utf-8", "replace")))
    return found


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(directory: Path) -> int:
    """Return bytes of the files below, each inode once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(place, name))
                seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
