"""Processes of this machine as /proc shows them."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any


def boot_id() -> str:
    """Return the kernel's boot id, which changes with every boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return field 22 of ``/proc/<pid>/stat``; `None` when there is no such process, or only its zombie."""
    stat = process_stat(pid)
    return stat[19] if stat and stat[0] not in ("Z", "X") else None


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/<pid>/stat`` behind the name, state first; `None` when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may hold spaces and parentheses
    except OSError:
        return None


def is_running(pid: int, start: str, boot: str) -> bool:
    """Return whether that very process still runs on this machine (not a later one with the same number)."""
    return bool(pid) and boot == boot_id() and process_start(pid) == start


def holder_runs(lease: Mapping[str, Any]) -> bool:
    """Return whether the process that holds *lease* runs on this machine."""
    return is_running(int(lease.get("pid", 0)), str(lease.get("pid_start")), str(lease.get("boot_id")))


def identity() -> dict[str, Any]:
    """Return the identity of this process, as a lease holds it."""
    try:
        network, processes = os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")
    except OSError:
        network = processes = ""
    pid = os.getpid()
    return {
        "host": os.uname().nodename,
        "pid": pid,
        "pid_start": process_start(pid) or "",
        "boot_id": boot_id(),
        "net": network,
        "pid_ns": processes,
        "at": time.time(),
    }


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def runs_another(pid: int, marker: str) -> bool:
    """Return whether the process runs another attempt than *marker*: a job that a rank has submitted outlives us."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read().split(b"\0")
    except OSError:
        return False
    return any(word.startswith(b"ORC_GANG=") and word != os.fsencode(f"ORC_GANG={marker}") for word in environ)


def descendants(root: int, spare: Callable[[int], bool] = lambda pid: False) -> list[int]:
    """Return all living processes below *root*, but for those that are to be spared and what is below them."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = process_stat(pid)
        if stat and stat[0] not in ("Z", "X"):
            children.setdefault(int(stat[1]), []).append(pid)
    found: list[int] = []
    front = [root]
    while front:
        below = [child for pid in front for child in children.get(pid, ()) if not spare(child)]
        found += below
        front = below
    return found


def children() -> list[int]:
    """Return the direct children of this process, ended but not yet reaped ones included."""
    me = str(os.getpid())
    return [pid for pid in _pids() if (stat := process_stat(pid)) is not None and stat[1] == me]


def marked_processes(attempt_dir: str, node: int | None = None) -> list[int]:
    """Return this user's processes on this machine whose environment says that they are of the attempt (and node)."""
    wanted = {os.fsencode(f"ORC_ATTEMPT_DIR={attempt_dir}")}
    if node is not None:
        wanted.add(os.fsencode(f"ORC_NODE_RANK={node}"))
    found = []
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted.issubset(file.read().split(b"\0")) and process_start(pid):
                    found.append(pid)
        except OSError:
            continue
    return found
