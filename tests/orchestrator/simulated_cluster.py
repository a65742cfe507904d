"""A cluster in memory whose truth a test knows, with the habits of one kind of platform."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fake_backend import FakeHosts
from simulated_processes import announced_at

from orc.launchers.backends.base import (
    Backend,
    Cause,
    Handle,
    LogChunk,
    LogSelector,
    Observation,
    Phase,
    Placement,
    Snapshot,
)
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, NoRoom, PartlyUnreachable
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan, PlanFile
from orc.launchers.spec.clusters import Cluster

ALIVE = (Phase.PENDING, Phase.RUNNING)
OVERDUE = 3.0  # of the visibility window: so late comes what nobody expects any more


@dataclass(frozen=True)
class Habits:
    """What a kind of platform does differently from the others."""

    kind: str
    visibility_s: float = 0.0  # so long after a submission `find` may miss it, or the submission may still arrive
    self_driving: bool = False
    avoids: bool = False
    hosts: Mapping[str, int] = field(default_factory=dict)  # slots by name, where orc places the jobs
    arrays: bool = False
    steps: int = 0  # of `advance` until the machines are there
    requeues: bool = False
    lost_after_s: float = 0.0  # for which an attempt that is lost may come back


LOCAL = Habits("local", visibility_s=5.0, self_driving=True)
SSH = Habits("ssh", visibility_s=10.0, hosts={"n1": 2, "n2": 1, "n3": 1})
SLURM = Habits("slurm", visibility_s=20.0, avoids=True, arrays=True, requeues=True)
SAGEMAKER = Habits("sagemaker", visibility_s=30.0, lost_after_s=60.0)
TPU = Habits("tpu", visibility_s=15.0, steps=2)


@dataclass
class Run:
    """What the cluster has of one attempt: one run, however often it was sent, because of the agents' lease."""

    marker: str
    place: tuple[str, str]  # login and root: what is below another one is not known there
    hosts: tuple[str, ...]
    slots: int
    arrives_at: float  # true time
    shown_at: float  # by `find`
    steps: int
    secrets: Mapping[str, str]
    phase: Phase = Phase.PENDING
    cause: Cause | None = None
    restarts: int = 0
    cancelled: bool = False
    lost_at: float = 0.0  # true time
    is_overdue: bool = False  # it comes when its cluster has promised that nothing comes any more
    failed_hosts: tuple[str, ...] = ()
    has_been: set[Phase] = field(default_factory=lambda: {Phase.PENDING})

    @property
    def job(self) -> str:
        return self.marker.removeprefix("orc-").rpartition("-a")[0]

    def becomes(self, phase: Phase, cause: Cause | None = None) -> None:
        self.phase, self.cause = phase, cause
        self.has_been.add(phase)


