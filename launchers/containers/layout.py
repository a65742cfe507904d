"""Layout of a container and of an attempt in the object store. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from orc.launchers.paths import Layout

if TYPE_CHECKING:
    from orc.launchers.snapshot.manifest import Snapshot

TREES = ("code", "runtime", "environment")  # of a snapshot, as they are called in its archive
RECORDS = ".orc"  # below what is kept
SOURCE = "source.tar.gz"  # the archive
AGENT, LINK, SECRETS, ENTRY = "agent.json", "link.json", "secrets.json", "entry.pyz"  # what the containers read


def source_digest(snapshot: Snapshot) -> str:
    """Return the digest that names the archive of the snapshot's trees."""
    digests = (snapshot.digests[name] for name in sorted(snapshot.digests))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:40]


@dataclass(frozen=True)
class ContainerLayout(Layout):
    """Layout of a container: what must outlive it lies below *kept*, which the platform brings to an object store."""

    code: str  # the ranks' working directory
    kept: str  # the checkpoints' directory
    trees: tuple[tuple[str, str], ...]  # digest, name of its tree

    @classmethod
    def of(cls, snapshot: Snapshot, root: str, *, code: str, kept: str) -> ContainerLayout:
        """Return the layout of containers that unpack the archive of *snapshot* at *root*."""
        named = zip(TREES, snapshot.bundles, strict=False)
        return cls(PurePosixPath(root), code, kept, tuple((bundle.digest, name) for name, bundle in named))

    def tree(self, digest: str) -> PurePosixPath:
        """A tree of the archive."""
        return self.root / dict(reversed(self.trees))[digest]

    def job(self, job: str) -> PurePosixPath:
        """Beside the checkpoints of other jobs that may share the place."""
        return PurePosixPath(self.kept) / RECORDS / job

    def work(self, job: str) -> PurePosixPath:
        """Return the directory of the code; nothing of it is kept."""
        return PurePosixPath(self.code)

    def checkpoints(self, job: str) -> PurePosixPath:
        """The directory that the platform keeps."""
        return PurePosixPath(self.kept)


def job_uri(kept: str, config: Mapping[str, Any]) -> str:
    """Return the URI of a job's directory, where *kept* is that of what is kept; *config* is its ``agent.json``."""
    return f"{kept}/{RECORDS}/{config['job']}"


def attempt_uri(kept: str, config: Mapping[str, Any]) -> str:
    """Return the URI of an attempt's directory; see `job_uri`."""
    return f"{job_uri(kept, config)}/a{config['attempt']}"
