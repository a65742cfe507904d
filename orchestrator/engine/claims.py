"""Claims on jobs, with an owner and an expiry: they make two passes at once safe.

A claim is free when nobody holds it, when it has expired, or when its owner was a process of this very machine that is
gone. The last case makes that a killed ``orc submit`` need not be waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orc.launchers.agent.procfs import boot_id, process_start

# Longer than any backend's own time-out of one submit call; only what died on another machine is waited for so long.
TTL_S = 300.0


@dataclass(frozen=True)
class Owner:
    """Identity of a process, unique over machines and boots."""

    boot_id: str  # of the machine's kernel
    pid_namespace: str
    pid: int
    started: str  # field 22 of /proc/<pid>/stat: tells a process from a later one with the same number
    nonce: str

    @classmethod
    def new(cls) -> Owner:
        """Return the identity of this process, for one purpose."""
        pid = os.getpid()
        return cls(boot_id(), _pid_namespace(), pid, process_start(pid) or "", os.urandom(4).hex())

    def __str__(self) -> str:
        return f"{self.boot_id}/{self.pid_namespace}/{self.pid}/{self.started}/{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Return the inverse of `str`. Raises `ValueError`."""
        boot_id, namespace, pid, started, nonce = text.split("/")
        return cls(boot_id, namespace, int(pid), started, nonce)


def is_free(owner: str | None, expires_at: float | None, now: float, is_gone: Callable[[str], bool]) -> bool:
    """Return True for a claim that another owner may take. Pure but for *is_gone*."""
    return owner is None or expires_at is None or expires_at <= now or is_gone(owner)


_abandoned: set[str] = set()  # owners of this process whose claims the ledger did not take back


def abandon(owner: str) -> None:
    """Take *owner*, an identity of this process, for gone: it will do nothing more with what it has claimed."""
    _abandoned.add(owner)


def owner_is_gone(text: str) -> bool:
    """Return True when the owner was a process on this machine and has ended; False when it was on another one."""
    if text in _abandoned:
        return True
    owner = Owner.parse(text)
    if (owner.boot_id, owner.pid_namespace) != (boot_id(), _pid_namespace()):
        return False
    return process_start(owner.pid) != owner.started


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
