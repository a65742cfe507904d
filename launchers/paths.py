"""Places of orc's files: on this machine, and below a cluster's root (docs/explanation/attempt-directory.md).

On this machine every place can be moved with an environment variable. What is below a cluster's root is pure arithmetic
on POSIX paths: the root may be on another machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from orc.launchers import strict_modes
from orc.launchers.errors import LaunchError
from orc.launchers.ids import AttemptId


def state_dir(*, create: bool = True) -> Path:
    """Ledger, snapshots and local attempts: ``$ORC_STATE_DIR``, or the user's state directory.

    Created, with access for the owner only, unless *create* is false. Raises `LaunchError`, also where other users
    could change what is there.
    """
    path = _place("ORC_STATE_DIR", "user_state_dir")
    refuse_untrusted(path, "state directory")
    try:
        if create and not path.is_dir():
            strict_modes.make_private(path)
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
        raise LaunchError(
            f"the state directory cannot be created: {reason}",
            where=str(path),
            hint="set ORC_STATE_DIR to a directory you can write to",
        ) from None
    return path


def config_dir() -> Path:
    """The user's configuration: ``$ORC_CONFIG_DIR``, or the user's configuration directory. Not created."""
    return _place("ORC_CONFIG_DIR", "user_config_dir")


def clusters_file() -> Path:
    """The clusters file: ``$ORC_CLUSTERS``, or ``clusters.yaml`` in `config_dir`. Need not exist."""
    given = os.environ.get("ORC_CLUSTERS")
    return Path(given).expanduser().absolute() if given else config_dir() / "clusters.yaml"


def refuse_untrusted(path: str | Path, what: str, kind: type[LaunchError] = LaunchError) -> None:
    """Raise an error of that *kind* where others than the user and root could have written what is at *path*."""
    try:
        strict_modes.check(path)
    except strict_modes.Untrusted as error:
        raise kind(
            f"the {what} {path} is not to be trusted", where=str(error.filename), hint=str(error.strerror)
        ) from None


def _place(variable: str, function: str) -> Path:
    given = os.environ.get(variable)
    if given and not given.isprintable():  # paths become lines of scripts and of records
        raise LaunchError(f"{variable} is {given!r}: a path is one line of printable characters")
    if given:
        return Path(given).expanduser().absolute()
    # Imported only when the variable is unset: start-up time.
    import platformdirs

    return Path(getattr(platformdirs, function)("orc"))


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
