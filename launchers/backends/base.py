"""The contract every backend keeps. One conformance suite (tests/launchers/conformance) holds them to it."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan

if TYPE_CHECKING:
    from orc.launchers.attempts.records import AttemptExit
    from orc.launchers.snapshot.scan import Bundle
    from orc.launchers.spec import JobSpec


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; the orchestrator asks here instead of naming backends."""

    requeue: bool = False  # puts a preempted attempt back in the queue by itself, same handle
    elastic: bool = False  # nodes: min:max
    places: bool = False  # runs on named hosts that orc chooses and keeps other jobs off: see `SupportsPlacement`
    avoids: bool = False  # chooses the hosts itself, and heeds `Placement.avoid`
    self_driving: bool = False  # starts the next reconciler pass by itself when an attempt ends
    dependencies: bool = False  # holds an attempt back until others have ended: see `SupportsDependencies`
    arrays: bool = False  # takes many attempts at once, and runs only so many at a time: see `SupportsArrays`
    # How long after a cut-off submit the job may still turn up in `find`, in seconds.
    visibility_s: float = 5.0


@dataclass(frozen=True)
class Finding:
    """Something preflight has to say about a plan."""

    level: Literal["info", "warning", "error"]
    what: str
    where: str = ""  # the name of a host of the placement when that host is to blame: another may be taken instead
    hint: str = ""
    unreachable: bool = False  # an error because nobody answered: it says nothing about the plan


@dataclass(frozen=True)
class Snapshot:
    """The trees a job runs from: its code, and the runtime and agent that travel with it."""

    code: Bundle
    runtime: Bundle
    environment: Bundle | None = None  # what `environment: copy` or a conda-pack archive brings along

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """What has to be on the cluster before the job can start."""
        return (self.code, self.runtime, *((self.environment,) if self.environment else ()))

    @property
    def digests(self) -> dict[str, str]:
        """``{"code": ..., "runtime": ...}`` as recorded in plans and the ledger."""
        found = {"code": self.code.digest, "runtime": self.runtime.digest}
        return {**found, "environment": self.environment.digest} if self.environment else found


@dataclass(frozen=True)
class Placement:
    """Where one attempt runs: hosts in the order of their node numbers, by their names in the cluster."""

    hosts: tuple[str, ...]
    slots: int = 1  # taken on each of them: one for each process, or for each GPU where the job asks for GPUs
    avoid: tuple[str, ...] = ()  # for `Capabilities.avoids`, where ``hosts`` is empty: hosts that failed the job before


@dataclass(frozen=True)
class Handle:
    """What a backend needs to find a submitted attempt again. Survives as JSON in the ledger."""

    cluster: str
    backend: str
    marker: str
    native_id: str  # Slurm job id, attempt directory, ...
    submitted_at: float = 0.0  # seconds since the epoch; tells reused native ids apart
    hosts: tuple[str, ...] = ()  # of a backend that places: where to look, in node order
    group: str = ""  # what the cluster calls the array that the attempt is an element of

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        found: dict[str, Any] = {
            "cluster": self.cluster,
            "backend": self.backend,
            "marker": self.marker,
            "native_id": self.native_id,
            "submitted_at": self.submitted_at,
        }
        if self.hosts:
            found["hosts"] = list(self.hosts)
        return {**found, "group": self.group} if self.group else found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Handle:
        """Inverse of `to_dict`."""
        return cls(
            data["cluster"],
            data["backend"],
            data["marker"],
            data["native_id"],
            float(data["submitted_at"]),
            tuple(data.get("hosts", ())),
            str(data.get("group", "")),
        )


class Phase(enum.StrEnum):
    """What a backend saw. `UNKNOWN` means that nothing can be said now; it is never a failure."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"  # was there, is gone, and left no exit record
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        """True when this attempt will not change any more."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.LOST)


