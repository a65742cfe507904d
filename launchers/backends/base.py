"""The contract of a backend. One conformance suite (tests/launchers/conformance) holds all of them to it.

docs/how-to/add-a-backend.md builds one from it.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from orc.launchers.agent.records import MOST_NODES, checked, clean_text
from orc.launchers.attempts.records import AttemptExit
from orc.launchers.attempts.records import Cause as Cause
from orc.launchers.attempts.records import LogChunk as LogChunk
from orc.launchers.attempts.records import LogSelector as LogSelector
from orc.launchers.backends.reports import HostReport as HostReport
from orc.launchers.backends.reports import Leftover as Leftover
from orc.launchers.backends.reports import PartitionReport as PartitionReport
from orc.launchers.backends.reports import QueuedJob as QueuedJob
from orc.launchers.backends.reports import QueueReport as QueueReport
from orc.launchers.errors import BackendError, LaunchError, PartlyUnreachable, RenderError
from orc.launchers.findings import Finding
from orc.launchers.hosts.sessions import NodeEntry as NodeEntry
from orc.launchers.ids import AttemptId
from orc.launchers.paths import Layout
from orc.launchers.plan import Plan, PlanCommand, PlanFile
from orc.launchers.snapshot.manifest import Snapshot as Snapshot

if TYPE_CHECKING:
    from pydantic import BaseModel

    from orc.launchers.remote.transport import Transport
    from orc.launchers.snapshot.content_store import ContentStore
    from orc.launchers.spec import JobSpec, LoadedJob
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


# Version of the contract of backends: another one where a method, or what is stable (`orc.launchers.testing.surface`),
# changes so that a backend has to change with it.
PROTOCOL = 1


@dataclass(frozen=True)
class Placement:
    """Hosts of one attempt in the order of their node numbers, by their names in the cluster."""

    hosts: tuple[str, ...]
    slots: int = 1  # taken on each of them: one for each process, or for each GPU where the job asks for GPUs
    avoid: tuple[str, ...] = ()  # for `Backend.avoids`, where ``hosts`` is empty: hosts that failed the job before


@dataclass(frozen=True)
class Handle:
    """Reference to a submitted attempt on its backend. Survives as JSON in the ledger."""

    cluster: str
    backend: str
    marker: str
    native_id: str  # Slurm job id, attempt directory, ...
    submitted_at: float = 0.0  # seconds since the epoch; tells reused native ids apart
    hosts: tuple[str, ...] = ()  # of a backend that places: where to look, in node order
    group: str = ""  # what the cluster calls the array that the attempt is an element of
    nodes: int = field(default=0, compare=False)  # the most that its plan has; 0 where that is not known

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
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
        """Return the handle of which `to_dict` gave *data*."""
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
    """State of an attempt at its backend. `UNKNOWN` means that it cannot be determined now; it is never a failure."""

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


@dataclass(frozen=True)
class Observation:
    """State of one attempt as its backend saw it at one moment."""

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
    failed_hosts: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)  # {"step": 120, "epoch": 3, ...} if the runtime tells
    due: bool = False  # of a backend that is `SupportsProvisioning`: there is a step for `advance` to take

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        return asdict(self) | {"exit": self.exit.to_dict() if self.exit else None, "progress": dict(self.progress)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Observation:
        """Return the observation that `to_dict` has described, without what cannot be. Raises `ValueError`."""
        known = checked({name: told.get(name) for name in ("reason", "started_at", "ended_at", "progress")})
        ended, cause = told.get("exit"), told.get("cause")
        try:
            return cls(
                Phase(told["phase"]),
                Cause(cause) if cause else None,
                exit=AttemptExit.from_dict(checked(ended) | {"hosts": _names(ended.get("hosts"))}) if ended else None,
                hosts=_names(told.get("hosts")),
                failed_hosts=_names(told.get("failed_hosts")),
                restarts=checked({"restart": told.get("restarts")}).get("restart", 0),
                due=told.get("due") is True,
                **known,
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no observation: {error!r}") from None


def _names(told: Any) -> tuple[str, ...]:
    """Return the names of hosts in *told*, a record's list."""
    names = told if isinstance(told, list) else []
    return tuple(clean_text(name, slice(255)) for name in names[:MOST_NODES] if isinstance(name, str))