class World:
    """The truth: what runs, and the time. Everything that a test does to the cluster it does here."""

    def __init__(self, habits: Habits) -> None:
        self.habits = habits
        self.now = 1_700_000_000.0
        self.runs: list[Run] = []
        self.described: dict[str, Any] = {}  # what clusters.yaml says now
        self.trouble: dict[str, Any] = {}
        self.slowness = 0.0  # the part of the visibility window that `find` and late messages take

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for run in self.arrived():
            if run.cancelled and run.phase in ALIVE:
                run.becomes(Phase.CANCELLED, Cause.CANCELLED)

    def arrived(self) -> list[Run]:
        return [run for run in self.runs if run.arrives_at <= self.now]

    def alive(self) -> list[Run]:
        return [run for run in self.arrived() if run.phase in ALIVE]

    def is_quiet(self) -> bool:
        """Return True when nothing is on its way and nothing is hidden."""
        on_its_way = any(max(run.arrives_at, run.shown_at) > self.now for run in self.runs)
        return not on_its_way and not any(self.may_come_back(run) for run in self.runs)

    def may_come_back(self, run: Run) -> bool:
        """Return True for a run that is gone, but not for so long that it can be taken for lost."""
        return run.phase is Phase.LOST and self.now < run.lost_at + self.habits.lost_after_s

    def find(self, place: tuple[str, str], marker: str, hosts: Collection[str] = ()) -> Run | None:
        """Return the run that is known at *place*, on any of *hosts*."""
        for run in self.runs:
            if (run.place, run.marker) == (place, marker) and (not hosts or not {*run.hosts}.isdisjoint(hosts)):
                return run
        return None

    def start(
        self,
        place: tuple[str, str],
        plan: Plan,
        secrets: Mapping[str, str],
        *,
        sent_at: float,
        late: bool,
        overdue: bool,
    ) -> None:
        content = json.loads(plan.files[0].content)
        run = self.find(place, plan.marker, content.get("hosts", ()))
        if run is not None:
            # The agents' lease: a second copy exits before any user code; one that overtakes the first is the first.
            if run.arrives_at > self.now and not late:
                run.arrives_at = run.shown_at = self.now
                run.is_overdue = False
            return
        delay = self.habits.visibility_s * (OVERDUE if overdue else self.slowness)
        run = Run(
            plan.marker,
            place,
            tuple(content.get("hosts", ())),
            content.get("slots", 0),
            arrives_at=self.now + (delay if late or overdue else 0.0),
            shown_at=self.now + delay,
            steps=self.habits.steps,
            secrets=dict(secrets),
            # Whoever sends it may have stood still for so long that others took it for dead and looked in vain.
            is_overdue=overdue or self.now - sent_at > self.habits.visibility_s,
        )
        self.runs.append(run)