class Cause(enum.StrEnum):
    """Why an attempt ended without success; the vocabulary of ``retry.on`` plus what is never retried."""

    CRASH = "crash"  # a rank exited non-zero or by a signal, or setup failed
    NODE_FAILURE = "node_failure"  # a node or its agent went away
    PREEMPTED = "preempted"  # asked to go, saved or not, should run again
    TIMEOUT = "timeout"  # time limit reached
    CANCELLED = "cancelled"  # by a person
    LAUNCH = "launch"  # could not be started at all (rejected options, missing interpreter)


@dataclass(frozen=True)
class Observation:
    """One look at one attempt."""

    phase: Phase
    cause: Cause | None = None  # set when ended without success
    reason: str = ""  # one line for people: "Resources", "rank 1 exited 42", "NODE_FAIL on node2"
    exit: AttemptExit | None = None  # merged exit records of the agents, when there are any
    hosts: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0  # times the backend itself requeued this attempt
    # Hosts to blame for a node failure, by their names in the cluster; the job's next attempts keep away from them.
    # Nodes that the agents' records name (`AttemptExit.lost_nodes`) need not be repeated here.
    culprits: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)  # {"step": 120, "epoch": 3, ...} if the runtime tells
    due: bool = False  # of a backend that is `SupportsProvisioning`: there is a step for `advance` to take


@dataclass(frozen=True)
class LogSelector:
    """Which log of one attempt: a rank's, what a node's agent and launcher print, or what starts the agents prints."""

    rank: int | None = None
    node: int | None = None
    launcher: bool = False

    def __post_init__(self) -> None:
        if (self.rank is not None) + (self.node is not None) + self.launcher != 1:
            raise ValueError("a log selector names a rank, a node or the launcher")


