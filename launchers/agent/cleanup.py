"""Cleanup: SIGKILL for what an agent leaves below itself, or an attempt on this machine."""

from __future__ import annotations

import os
import signal
import time

from orc.launchers.agent.procfs import (
    boot_id,
    children,
    descendants,
    is_running,
    marked_processes,
    process_start,
    runs_another,
)
from orc.launchers.agent.records import NODE_RECORD_BYTES, checked, read_json, remove
from orc.launchers.agent.signals import signal_group, signal_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

KILL_S = 10.0  # what has not ended by then does not


def kill_descendants(marker: str, spare: Iterable[int] = ()) -> None:
    """Kill everything below this process until nothing is left, but for the children in *spare* and other attempts
    than *marker*.

    As a child subreaper this process also inherits what its children had put into the background. Reaps what it
    kills; call it when no exit status matters any more.
    """
    spared = set(spare)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # the usual case, found without looking at every process of the machine
        left = [pid for pid in children() if pid not in spared and not runs_another(pid, marker)]
        if not left:
            return
        for pid in left:
            for below in (pid, *descendants(pid, lambda other: runs_another(other, marker))):
                signal_process(below, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def _is_abandoned(name: str) -> bool:
    """Return True for a file that was just being written (`write_json`, `create_json`) by a process that is gone.

    Those that live are agents of the next attempt, which note the end of this one.
    """
    parts = name.rsplit(".", 3)
    if len(parts) < 3 or parts[-1] not in ("tmp", "new") or not parts[-2].isdigit():
        return False
    elsewhere = parts[-1] == "new" and not name.endswith(f".{os.uname().nodename}.{parts[-2]}.new")
    return not elsewhere and process_start(int(parts[-2])) is None


def _sessions(path: str) -> list[tuple[int, str]]:
    """Return the sessions that an agent has noted and that still run; the job can have written anything there."""
    noted = read_json(path, NODE_RECORD_BYTES) or {}
    sessions = noted.get("sessions")
    found = [checked(one) for one in (sessions if isinstance(sessions, list) else ()) if isinstance(one, dict)]
    pairs = [(one.get("pid", 0), str(one.get("start"))) for one in found]
    return [(pid, start) for pid, start in pairs if is_running(pid, start, str(noted.get("boot_id")))]


def kill_attempt(attempt_dir: str, node: int | None = None) -> int:
    """Kill what an attempt (or one node of it) has left on this machine when its agent is gone.

    Returns how many processes were found. The sessions come from ``pids.json``; what escaped from them (or started
    before they were noted) is recognised by its environment.
    """
    killed: dict[int, str] = {}
    if node is not None:
        names = [f"node-{node}"]
    else:  # no directory: somebody has removed it under a running attempt
        names = [n for n in os.listdir(attempt_dir) if n.startswith("node-")] if os.path.isdir(attempt_dir) else []
    for name in names:
        for pid, start in _sessions(os.path.join(attempt_dir, name, "pids.json")):
            killed[pid] = start
            signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        marked = [pid for pid in marked_processes(attempt_dir, node) if pid != os.getpid()]
        killed.update((pid, process_start(pid) or "") for pid in marked)
        for pid in marked:
            signal_process(pid, signal.SIGKILL)
        if not any(process_start(pid) == start for pid, start in killed.items()):
            break
        time.sleep(0.01)
    for name in names:
        directory = os.path.join(attempt_dir, name)
        if (read_json(os.path.join(directory, "pids.json"), NODE_RECORD_BYTES) or {}).get("boot_id") == boot_id():
            for unfinished in os.listdir(directory):
                if _is_abandoned(unfinished):
                    remove(os.path.join(directory, unfinished))
    return len(killed)
