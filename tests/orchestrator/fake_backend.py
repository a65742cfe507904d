"""A backend made of files in one directory: shared by processes, and told by a test what happens next."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from orc.launchers.attempts.records import AttemptExit
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
from orc.launchers.errors import (
    AmbiguousSubmit,
    BackendError,
    BackendUnreachable,
    BundleError,
    NoRoom,
    PartlyUnreachable,
    RenderError,
)
from orc.launchers.findings import Finding
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan, PlanFile
from orc.launchers.spec.clusters import Cluster


class FakeBackend(Backend):
    kind = "fake"
    root: Any = None
    is_remote: Any = True
    self_driving = True

    def __new__(cls, *_: Any, hosts: Mapping[str, int] | None = None, **__: Any) -> FakeBackend:
        return super().__new__(FakeHosts if hosts else cls)

    def __init__(
        self,
        root: Path,
        visibility_s: float = 0.0,
        name: str = "local",
        hosts: Mapping[str, int] | None = None,
        avoids: bool = False,
    ) -> None:
        """With *hosts*, their slots by name, it places jobs on them."""
        super().__init__(Cluster(name=name, kind=self.kind))
        self.root = root
        self.name = name
        self.hosts = dict(hosts or {})
        self.visibility_s, self.avoids = visibility_s, avoids
        (root / "jobs").mkdir(parents=True, exist_ok=True)

    # -- what the test says and sees

    def behave(self, **how: Any) -> None:
        """``submit="refuse"`` and so on; `None` takes it back."""
        (self.root / "behaviour.json").write_text(json.dumps({**self._behaviour(), **how}))

    def set(self, marker: str, phase: Phase, **observation: Any) -> None:
        """What the next poll sees of *marker*."""
        path = self.root / "jobs" / f"{marker}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**json.loads(path.read_text()), "phase": phase, **observation}))
        temporary.replace(path)

    def calls(self, name: str) -> list[str]:
        """The arguments of all calls of *name*, by all processes, in order."""
        path = self.root / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []

    # -- the contract

    def render(self, job: Any, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        content: dict[str, Any] = {"job": job.name, "command": job.command or job.script}
        if placement is not None:
            content |= {"hosts": placement.hosts, "slots": placement.slots, "avoid": placement.avoid}
        files = (PlanFile(f"/fake/{attempt.marker}", json.dumps(content)),)
        return Plan(attempt, self.name, self.kind, files, (), {}, snapshot.digests, tuple(job.secrets))

    def preflight(self, plan: Plan) -> list[Finding]:
        self._called("preflight", plan.marker)
        problem = self._behaviour().get("preflight")
        bad = [host for host in self._hosts_of(plan) if host in self._behaviour().get("dead", ())]
        findings = [Finding("error", f"{host} does not answer", host, "switch it on", unreachable=True) for host in bad]
        return [Finding("error", problem, "fake", "mend it"), *findings] if problem else findings

    @staticmethod
    def _hosts_of(plan: Plan) -> list[str]:
        hosts: list[str] = json.loads(plan.files[0].content).get("hosts", [])
        return hosts

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        self._called("stage", snapshot.code.digest)
        if self._behaviour().get("stage") == "unreachable":
            raise BackendUnreachable("no answer while staging", where="fake")
        for host in self._behaviour().get("full", ()):
            if plan is not None and host in self._hosts_of(plan):
                raise BundleError("no space for the snapshot", where=f"{host}: /root", hint="free some").of(host)

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        how = self._behaviour().get("submit")
        self._called("submit", plan.marker)
        if how == "busy":
            raise NoRoom("n1 is taken", holders=("orc-stranger-a1",))
        if how == "refuse-avoid" and json.loads(plan.files[0].content).get("avoid"):
            raise BackendError("the requested nodes are not available", where="fake")
        for host in self._hosts_of(plan):
            if host in self._behaviour().get("cut", ()):
                self.behave(dead=self._behaviour().get("dead_after_cut", []))
                raise BackendUnreachable("no answer", where=f"{host} (10.0.0.1:22)").of(host)
        if how == "refuse":
            raise BackendError("no such partition", where="fake", hint="choose another")
        if how == "unreachable":
            raise BackendUnreachable("no answer", where="fake")
        if how == "bug":
            raise KeyError("a defect")
        if delay := self._behaviour().get("submit_s"):
            time.sleep(delay)
        if how != "swallowed":
            self._start(plan.marker, secrets, self._hosts_of(plan))
        if how in ("ambiguous", "swallowed"):
            raise AmbiguousSubmit("the connection broke", where="fake")
        return self._handle(plan.marker)

    def _start(self, marker: str, secrets: Mapping[str, str], on: Sequence[str] = ()) -> None:
        """Like an agent's lease: a second copy of the same attempt does not run."""
        # Whole or not at all: the process that submits may be killed at any moment.
        complete = self.root / f"{marker}.{os.getpid()}.{threading.get_ident()}.new"
        complete.write_text(json.dumps({"phase": Phase.PENDING, "secrets": dict(secrets), "on": list(on)}))
        try:
            os.link(complete, self.root / "jobs" / f"{marker}.json")
        except FileExistsError:
            return
        finally:
            complete.unlink()
        self._called("run", marker)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        self._called("find", " ".join([marker, *hosts, *([] if complete or not self.hosts else ["only"])]))
        if self._behaviour().get("find") == "unreachable":
            raise BackendUnreachable("no answer while looking", where="fake")
        return self._handle(marker) if (self.root / "jobs" / f"{marker}.json").exists() else None

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        self._called("poll", str(len(handles)))
        how = self._behaviour().get("poll")
        if how == "unreachable":
            raise BackendUnreachable("controller is down", where="fake")
        if how == "bug":
            raise KeyError("a defect")
        return {handle: self._observe(handle.marker) for handle in handles}

    def _observe(self, marker: str) -> Observation:
        state = json.loads((self.root / "jobs" / f"{marker}.json").read_text())
        if "cancelled" in state and state["phase"] in (Phase.PENDING, Phase.RUNNING):
            return Observation(Phase.CANCELLED, Cause.CANCELLED, "cancelled")
        known = {
            name: value for name, value in state.items() if name not in ("phase", "cause", "secrets", "cancelled", "on")
        }
        for name in ("hosts", "failed_hosts"):
            known[name] = tuple(known.get(name, ()))
        if known.get("exit"):
            known["exit"] = AttemptExit.from_dict(known["exit"])
        cause = Cause(state["cause"]) if state.get("cause") else None
        return Observation(Phase(state["phase"]), cause, **known)

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        return [LogSelector(rank=0), LogSelector(node=0)]

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        yield LogChunk(selector, offset, f"log of {handle.marker}".encode()[offset:])

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        directory = "-".join([handle.marker.rpartition("-a")[0], *handle.hosts[:1]])
        path = self.root / "files" / directory / name
        return path.read_bytes()[offset:][:limit] if path.exists() else b""

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        if self._behaviour().get("cancel") == "unreachable":
            raise BackendUnreachable("no answer while cancelling", where="fake")
        untold = [handle.marker for handle in handles if handle.marker in (self._behaviour().get("untold") or ())]
        for handle in handles:
            if handle.marker in untold:
                continue
            self._called("cancel", f"{handle.marker} {grace.total_seconds():g}")
            self.set(handle.marker, Phase(self._observe(handle.marker).phase), cancelled=True)
        if untold:
            raise PartlyUnreachable("no answer while cancelling", where="fake", markers=untold)

    def reap(self, handle: Handle) -> None:
        self._called("reap", handle.marker)

    def _handle(self, marker: str) -> Handle:
        on = json.loads((self.root / "jobs" / f"{marker}.json").read_text())["on"]
        return Handle(self.name, self.kind, marker, f"native-{marker}", 1.0, tuple(on))

    def _behaviour(self) -> dict[str, Any]:
        path = self.root / "behaviour.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def _called(self, name: str, argument: str) -> None:
        with (self.root / f"{name}.log").open("a") as log:
            log.write(argument + "\n")


class FakeHosts(FakeBackend):
    """The same with hosts, on which it places jobs."""

    def candidates(self, job: Any) -> list[str]:
        asked = job.resources.options.get("ssh", {}).get("hosts")
        return [host for host in self.hosts if asked is None or host in asked]

    def place(self, job: Any, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
        want, least, slots = job.resources.max_nodes, job.resources.min_nodes, job.resources.nproc
        able = [host for host in self.candidates(job) if self.hosts[host] >= slots]
        if len(able) < least:
            raise RenderError(f"{least} hosts with {slots} slots are needed, the cluster has {len(able)}")
        usable = [host for host in able if host not in avoid]
        if len(usable) < least:
            usable += [host for host in able if host in avoid][: least - len(usable)]
        free = [host for host in usable if self.hosts[host] - taken.get(host, 0) >= slots]
        if len(free) < least:
            raise NoRoom(f"{least} hosts with {slots} free slots are needed, {len(free)} are there")
        return Placement(tuple(free[:want]), slots)