@dataclass(frozen=True)
class LogChunk:
    """A piece of one log. ``offset`` is the byte position of ``data[0]``; the next read starts at `end`."""

    selector: LogSelector
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Where the next chunk starts, in bytes."""
        return self.offset + len(self.data)


class Backend(Protocol):
    """Where nodes come from and how a plan gets run there. Constructed as ``SomeBackend(cluster, state_dir=None)``.

    *state_dir* is the orchestrator's state directory, whose store holds the snapshots; the user's by default.
    """

    kind: str
    capabilities: Capabilities

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Pure: no network, no clock, no file system. Raises `RenderError` for what cannot be carried.

        *placement* is for backends that place; without it they show where the job would go on an empty cluster.
        """
        ...

    def preflight(self, plan: Plan) -> list[Finding]:
        """Look before leaping: reachability, programs, disk. Changes nothing."""
        ...

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Bring the snapshot's trees to the cluster's store, or to those hosts that *plan* uses.

        Idempotent; interrupted calls leave nothing partial.
        """
        ...

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Do exactly what the plan says. The snapshot was staged before.

        Raises `BackendError` when the job certainly was not started, `AmbiguousSubmit` when nobody can tell.
        """
        ...

    def find(self, marker: str) -> Handle | None:
        """What did an interrupted submit leave behind? `None` means "not seen", which only repeated calls over
        `Capabilities.visibility_s` turn into "not there". Raises `BackendUnreachable` when it cannot look.
        """
        ...

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """One batched look at many attempts; every handle gets an answer. Raises `BackendUnreachable`."""
        ...

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """The logs that exist so far: ranks in order, then nodes."""
        ...

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """What one log holds from *offset* (bytes) on, right now. Following is calling again at the last end."""
        ...

    def read_file(self, handle: Handle, name: str, offset: int = 0) -> bytes:
        """What the file *name* in the job's directory, as the attempt's first node has it, holds from *offset* (bytes)
        on; nothing while it is not there. ``metrics.jsonl`` is such a file.
        """
        ...

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Ask all ranks to end (SIGTERM), and make them after *grace*. Returns at once; idempotent."""
        ...


@dataclass(frozen=True)
class NodeEntry:
    """How a command gets to one node of an attempt: what stands in front of it on this machine."""

    node: int
    host: str
    directory: str  # of the attempt, over there; may begin with ~
    python: str  # an interpreter over there
    prefix: tuple[str, ...] = ()  # empty: the node is this machine
    for_terminal: tuple[str, ...] = ()  # instead of *prefix*, for what wants a terminal
    through_shell: bool = False  # the other side's shell reads the command, so it is quoted

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """The command line for this machine that runs *command* over there."""
        prefix = self.for_terminal if terminal else self.prefix
        if not self.through_shell:
            return [*prefix, *command]
        program, *words = command
        home = "~/" if program.startswith("~/") else ""  # a program in the home directory over there
        return [*prefix, home + shlex.join([program.removeprefix(home), *words])]


@runtime_checkable
class SupportsExec(Protocol):
    """What a backend whose nodes can be entered has on top of `Backend`."""

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """The ways to the nodes of an attempt, in node order. Touches no network."""
        ...


@dataclass(frozen=True)
class HostReport:
    """What one host of a cluster says about itself, or why it says nothing."""

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


@runtime_checkable
class SupportsHostSurvey(Protocol):
    """What a backend that knows its hosts one by one has on top of `Backend`."""

    def survey(self) -> list[HostReport]:
        """Ask all hosts at once what they are, in the order of the cluster. Changes nothing."""
        ...


@runtime_checkable
class SupportsCheck(Protocol):
    """Findings of a backend about its cluster before there is a job for it, on top of `Backend.preflight`."""

    def check(self) -> list[Finding]:
        """Errors and warnings. Changes nothing."""
        ...


@dataclass(frozen=True)
class PartitionReport:
    """One partition of a cluster that has a queue of its own, as it is now."""

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

    @property
    def resources(self) -> tuple[str, ...]:
        """The generic resources as people read them: ``gpu:a100:4 per node``, ``gpu:a100:4 on 2 of 4 nodes``."""
        return tuple(
            f"{gres} per node" if nodes == self.nodes else f"{gres} on {nodes} of {self.nodes} nodes"
            for gres, nodes in zip(self.gres, self.gres_nodes, strict=True)
        )


@dataclass(frozen=True)
class QueuedJob:
    """One of our attempts in a cluster's own queue."""

    marker: str
    native_id: str
    state: str  # in the words of the cluster
    partition: str
    nodes: int
    reason: str = ""  # why it waits
    starts_at: float | None = None  # when the cluster expects to start it, in seconds since the epoch


@dataclass(frozen=True)
class QueueReport:
    """A cluster's own queue: its partitions, and our attempts that wait or run."""

    partitions: tuple[PartitionReport, ...]
    jobs: tuple[QueuedJob, ...]


@runtime_checkable
class SupportsQueue(Protocol):
    """What a backend whose cluster has a queue of its own has on top of `Backend`."""

    def queue(self, handles: Sequence[Handle]) -> QueueReport:
        """Ask for the partitions, and for what is known of our attempts' start. Raises `BackendUnreachable`."""
        ...


@runtime_checkable
class SupportsRecall(Protocol):
    """What a backend has that can give back what was staged to it: then any machine can make a job's next attempt."""

    def recall(self, digest: str, handle: Handle) -> None:
        """Bring the snapshot *digest* into the state directory's store, from the hosts of an attempt that ran from it.

        Raises `LaunchError` when none of them has it.
        """
        ...


