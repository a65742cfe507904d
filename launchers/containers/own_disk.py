"""Containers that share no file system: where things are in each, and in the object store, if there is one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from orc.launchers.containers.inputs import PLAIN_ENTRY, entry_program, packed, stage
from orc.launchers.containers.layout import ENTRY, SOURCE, ContainerLayout, container_config, source_digest
from orc.launchers.containers.objects import UrlObjects
from orc.launchers.errors import BackendError

if TYPE_CHECKING:
    from orc.launchers.agent.config import AgentConfig
    from orc.launchers.ids import AttemptId
    from orc.launchers.snapshot.manifest import Snapshot
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster


@dataclass(frozen=True)
class OwnDisk:
    """Directories of an attempt whose containers know only their number (`entry`)."""

    home: str  # a directory in each container
    inputs: str  # where the platform puts what they read
    private: str  # in memory
    store: str | None  # URL of a place in an object store: code is fetched there, records and logs are brought there

    def layout(self, snapshot: Snapshot | None = None) -> ContainerLayout:
        """Return the layout of a container, with the trees of *snapshot*."""
        root, code, kept = f"{self.home}/run", f"{self.home}/work", f"{self.home}/kept"
        if snapshot is None:
            return ContainerLayout(PurePosixPath(root), code, kept, ())
        return ContainerLayout.of(snapshot, root, code=code, kept=kept)

    def stored(self, attempt: AttemptId) -> str:
        """Return the URL of an attempt's directory."""
        return f"{self.store}/jobs/{attempt.job}/a{attempt.number}"

    def checkpoints(self, given: str | None, job: str) -> str:
        """Return the place of the checkpoints of *job*, for which *given* is asked."""
        if given and ("://" in given or given[0] in "/~"):
            return given
        if self.store:
            return f"{self.store}/jobs/{job}/{given or 'checkpoints'}"
        layout = self.layout()
        return str(layout.job(job) / given if given else layout.checkpoints(job))

    def config(
        self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, cluster: Cluster, hosts: Sequence[str], image: str
    ) -> AgentConfig:
        """Return the configuration of the agents; see `container_config`. Raises `RenderError`."""
        place = self.checkpoints(job.checkpoint.dir, attempt.job)
        job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"dir": place})})
        config = container_config(
            job,
            snapshot,
            attempt,
            cluster,
            self.layout(snapshot),
            hosts=hosts,
            setup=(*cluster.setup, *job.setup),
            image=image,
            # Containers may have the network of their host, and share its ports.
            link_port=20000 + zlib.crc32(attempt.marker.encode()) % 10000,
        )
        backend = {"store": f"{self.store}/jobs/{attempt.job}"} if self.store else {}
        return config.replace(private_dir=self.private, backend=backend)

    def command(self, python: str, platform: str, snapshot: Snapshot, variable: str, report: str) -> list[str]:
        """Return what each container starts; see `entry`."""
        archive = (self._source(snapshot) if self.store else f"{self.inputs}/") + SOURCE
        return [python, "-I", "-S", f"{self.inputs}/{ENTRY}", platform, self.inputs, variable, archive, report]

    def stage(self, snapshot: Snapshot, state_dir: Path, most: int) -> dict[str, bytes]:
        """Bring the archive to the object store; return what else the containers read, by its name in ``inputs``.

        Raises `BackendError`, also for more than *most* bytes.
        """
        found = {ENTRY: entry_program(PLAIN_ENTRY)}
        if self.store:
            stage(UrlObjects(), self._source(snapshot), snapshot, state_dir)
            return found
        found[SOURCE] = packed(snapshot, state_dir)
        if (size := sum(map(len, found.values()))) > most:
            what = f"code and runtime have {size >> 10} KiB when packed, and no more than {most >> 10} KiB fit"
            hint = "Give the cluster a `root` that is shared or a `store`, or leave files out of the snapshot."
            raise BackendError(what, hint=hint)
        return found

    def _source(self, snapshot: Snapshot) -> str:
        return f"{self.store}/snapshots/{source_digest(snapshot)}/"
