"""Processes of this machine that hold locks on the ledger's file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def holders(path: Path, locks: Path = Path("/proc/locks")) -> list[str]:
    """``process 4711 (orc)`` for each; empty where that is not visible."""
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