class SimulatedCluster(Backend):
    """One process's connection to the world. *pause* is called before and after every call that has an effect."""

    kind = "simulated"
    root: Any = "/simulated"
    is_remote: Any = True
    logs_in = True

    def __new__(cls, world: World, *_: Any) -> SimulatedCluster:
        habits = world.habits
        kinds = {PlacingCluster: habits.hosts, ArrayCluster: habits.arrays, ProvisioningCluster: habits.steps}
        return super().__new__(next((kind for kind, wanted in kinds.items() if wanted), cls))

    def __init__(self, world: World, pause: Callable[[str], None], cluster: Cluster | None = None) -> None:
        super().__init__(cluster or Cluster(name="local", kind=self.kind, **world.described))
        self.place_of_runs = (self.cluster.login or "", self.cluster.root or "")
        self.world, self.pause = world, pause
        self.hosts = dict(world.habits.hosts)
        self.visibility_s, self.avoids = world.habits.visibility_s, world.habits.avoids
        self.self_driving = world.habits.self_driving
        self.lost_after_s = world.habits.lost_after_s

    def render(self, job: Any, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        content: dict[str, Any] = {"command": job.command or job.script}
        if placement is not None:
            content |= {"hosts": placement.hosts, "slots": placement.slots, "avoid": placement.avoid}
        files = (PlanFile(f"/simulated/{attempt.marker}", json.dumps(content)),)
        return Plan(attempt, "local", self.kind, files, (), {}, snapshot.digests, tuple(job.secrets))

    def _hosts_of(self, plan: Plan) -> list[str]:
        hosts: list[str] = json.loads(plan.files[0].content).get("hosts", [])
        return hosts

    def _call(self, name: str, **errors: Callable[[], Exception]) -> str | None:
        """Begin the call *name*; return the trouble that it has, or raise it."""
        self.pause(f"{name}: sent")
        how: str | None = self.world.trouble.get(name)
        if how == "unreachable":
            raise BackendUnreachable("no answer", where="simulated")
        if how == "bug":
            raise KeyError("a defect")
        if how in errors:
            raise errors[how]()
        return how

    def preflight(self, plan: Plan) -> list[Finding]:
        self._call("preflight")
        bad = [host for host in self._hosts_of(plan) if host in self.world.trouble.get("dead", ())]
        return [Finding("error", f"{host} does not answer", host, "switch it on", unreachable=True) for host in bad]

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        self._call("stage")

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        return self._submit([plan], secrets)[0]

    def _submit(self, plans: Sequence[Plan], secrets: Mapping[str, str]) -> list[Handle]:
        how = self._call(
            "submit",
            refuse=lambda: BackendError("no such partition", where="simulated"),
            busy=lambda: NoRoom("n1 is taken", holders=("orc-stranger-a1",)),
        )
        if any(set(secrets) < set(plan.secrets) for plan in plans):
            raise BackendError("no value for a secret", where="simulated")
        for host in [host for plan in plans for host in self._hosts_of(plan)]:
            if host in self.world.trouble.get("dead", ()):
                raise BackendUnreachable("no answer", where=host).of(host)
        if how != "swallowed":
            for plan in plans:
                late, overdue = how == "late", how == "overdue"
                self.world.start(
                    self.place_of_runs, plan, secrets, sent_at=announced_at(self.world.now), late=late, overdue=overdue
                )
        self.pause("submit: done")
        if how in ("ambiguous", "swallowed", "late", "overdue"):
            raise AmbiguousSubmit("the connection broke", where="simulated")
        return [self._handle(plan.marker, self._hosts_of(plan)) for plan in plans]

    def _handle(self, marker: str, hosts: Collection[str]) -> Handle:
        run = self.world.find(self.place_of_runs, marker, hosts)
        assert run is not None
        return Handle("local", self.kind, marker, f"native-{marker}", 1.0, run.hosts)

    def _run(self, handle: Handle) -> Run:
        run = self.world.find(self.place_of_runs, handle.marker, handle.hosts)
        assert run is not None, f"{handle} is not known at {self.place_of_runs}"
        return run

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        self._call("find")
        run = self.world.find(self.place_of_runs, marker, hosts)
        found = run is not None and max(run.shown_at, run.arrives_at) <= self.world.now
        self.pause("find: answered")
        return self._handle(marker, hosts) if found else None

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        how = self._call("poll")
        seen = {handle: self._observe(handle) for handle in handles}
        self.pause("poll: answered")
        if how == "unknown":
            return dict.fromkeys(handles, Observation(Phase.UNKNOWN, reason="cannot be told"))
        if how == "partly":
            return dict(list(seen.items())[::2])
        return seen

    def _observe(self, handle: Handle) -> Observation:
        run = self._run(handle)
        due = bool(run.steps) and run.phase is Phase.PENDING
        return Observation(
            run.phase, run.cause, hosts=run.hosts, restarts=run.restarts, failed_hosts=run.failed_hosts, due=due
        )

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        how = self._call("cancel")
        told = list(handles)[::2] if how == "partly" else list(handles)
        for handle in told:
            run = self._run(handle)
            run.cancelled = True
            if run.phase is Phase.PENDING:
                run.becomes(Phase.CANCELLED, Cause.CANCELLED)
        self.pause("cancel: done")
        if how == "lost":
            raise BackendUnreachable("no answer", where="simulated")
        if untold := [handle.marker for handle in handles if handle not in told]:
            raise PartlyUnreachable("no answer", where="simulated", markers=untold)

    def reap(self, handle: Handle) -> None:
        self._call("reap")

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        yield from ()


class PlacingCluster(SimulatedCluster):
    candidates = FakeHosts.candidates
    place = FakeHosts.place


class ArrayCluster(SimulatedCluster):
    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        return self._submit(plans, secrets)


class ProvisioningCluster(SimulatedCluster):
    def advance(self, handle: Handle, plan: Plan, secrets: Mapping[str, str]) -> Observation:
        self._call("advance")
        run = self._run(handle)
        run.steps = max(run.steps - 1, 0)
        seen = self._observe(handle)
        self.pause("advance: done")
        return seen
