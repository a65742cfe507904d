"""Reports of a backend about its cluster: hosts, partitions, its queue, and what attempts have left there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

from orc.launchers.errors import SpecError
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId


@dataclass(frozen=True)
class HostReport:
    """Facts about one host of a cluster, or the reason why there are none."""

    name: str
    slots: int  # 0: one job at a time
    labels: tuple[str, ...] = ()
    reached: bool = True
    user: str = ""
    python: str = ""  # version of the interpreter that runs agents and ranks; empty when it cannot be asked
    torch: str = ""  # version that it finds; empty without one
    cpus: int = 0
    gpus: int = 0
    memory_bytes: int = 0
    free_bytes: int = 0  # on the disk of the root
    root: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class PartitionReport:
    """Partition of a cluster that has a queue of its own, as it is now."""

    name: str
    default: bool
    state: str  # "up", "down", "drain", "inact"
    nodes: int
    idle_nodes: int
    cpus: int
    idle_cpus: int
    limit_s: float | None  # the longest time limit; `None` for no bound
    gres: tuple[str, ...] = ()  # per node, like ``gpu:a100:4``; one for each sort of node that has some
    gres_nodes: tuple[int, ...] = ()  # how many nodes have each of them
    most_cpus: int = 0  # of its largest node; 0 where the cluster does not say

    @property
    def resources(self) -> tuple[str, ...]:
        """The generic resources as people read them: ``gpu:a100:4 per node``, ``gpu:a100:4 on 2 of 4 nodes``."""
        return tuple(
            f"{gres} per node" if nodes == self.nodes else f"{gres} on {nodes} of {self.nodes} nodes"
            for gres, nodes in zip(self.gres, self.gres_nodes, strict=True)
        )


@dataclass(frozen=True)
class QueuedJob:
    """Attempt of ours in a cluster's own queue."""

    marker: str
    native_id: str
    state: str  # in the words of the cluster
    partition: str
    nodes: int
    reason: str = ""  # why it waits
    starts_at: float | None = None  # when the cluster expects to start it, in seconds since the epoch
    job: str = ""  # id of its job; that of the marker unless given

    def __post_init__(self) -> None:
        if not self.job:
            with contextlib.suppress(SpecError):
                object.__setattr__(self, "job", AttemptId.from_marker(self.marker).job)


@dataclass(frozen=True)
class QueueReport:
    """Queue of a cluster: its partitions, and our attempts that wait or run."""

    partitions: tuple[PartitionReport, ...]
    jobs: tuple[QueuedJob, ...]


@dataclass(frozen=True)
class Leftover:
    """Resource that was made for an attempt, costs money, and is not needed by any live job."""

    native_id: str  # what to call it when it is to be removed
    marker: str  # of the attempt, as far as its name tells
    what: str  # "queued resource orc-digits-k3f9a2m4xq-a1 in us-central2-b"
    state: str  # in the words of the service
    why: Literal["over", "idle", "kept", "unknown"]  # its job is over; ... and its idle time too; kept; not our job
    created_at: float | None = None  # seconds since the epoch
