"""Slots: places for processes (or GPUs) of a host that jobs take and give back."""

from __future__ import annotations

import fcntl
import json
import os
import time

from orc.launchers.agent.errors import LaunchFailure

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


class Slots:
    """Places for processes (or GPUs) of this host: files that the agent holds locks on, so they go with the agent."""

    def __init__(self, root: str) -> None:
        # By machine: the root may be on a file system that several machines share.
        self.directory = os.path.join(root, "slots", os.uname().nodename)
        self.held: dict[int, int] = {}  # index -> file descriptor

    def take(self, total: int, count: int, marker: str) -> list[str]:
        """Take *count* of *total* and return an empty list, or nothing and return the markers of those who have them.

        Raises `LaunchFailure` when there are not that many at all.
        """
        if count > total:
            raise LaunchFailure(f"the job takes {count} slots of this host, which has {total}")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        turn = os.open(os.path.join(self.directory, ".turn"), os.O_RDWR | os.O_CREAT, 0o600)
        holders: list[str] = []
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)  # two that take some each would both get none
            for index in range(total):
                if len(self.held) == count:
                    break
                fd = os.open(os.path.join(self.directory, str(index)), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holders.append(_marker_in(fd))
                    os.close(fd)
                else:
                    self.held[index] = fd
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


def _marker_in(fd: int) -> str:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["marker"])
    except (ValueError, KeyError, TypeError):
        return "unknown"
