"""Facts of ``/proc`` about the ledger's file: the type of its file system, and the processes that lock it."""

from __future__ import annotations

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
