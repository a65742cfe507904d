"""Slots: places for processes (or GPUs) of a host that jobs take and give back."""

from __future__ import annotations

import fcntl
import json
import os
import time

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.gpus import gpu_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Slots:
    """Places for processes (or GPUs) of this host: files that the agent holds locks on, so they go with the agent."""

    def __init__(self, root: str) -> None:
        # By machine: the root may be on a file system that several machines share.
        self.directory = os.path.join(root, "slots", os.uname().nodename)
        self.held: dict[str, int] = {}  # name -> file descriptor

    def take(self, names: Sequence[str], count: int, marker: str, kind: str = "slots") -> list[str]:
        """Take *count* of *names* and return an empty list, or nothing and return the markers of those who have them.

        Raises `LaunchFailure` when there are not that many at all.
        """
        if count > len(names):
            raise LaunchFailure(f"the job takes {count} {kind} of this host, which has {len(names)}")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        turn = os.open(os.path.join(self.directory, ".turn"), os.O_RDWR | os.O_CREAT, 0o600)
        holders: list[str] = []
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)  # two that take some each would both get none
            for name in names:
                if len(self.held) == count:
                    break
                fd = os.open(os.path.join(self.directory, name.replace("/", "_")), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holders.append(_marker_in(fd))
                    os.close(fd)
                else:
                    self.held[name] = fd
            if len(self.held) < count:
                self.close()
                return sorted(set(holders))
            for fd in self.held.values():
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({"marker": marker, "pid": os.getpid(), "at": time.time()}).encode(), 0)
            return []
        except BaseException:
            self.close()
            raise
        finally:
            os.close(turn)

    def close(self) -> None:
        """Release the slots."""
        for fd in self.held.values():
            os.close(fd)
        self.held = {}


def slot_names(wanted: Mapping[str, Any], total: int, env: Mapping[str, str]) -> list[str]:
    """Return the names of the slots of a host that a job may take: its GPUs first, one for each slot that has one.

    *wanted* is the ``slots`` of ``agent.json``, *total* what the host has. A job that asks for GPUs may take those
    alone: raises `LaunchFailure` where they cannot be listed.
    """
    try:
        gpus = gpu_names(env)[:total]
    except LaunchFailure:
        if wanted.get("gpus"):
            raise
        gpus = []
    return gpus if wanted.get("gpus") and gpus else [*gpus, *map(str, range(len(gpus), total))]


def _marker_in(fd: int) -> str:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["marker"])
    except (ValueError, KeyError, TypeError):
        return "unknown"