class Backend(abc.ABC):
    """A platform that runs attempts: the contract, and what most platforms do alike.

    ``SomeBackend(cluster, state_dir=None)`` reads the cluster's options and contacts nothing; connections are made when
    they are needed, and `close` ends them. *state_dir* is the orchestrator's state directory, whose store holds the
    snapshots; the user's by default. What only some platforms can do is a protocol of its own, ``Supports...``, and
    nothing falls back to this machine: a store that a platform does not have is refused with the platform's name.
    """

    kind: ClassVar[str]
    protocol: ClassVar[int] = PROTOCOL  # that the class was written for; a package of its own says it
    options_model: ClassVar[type[BaseModel] | None] = None  # of `options:` of a cluster, for editors and completion
    job_options_model: ClassVar[type[BaseModel] | None] = None  # of `resources.options.<kind>` of a job
    programs: ClassVar[tuple[str, ...]] = ()  # that clusters of this kind need on this machine, for `orc doctor`
    # How long after a cut-off submit the attempt may still turn up in `find`, in seconds.
    visibility_s: float = 5.0
    # For how long an attempt that is LOST may come back, in seconds, unless the cluster's ``lost_after`` says so.
    lost_after_s: float = 0.0
    avoids: bool = False  # chooses the hosts itself, and heeds `Placement.avoid`
    keeps_work: bool = True  # the working copy of a job is there for its next attempt
    passes_artefacts: bool = False  # outputs of its jobs can be fetched from here, and inputs be brought to them
    logs_in: bool = False  # users may have accounts of their own on its clusters (``run_as`` of clusters.yaml)
    is_remote: bool = True  # attempts are on other machines: state and home directory of this one mean nothing there
    self_driving: bool = False  # starts the next reconciler pass by itself when an attempt ends

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        self.cluster = cluster
        self._given_state_dir = state_dir

    @property
    def loss_window_s(self) -> float:
        """Seconds for which `Phase.LOST` is not believed: 0 where `poll` waits by itself, or is certain."""
        given = self.cluster.lost_after
        return self.lost_after_s if given is None else float(given)

    @property
    def state_dir(self) -> Path:
        """The orchestrator's state directory on this machine."""
        from orc.launchers.paths import state_dir

        return self._given_state_dir or state_dir()

    @property
    def store(self) -> ContentStore:
        """The orchestrator's own store, which holds the snapshots of all jobs."""
        from orc.launchers.snapshot.content_store import ContentStore

        return ContentStore(Path(Layout.at(self.state_dir.as_posix()).store))

    @property
    @abc.abstractmethod
    def root(self) -> str:
        """The directory of orc's files on the cluster, for display: may begin with ``~``, or be a URL."""

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        return

    def addresses(self, hosts: Collection[str] = ()) -> dict[str, str]:
        """Return what makes the machines of an attempt on *hosts*: ``{"address of node1": "10.0.0.1", ...}``.

        As far as the cluster's entry says so: what stands in no entry is not compared. An attempt is asked about only
        where nothing of it has changed since it was sent: another machine, or another home directory, does not know it.
        Contacts nothing.
        """
        return {}

    # -- before the start

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where this Python lacks what the cluster is reached with. Contacts nothing."""
        return

    @abc.abstractmethod
    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Return the plan of an attempt. Pure: no network, no clock, no file system.

        Its files and commands name the trees of *snapshot* where `stage` will have brought them. *placement* is for
        backends that place; without it they show where the job would go on an empty cluster.
        Raises `RenderError` for what cannot be carried.
        """

    def plan_of(
        self,
        job: JobSpec,
        snapshot: Snapshot,
        attempt: AttemptId,
        env: Mapping[str, str],
        files: Sequence[PlanFile],
        commands: Sequence[PlanCommand],
    ) -> Plan:
        """Return the plan of *attempt* at *job* with *files* and *commands*, for ranks with *env* and *snapshot*."""
        names, name = tuple(job.secrets), self.cluster.name
        return Plan(attempt, name, self.kind, tuple(files), tuple(commands), env, snapshot.digests, names)

    @abc.abstractmethod
    def preflight(self, plan: Plan) -> list[Finding]:
        """Check what the plan needs: reachability, programs, disk. Changes nothing.

        Returns:
            Everything that was found, errors and warnings; empty when all is well.
        """

    def check(self) -> list[Finding]:
        """Check the cluster itself, before there is a job for it. Changes nothing.

        Returns:
            As of `preflight`.
        """
        return []

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the cluster's snapshot stores, or those of the hosts that *plan* uses; `close` closes them.

        `stage`, ``orc sync`` and ``orc gc`` use them. Raises `BackendError` for a platform without stores.
        """
        raise BackendError(
            f"clusters of kind {self.kind} have no snapshot stores that could be reached from here",
            where=f"cluster {self.cluster.name}",
            hint="Submitting a job brings its snapshot there; in an object store, let a rule of the bucket delete what "
            "is old below snapshots/.",
        )

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Bring the snapshot's trees to the cluster's stores, or to those of the hosts that *plan* uses.

        Idempotent; interrupted calls leave nothing partial. Raises `LaunchError` for the first host that could not be
        served; the others are, nevertheless.
        """
        from orc.launchers.transfer.targets import deliver

        deliver(snapshot.bundles, self.store, self.stores(plan))

    # -- the start

    @abc.abstractmethod
    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Execute *plan* exactly. The snapshot was staged before; *secrets* are values by name.

        Raises `BackendError` when the job certainly was not started, `AmbiguousSubmit` when that cannot be known.

        Returns:
            The handle by which the attempt is polled.
        """

    def most_elements(self) -> int | None:
        """Return how many attempts one array takes at most (`SupportsArrays`); `None` where that is not bounded.

        Raises `BackendUnreachable` when it cannot be asked for.
        """
        return None

    @abc.abstractmethod
    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return what an interrupted submit of *marker* has left behind; `None` means "not seen".

        Only repeated calls over `visibility_s` turn that into "not there". *hosts* are those that the attempt was
        given, of a backend that places: what others do not answer does not matter. Without *complete*, what was started
        half is left so: it is about to be cancelled. Raises `BackendUnreachable` when it cannot look.
        """

    # -- afterwards

    @abc.abstractmethod
    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Return an observation of each of *handles*, all requested in one batch. Raises `BackendUnreachable`."""

    @abc.abstractmethod
    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Send SIGTERM to all ranks of *handles*, and SIGKILL after *grace*. Returns at once; idempotent."""

    def reap(self, handle: Handle) -> None:
        """End whatever *handle*, an attempt that is over, may have left running; the next attempt starts afterwards."""
        return

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return the way to the directory of *handle*, and its path there, for `logs` and `read_file`.

        Raises `BackendError` for a platform whose attempts have none.
        """
        raise BackendError(f"attempts on clusters of kind {self.kind} have no directory", where=handle.marker)

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """Return the logs of *handle* that exist so far: ranks in order, then nodes, then the launcher's."""
        from orc.launchers.attempts.reader import log_selectors

        return log_selectors(*self.files(handle))

    def log_listing(self, handle: Handle) -> tuple[list[LogSelector], dict[str, str]]:
        """Return `log_selectors` of *handle*, and why hosts did not answer whose logs are not among them."""
        return self.log_selectors(handle), {}

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """Yield what the log *selector* of *handle* holds from *offset* (bytes) on. Calling it again there follows."""
        from orc.launchers.attempts.reader import read_log

        return read_log(*self.files(handle), selector, offset)

    def log_file(self, handle: Handle, selector: LogSelector) -> str | None:
        """Return the path of the log *selector* of *handle* on this machine; `None` where it has to be fetched."""
        from orc.launchers.attempts.reader import log_path

        return None if self.is_remote else log_path(self.files(handle)[1], selector)

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return at most *limit* bytes of the file *name* in the directory of *handle*'s job from *offset* on; none
        without a file.

        The attempt's first node has it. ``metrics.jsonl`` is such a file.
        """
        from orc.launchers.attempts.reader import read_job_file

        return read_job_file(*self.files(handle), name, offset, limit)

    def checkpoint_dir(self, spec: Mapping[str, Any], job: str) -> str:
        """Return the place of the checkpoints of *job*, for people; *spec* is its specification as in the ledger."""
        given = spec["checkpoint"]["dir"]
        if given and "://" in given:
            return str(given)
        layout = Layout.at(self.root)
        return str(layout.job(job) / given if given else layout.checkpoints(job))


def refuse_range(job: JobSpec, why: str) -> None:
    """Raise `RenderError` for a job with a range of nodes; *why* there is one number of them."""
    if job.resources.min_nodes != job.resources.max_nodes:
        what = f"resources.nodes = {job.resources.nodes}: {why}"
        least, most = job.resources.min_nodes, job.resources.max_nodes
        raise RenderError(what, where=job.name, hint=f"Write nodes: {least}, or {most}, or a number between them.")


def require_secrets(plan: Plan, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the secrets that *plan* names. Raises `BackendError` for those that have none."""
    if missing := [name for name in plan.secrets if name not in secrets]:
        raise BackendError(f"no value for the secret {', '.join(missing)}", where=plan.marker)
    return {name: secrets[name] for name in plan.secrets}


