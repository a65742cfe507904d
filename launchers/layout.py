"""Directories below a cluster's root (docs/explanation/attempt-directory.md).

Pure path arithmetic on POSIX paths: the root may be on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from orc.launchers.ids import AttemptId


@dataclass(frozen=True)
class Layout:
    """The directories of one cluster root."""

    root: PurePosixPath

    @classmethod
    def at(cls, root: str | PurePosixPath) -> Layout:
        """The layout below *root*, an absolute path on the cluster."""
        return cls(PurePosixPath(root))

    @property
    def store(self) -> PurePosixPath:
        """The content-addressed store: ``cas/<sha256>`` and ``trees/<digest>``."""
        return self.root / "store"

    def tree(self, digest: str) -> PurePosixPath:
        """An immutable snapshot."""
        return self.store / "trees" / digest

    def job(self, job: str) -> PurePosixPath:
        """Return the directory that all attempts of a job share: ``work/``, ``checkpoints/``."""
        return self.root / "jobs" / job

    def work(self, job: str) -> PurePosixPath:
        """The job's working copy of its snapshot; the current directory of every rank."""
        return self.job(job) / "work"

    def checkpoints(self, job: str) -> PurePosixPath:
        """Return the directory of checkpoints, unless the job names another place."""
        return self.job(job) / "checkpoints"

    def attempt(self, attempt: AttemptId) -> PurePosixPath:
        """Everything one attempt leaves behind."""
        return self.job(attempt.job) / f"a{attempt.number}"

    def node(self, attempt: AttemptId, node: int) -> PurePosixPath:
        """The records of one node's agent."""
        return self.attempt(attempt) / f"node-{node}"