@runtime_checkable
class SupportsPlacement(Protocol):
    """What a backend with `Capabilities.places` has on top of `Backend`."""

    def place(self, job: JobSpec, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
        """Pure: hosts for *job*, where *taken* are the slots of each host that other attempts hold.

        Hosts in *avoid* have failed this job before; they are used only when it could not run without them at all.
        Raises `NoRoom` when the job has to wait for others to end, `RenderError` when the cluster can never carry it.
        """
        ...

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """`Backend.find` on the *hosts* that the attempt was given: what others do not answer does not matter.

        Without *complete*, what was started half is left so: it is about to be cancelled.
        """
        ...

    def candidates(self, job: JobSpec) -> Collection[str]:
        """Pure: every host that *job* could run on, were nothing else there: younger jobs leave them while it waits."""
        ...


@dataclass(frozen=True)
class Dependency:
    """What has to become of another attempt on the same cluster before one starts.

    It is about that attempt, not its job: an attempt that follows it after a failure is somebody else's to depend on.
    What the cluster requeues by itself is the same attempt, and is waited for.
    """

    handle: Handle
    condition: Literal["succeeded", "failed", "ended"] = "succeeded"


@runtime_checkable
class SupportsDependencies(Protocol):
    """What a backend with `Capabilities.dependencies` has on top of `Backend`."""

    def submit_after(self, plan: Plan, secrets: Mapping[str, str], after: Sequence[Dependency]) -> Handle:
        """`Backend.submit` of an attempt that the cluster holds back until all of *after* are met.

        Dependencies that are met already are left out. Raises `BackendError` for one that never can be (nothing is
        submitted), `BackendUnreachable` where nobody can tell. An attempt whose dependency turns out to be impossible
        later on never runs and ends as `Phase.CANCELLED`, with a reason that says so.
        """
        ...


@runtime_checkable
class SupportsArrays(Protocol):
    """What a backend with `Capabilities.arrays` has on top of `Backend`."""

    def submit_array(
        self,
        plans: Sequence[Plan],
        secrets: Mapping[str, str],
        *,
        at_once: int | None = None,
        after: Sequence[Dependency] = (),
    ) -> list[Handle]:
        """Submit many attempts in one step; the cluster runs *at_once* of them at a time, or as many as it can.

        Every element is an attempt of its own: it has its own marker and handle (of one `Handle.group`), and is found,
        polled, cancelled, requeued and logged like any other. The plans must ask the cluster for the same; they may
        run different programs. Attempts that are there already are left as they are, and the others become an array
        without them, so that repeating an interrupted call is safe. *secrets* has the values for all of them. The
        handles come in the order of *plans*.

        Raises what `Backend.submit` and `SupportsDependencies.submit_after` raise: `BackendError` when certainly none
        was started, `AmbiguousSubmit` when nobody can tell (all or none of them will be found).
        """
        ...


@runtime_checkable
class SupportsProvisioning(Protocol):
    """What a backend that has machines made for an attempt has on top of `Backend`.

    `Backend.submit` asks for them and returns; until they are up the attempt is PENDING, and nothing of orc needs to
    run. A later pass that sees `Observation.due` hands over again what the attempt is made from.
    """

    def advance(self, handle: Handle, plan: Plan, secrets: Mapping[str, str]) -> Observation:
        """Take the next step towards the start, and look again. The snapshot is in the state directory's store.

        Idempotent; what cannot be done now is tried by the next pass. Raises `BackendUnreachable`.
        """
        ...


@dataclass(frozen=True)
class Leftover:
    """Something that was made for an attempt, costs money, and is not needed by any live job."""

    native_id: str  # what to call it when it is to be removed
    marker: str  # of the attempt, as far as its name tells
    what: str  # "queued resource orc-digits-k3f9a2-a1 in us-central2-b"
    state: str  # in the words of the service
    why: Literal["over", "idle", "kept", "unknown"]  # its job is over; ... and its idle time too; kept; not our job
    created_at: float | None = None  # seconds since the epoch


@runtime_checkable
class SupportsCleanup(Protocol):
    """What a backend that makes things which cost money as long as they exist has on top of `Backend`."""

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """What is there and not needed by the attempts *live* (markers); those of *over* have ended.

        What is of neither belongs to another ledger, or to one that was lost. Raises `BackendUnreachable`.
        """
        ...

    def sweep(self, leftover: Leftover) -> None:
        """Remove it for good, and wait until it is gone. Raises `BackendError`."""
        ...
