"""Clusters of kind pods: every node of an attempt is a container of a pod, which `pod` runs on this machine."""

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Annotated

from orc.launchers.attempts.agent_config import agent_file
from orc.launchers.backends import base
from orc.launchers.backends.base import Cause, Handle, LogChunk, LogSelector, Observation, Phase, Placement, Snapshot
from orc.launchers.backends.verdict import observe
from orc.launchers.containers.inputs import read_records, remove_private, stage, upload_inputs
from orc.launchers.containers.layout import (
    AGENT,
    SOURCE,
    ContainerLayout,
    attempt_uri,
    container_config,
    job_uri,
    source_digest,
)
from orc.launchers.containers.objects import ObjectStore
from orc.launchers.containers.output import text_of
from orc.launchers.errors import SpecError
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan, PlanCommand, PlanFile
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster
from orc.launchers.spec.options import Field, FrozenModel, validate_options, whole


class PodOptions(FrozenModel):
    """Options of a cluster of kind pods."""

    subnet: Annotated[int, whole(0, 255)] = Field(1, description="Containers have the addresses 127.0.SUBNET.N.")


@dataclass
class Directory(ObjectStore):
    """Object store of one directory: an object is the file of its name."""

    root: Path

    def path(self, uri: str) -> Path:
        return self.root / uri.rstrip("/")

    def exists(self, uri: str) -> bool:
        return self.path(uri).is_file()

    def get(self, uri: str, offset: int = 0, limit: int | None = None) -> bytes | None:
        return self.path(uri).read_bytes()[offset:][:limit] if self.exists(uri) else None

    def put(self, uri: str, data: bytes | Path) -> None:
        target = self.path(uri)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data.read_bytes() if isinstance(data, Path) else data)
        temporary.replace(target)

    def delete(self, uri: str) -> None:
        self.path(uri).unlink(missing_ok=True)


class PodBackend(base.Backend):
    """Runs attempts as pods below the cluster's root."""

    kind = "pods"
    protocol = 1
    options_model = PodOptions
    visibility_s = 1.0
    keeps_work = False

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        if cluster.root is None:
            raise SpecError("a cluster of kind pods needs a root", where=f"cluster {cluster.name}")
        self.options = validate_options(PodOptions, cluster.options, f"cluster {cluster.name}: options")
        self.objects = Directory(Path(cluster.root) / "objects")

    @property
    def root(self) -> str:
        return str(self.cluster.root)

    def pod(self, marker: str) -> Path:
        return Path(self.root) / "pods" / marker

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        hosts = [f"127.0.{self.options.subnet}.{node + 1}" for node in range(job.resources.max_nodes)]
        layout = ContainerLayout.of(snapshot, "/mnt/orc", code="/mnt/code", kept="/mnt/kept")
        port = 20000 + zlib.crc32(attempt.marker.encode()) % 10000  # the network is this machine's
        more = {"hosts": hosts, "setup": [*self.cluster.setup, *job.setup], "image": "the cluster", "link_port": port}
        config = container_config(job, snapshot, attempt, self.cluster, layout, **more)
        agents = PlanFile(_place(attempt) + AGENT, agent_file(config).content, 0o600)
        start = PlanCommand((_source(snapshot) + SOURCE, *hosts), purpose="start the pod")
        return self.plan_of(job, snapshot, attempt, config.env, (agents,), (start,))

    def preflight(self, plan: Plan) -> list[base.Finding]:
        return []

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        stage(self.objects, _source(snapshot), snapshot, self.state_dir)

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        values, place, directory = base.require_secrets(plan, secrets), _place(plan.attempt), self.pod(plan.marker)
        upload_inputs(self.objects, place, plan.files[0].content, values, Path(__file__).with_name("entry.py"))
        try:
            directory.mkdir(parents=True)  # of several who try at once, one goes on
        except FileExistsError:
            return self._handle(plan.marker)
        (directory / "input").mkdir()
        for file in self.objects.path(place).glob("*.[jp]*"):
            (directory / "input" / file.name).write_bytes(file.read_bytes())
        pod = {
            "directory": str(directory),
            "source": str(self.objects.path(plan.commands[0].argv[0])),
            "kept": str(self.objects.path(_kept(plan.attempt))),
            "hosts": plan.commands[0].argv[1:],
        }
        (directory / "pod.json").write_text(json.dumps(pod))
        with (directory / "pod.log").open("ab") as log:
            argv = [sys.executable, Path(__file__).with_name("pod.py"), directory / "pod.json"]
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return self._handle(plan.marker)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        return self._handle(marker) if self.pod(marker).is_dir() else None

    def _handle(self, marker: str) -> Handle:
        return Handle(self.cluster.name, self.kind, marker, marker, self.pod(marker).stat().st_ctime)

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        return {handle: self._observe(handle) for handle in handles}

    def _observe(self, handle: Handle) -> Observation:
        attempt, pod = AttemptId.from_marker(handle.marker), self.pod(handle.marker)
        alive, config = not (pod / "ended").exists(), self._config(attempt)
        ((_, records),) = read_records(self.objects, {attempt_uri(_kept(attempt), config): config}).items()
        seen = observe(records, alive=alive)
        if seen.phase.ended:
            remove_private(self.objects, _place(attempt), config)
            for path in [*pod.glob("**/input/secrets.json"), *pod.glob("**/input/link.json")]:
                path.unlink()
        if not seen.phase.ended or not (pod / "stop").exists():
            return seen
        return replace(seen, phase=Phase.CANCELLED, cause=Cause.CANCELLED, reason="cancelled")

    def _config(self, attempt: AttemptId) -> dict:
        return json.loads(self.objects.get(_place(attempt) + AGENT) or b"{}")

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        for handle in handles:
            pod = self.pod(handle.marker)
            if not self._observe(handle).phase.ended:
                (pod / "stop.tmp").write_text(str(time.time() + grace.total_seconds()))
                (pod / "stop.tmp").rename(pod / "stop")

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        nproc = self._config(AttemptId.from_marker(handle.marker))["nproc"]
        nodes = range(len(list(self.pod(handle.marker).glob("node-*.log"))))
        ranks = [LogSelector(rank=rank) for rank in range(len(nodes) * nproc)]
        return [*ranks, *(LogSelector(node=node) for node in nodes)]

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        names = "node-*.log" if selector.rank is not None else f"node-{selector.node}.log"
        said = [path.read_text(errors="replace") for path in sorted(self.pod(handle.marker).glob(names))]
        whole_lines = [line for text in said for line in text[: text.rfind("\n") + 1].splitlines(keepends=True)]
        data = text_of(whole_lines, rank=selector.rank)
        for start in range(offset, len(data), 1 << 20):
            yield LogChunk(selector, start, data[start : start + (1 << 20)])

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        attempt = AttemptId.from_marker(handle.marker)
        return self.objects.get(f"{job_uri(_kept(attempt), self._config(attempt))}/{name}", offset, limit) or b""


def view(backend: PodBackend, plan: Plan, path: PurePosixPath) -> Sequence[Path]:
    """Return where *path* of an attempt's containers is on this machine, for the conformance suite."""
    return [home / path.relative_to("/mnt") for home in sorted(backend.pod(plan.marker).glob("node-?"))]


def _source(snapshot: Snapshot) -> str:
    return f"snapshots/{source_digest(snapshot)}/"


def _place(attempt: AttemptId) -> str:
    return f"jobs/{attempt.job}/a{attempt.number}/"


def _kept(attempt: AttemptId) -> str:
    return f"jobs/{attempt.job}/kept"
