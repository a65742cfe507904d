"""The ledger's file: the type of its file system, the processes that lock it, and room on its disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_NATIVE = "9p afs beegfs ceph cifs coda glusterfs gpfs lustre nfs nfs4 ocfs2 orangefs pvfs2 smb3 smbfs wekafs"
_FUSE = "ceph glusterfs juicefs s3fs sshfs"
_NETWORK = frozenset([*_NATIVE.split(), *(f"fuse.{name}" for name in _FUSE.split())])


def network_file_system(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that holds *path*, when other machines may write to it; else `None`."""
    try:
        table = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None  # no /proc: nothing can be told, and nothing is known to be wrong
    kind = kind_of(os.path.realpath(path), table)
    return kind if kind in _NETWORK else None


def kind_of(path: str, table: str) -> str:
    """Return the file system type of the mount in *table* (text of ``mountinfo``) that holds the absolute *path*."""
    found, longest = "", -1
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), columns[4])
        below = path == point or path.startswith(point.rstrip("/") + "/")
        # Later lines lie on top of earlier ones at the same place.
        if below and len(point) >= longest:
            found, longest = rest.split(" ")[0], len(point)
    return found


def holders(path: Path, locks: Path = Path("/proc/locks")) -> list[str]:
    """Return ``process 4711 (orc)`` for each process of this machine that holds a lock on the ledger's file *path*.

    Empty where that is not visible.
    """
    inodes = set(_inodes(path))
    try:
        table = locks.read_text(encoding="ascii")
    except OSError:
        return []
    return [f"process {pid}{_named(pid)}" for pid in dict.fromkeys(pids(table, inodes))]


def pids(table: str, inodes: Iterable[int]) -> list[int]:
    """Return the holders of write locks on files of these *inodes*, in *table* (text of ``/proc/locks``)."""
    wanted = {str(inode) for inode in inodes}
    found = []
    for line in table.splitlines():
        words = line.split()
        # 1: POSIX ADVISORY WRITE 4711 08:01:131 0 EOF; those who wait ("->") hold nothing.
        if "->" not in line and len(words) >= 6 and words[3] == "WRITE" and words[5].rpartition(":")[2] in wanted:
            found.append(int(words[4]))
    return [pid for pid in found if pid > 0]


def _inodes(path: Path) -> Iterable[int]:
    for suffix in ("", "-shm"):
        try:
            yield path.with_name(path.name + suffix).stat().st_ino
        except OSError:
            continue


def _named(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(encoding='utf-8', errors='replace').strip()})"
    except OSError:
        return ""


RESERVE_BYTES = 1 << 20
_ENOUGH_BYTES = 64 << 20  # only then is something kept back
_TRIAL_BYTES = 64 << 10
_NEEDED_BYTES = 256 << 10  # for the changes of one command, and the files that SQLite keeps beside the ledger


def unwritable(path: Path) -> str:
    """Return the reason why the ledger at *path* cannot be written now; empty when it can."""
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return ""  # what is wrong shows when it is opened
    if status.f_flag & os.ST_RDONLY:
        return "its file system is read-only"
    if _free(status) < _NEEDED_BYTES:
        _give_up(path)
        if _free(os.statvfs(path.parent)) < _NEEDED_BYTES:
            return "its disk is full"
    if not path.exists():
        return ""
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return "you may not write it"
    if _try(path):
        _give_up(path)
        return _try(path)
    return ""


def _try(path: Path) -> str:
    """Return the reason why a small file beside *path* cannot be written; quotas and lack of inodes show here."""
    trial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(trial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            trial.unlink()
            os.write(descriptor, bytes(_TRIAL_BYTES))
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"nothing can be written beside it: {error.strerror or error}"
    return ""


def keep(path: Path) -> None:
    """Hold some space back beside *path* where there is plenty. Random bytes: no file system can compress them."""
    reserve = _reserve(path)
    with contextlib.suppress(OSError):
        if reserve.exists() or _free(os.statvfs(path.parent)) < _ENOUGH_BYTES:
            return
        descriptor = os.open(reserve, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, os.urandom(RESERVE_BYTES))
        finally:
            os.close(descriptor)


def _give_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        _reserve(path).unlink()


def _reserve(path: Path) -> Path:
    return path.with_name(path.name + ".reserve")


def _free(status: os.statvfs_result) -> int:
    if not status.f_blocks:  # some file systems in user space do not say how large they are
        return _ENOUGH_BYTES
    return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize
