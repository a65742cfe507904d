"""A plan: everything that would be sent to a backend, as one immutable, printable value."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from orc.launchers.ids import AttemptId

FORMAT = 1


@dataclass(frozen=True)
class PlanFile:
    """A small text file that the backend writes before it starts anything."""

    path: str  # absolute, on the cluster
    content: str
    mode: int = 0o644
    host: str | None = None  # on that host alone; `None`: where the cluster is entered, or on every host of the job


@dataclass(frozen=True)
class PlanCommand:
    """A command that the backend runs where the cluster is entered (this machine, a login node, a host)."""

    argv: tuple[str, ...]
    cwd: str | None = None
    purpose: str = ""
    host: str | None = None  # where it runs, when the cluster is entered in more than one place

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True)
class Plan:
    """Plan of an attempt: all that `Backend.submit` does, byte for byte. Holds no secret and touches nothing.

    ``files`` are written in order, ``commands`` run in order. ``env`` is the environment that the ranks get on top
    of what the node gives (also contained in the agent's file; repeated here to be seen and compared). ``trees``
    names the snapshots the plan relies on: ``{"code": digest, "runtime": digest}``.
    """

    attempt: AttemptId
    cluster: str
    backend: str
    files: tuple[PlanFile, ...]
    commands: tuple[PlanCommand, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    trees: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()  # names only

    @property
    def marker(self) -> str:
        """The attempt's marker."""
        return self.attempt.marker

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form with a stable key order."""
        return {
            "format": FORMAT,
            "marker": self.marker,
            "cluster": self.cluster,
            "backend": self.backend,
            "trees": dict(sorted(self.trees.items())),
            "env": dict(sorted(self.env.items())),
            "secrets": list(self.secrets),
            "files": [
                {"path": f.path, "mode": f"{f.mode:04o}", "content": f.content, **_on(f.host)} for f in self.files
            ],
            "commands": [
                {"argv": list(c.argv), "cwd": c.cwd, "purpose": c.purpose, **_on(c.host)} for c in self.commands
            ],
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form: equal digests send equal bytes."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def _on(host: str | None) -> dict[str, str]:
    return {} if host is None else {"host": host}
