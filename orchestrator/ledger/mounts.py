"""File systems of paths, as far as they matter to a database."""

from __future__ import annotations

import os
import re
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