def raise_unreached(errors: Mapping[str, LaunchError]) -> None:
    """Raise `PartlyUnreachable` for the attempts (markers) whose cancellation was not delivered, if there are any."""
    if errors:
        first = next(iter(errors.values()))
        raise PartlyUnreachable(first.what, where=first.where, hint=first.hint, markers=tuple(errors))


def cancel_request(grace: timedelta) -> dict[str, Any]:
    """Return the content of ``cancel.json``, which the agents of an attempt read."""
    return {"grace_s": grace.total_seconds(), "at": time.time(), "reason": "cancelled"}


@dataclass(frozen=True)
class DiscoveredCluster:
    """Result of a discovery: an entry for clusters.yaml, and the facts that it was made from."""

    name: str
    entry: str  # YAML text
    facts: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()


@runtime_checkable
class SupportsDiscovery(Protocol):
    """Backend class that can describe a cluster which is not in clusters.yaml yet, by class methods."""

    discovery_options: ClassVar[Mapping[str, tuple[str, str]]]  # of `orc clusters discover`: its metavar and its help

    @classmethod
    def discover(cls, options: Mapping[str, str], name: str | None) -> DiscoveredCluster:
        """Describe the cluster that *options* lead to, as *name* or by its own name. Raises `LaunchError`."""
        ...


