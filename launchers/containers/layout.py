"""Layout of a container and of an attempt in the object store, and the ``agent.json`` for it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from orc.launchers.attempts.agent_config import agent_config
from orc.launchers.errors import RenderError
from orc.launchers.paths import Layout
from orc.launchers.spec.clusters import environment_of

if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.ids import AttemptId
    from orc.launchers.snapshot.manifest import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster

TREES = ("code", "runtime", "environment")  # of a snapshot, as they are called in its archive
RECORDS = ".orc"  # below what is kept
SOURCE = "source.tar.gz"  # the archive
AGENT, LINK, SECRETS, ENTRY = "agent.json", "link.json", "secrets.json", "entry.pyz"  # what the containers read
LINK_PORT = 29411  # containers have a network of their own: nothing else listens there


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


def container_config(
    job: JobSpec,
    snapshot: Snapshot,
    attempt: AttemptId,
    cluster: Cluster,
    layout: ContainerLayout,
    *,
    hosts: Sequence[str],
    setup: Sequence[str],
    image: str,
    link_port: int = LINK_PORT,
) -> AgentConfig:
    """Return the configuration of the agents of an attempt, whose containers reach each other by the names *hosts*.

    *setup* are all commands before the ranks, *image* says where people name the image instead of in ``environment``.
    Raises `RenderError`.
    """
    refuse_container(job, cluster, image)
    config = agent_config(job, snapshot, attempt, cluster, layout, deadline_s=job.resources.time_s, setup=list(setup))
    config = config.replace(
        work_dir=layout.code,
        logs_dir=f"{layout.root}/logs",
        private_dir=f"{layout.root}/private",
        hosts=[{"name": name, "address": name} for name in hosts],
    )
    if len(hosts) > 1:
        config = config.replace(link=True, min_nodes=len(hosts), hub={"port": link_port, "addresses": [hosts[0]]})
    return config


def refuse_container(job: JobSpec, cluster: Cluster, image: str) -> None:
    """Raise `RenderError` for a job that names a container in ``environment``, and not in *image*."""
    if environment_of(job, cluster).container is not None:
        what = "environment.container: the job runs in a container already"
        raise RenderError(what, where=job.name, hint=f"Name the image in {image}.")