@runtime_checkable
class SupportsExec(Protocol):
    """Backend whose nodes can run commands beside an attempt."""

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """Return the ways to the nodes of an attempt, in node order. Touches no network."""
        ...


@runtime_checkable
class SupportsEstimators(Protocol):
    """Backend that makes jobs of what the platform's own library describes them with: an object, or its arguments."""

    def load_estimator(self, estimator: object, *, name: str | None = None, inputs: object = None) -> LoadedJob:
        """Return the job that *estimator* describes, for this cluster; *inputs* are those that its ``fit`` would get.

        Raises `SpecError` that names the argument.
        """
        ...


@runtime_checkable
class SupportsHostSurvey(Protocol):
    """Backend that reaches its hosts one by one: `Backend.stores` has all of them."""

    def survey(self) -> list[HostReport]:
        """Return a report of each host, in the order of the cluster, all probed at once. Changes nothing."""
        ...


@runtime_checkable
class SupportsQueue(Protocol):
    """Backend whose cluster has a queue of its own."""

    def queue(self, handles: Sequence[Handle]) -> QueueReport:
        """Return the partitions, and the expected start of our attempts. Raises `BackendUnreachable`."""
        ...


@runtime_checkable
class SupportsRecall(Protocol):
    """Backend that can give back what was staged to it: then any machine can make a job's next attempt."""

    def recall(self, digest: str, handle: Handle) -> None:
        """Bring the snapshot *digest* into the state directory's store, from the hosts of an attempt that ran from it.

        Raises `LaunchError` when none of them has it.
        """
        ...


@runtime_checkable
class SupportsPlacement(Protocol):
    """Backend that runs attempts on named hosts, which orc chooses and keeps other jobs off."""

    def place(self, job: JobSpec, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
        """Choose hosts for *job*. Pure.

        *taken* are the slots of each host that other attempts hold. Hosts in *avoid* have failed this job before; they
        are used only when it could not run without them at all.
        Raises `NoRoom` when the job has to wait for others to end, `RenderError` when the cluster can never carry it.
        """
        ...

    def candidates(self, job: JobSpec) -> Collection[str]:
        """Return every host that *job* could run on, were it alone: younger jobs leave them while it waits. Pure."""
        ...


@runtime_checkable
class SupportsCapacity(Protocol):
    """Backend whose hosts and their slots are known by the configuration."""

    def capacity(self) -> Mapping[str, int]:
        """Return the slots of each host; 0 where one job runs at a time. Contacts none."""
        ...


@runtime_checkable
class SupportsArrays(Protocol):
    """Backend that takes many attempts at once, and runs only so many at a time."""

    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        """Submit many attempts in one step; the cluster runs *at_once* of them at a time, or as many as it can.

        Every element is an attempt of its own: it has its own marker and handle (of one `Handle.group`), and is found,
        polled, cancelled, requeued and logged like any other. The plans must ask the cluster for the same; they may
        run different programs. Attempts that are there already are left as they are, and the others become an array
        without them, so that repeating an interrupted call is safe. *secrets* has the values for all of them. The
        handles come in the order of *plans*.

        Raises what `Backend.submit` raises: `BackendError` when certainly none was started, `AmbiguousSubmit` when that
        cannot be known (all or none of them will be found).
        """
        ...


@runtime_checkable
class SupportsProvisioning(Protocol):
    """Backend that has machines made for an attempt.

    `Backend.submit` asks for them and returns; until they are up the attempt is PENDING, and nothing of orc needs to
    run. A later pass that sees `Observation.due` hands over again what the attempt is made from.
    """

    def advance(self, handle: Handle, plan: Plan, secrets: Mapping[str, str]) -> Observation:
        """Take the next step towards the start, and observe again. The snapshot is in the state directory's store.

        Idempotent; what cannot be done now is tried by the next pass. Raises `BackendUnreachable`.
        """
        ...


@runtime_checkable
class SupportsCleanup(Protocol):
    """Backend that makes things which cost money as long as they exist."""

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """Return what is there and not needed by the attempts *live* (markers); those of *over* have ended.

        What is of neither belongs to another ledger, or to one that was lost. Raises `BackendUnreachable`.
        """
        ...

    def sweep(self, leftover: Leftover) -> None:
        """Remove it for good, and wait until it is gone. Raises `BackendError`."""
        ...
