"""The backend of kind ssh: a thin shell around pure placement, rendering and judgement."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import (
    Backend,
    Handle,
    HostReport,
    LogChunk,
    LogSelector,
    NodeEntry,
    Observation,
    Phase,
    Placement,
    Snapshot,
    cancel_request,
    require_secrets,
)
from orc.launchers.backends.ssh import placement as placing
from orc.launchers.backends.ssh.rendering import hosts_of, render_plan
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, Settings, read_settings
from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError, PartlyUnreachable
from orc.launchers.findings import Finding
from orc.launchers.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.ssh.hosts import Hosts
    from orc.launchers.backends.ssh.sights import Sight
    from orc.launchers.ids import AttemptId
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


class SshBackend(Backend):
    """Jobs on the hosts of one cluster, which are reached through *open_all* (SSH unless given)."""

    kind = "ssh"
    visibility_s = 10.0

    def __init__(
        self,
        cluster: Cluster,
        *,
        state_dir: Path | None = None,
        open_all: Callable[[], Mapping[str, Transport]] | None = None,
    ) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self.settings: Settings = read_settings(cluster)
        self._open_all = open_all
        self._homes: dict[tuple[str, int | None], str] = {}  # marker, rank -> the host that has its log

    @cached_property
    def hosts(self) -> Hosts:
        """The cluster's hosts, connected when they are first asked."""
        from orc.launchers.backends.ssh.hosts import Hosts

        def open_all() -> Mapping[str, Transport]:
            from orc.launchers.backends.ssh.transports import open_transports

            return open_transports(self.cluster)

        return Hosts(self.settings, self._open_all or open_all)

    @property
    def root(self) -> str:
        """The root of hosts that have none of their own."""
        return self.settings.root

    @property
    def is_remote(self) -> bool:
        """True: the hosts are other machines."""
        return True

    def close(self) -> None:
        """Close the connections; they are made anew when they are needed again."""
        if "hosts" in self.__dict__:
            self.hosts.close()

    # -- before the start

    def place(self, job: JobSpec, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
        """Hosts in the order of the cluster's list, as many as are free up to the job's maximum."""
        return placing.place(job, self.settings, taken, avoid)

    def candidates(self, job: JobSpec) -> Collection[str]:
        """Every host that has the slots and labels that *job* asks for."""
        return placing.candidates(job, self.settings)

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """``agent.json`` for every host, and one command on each that starts its agent and returns."""
        where = placement or self.place(job, {})
        return render_plan(job, snapshot, attempt, self.cluster, self.settings, where)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Do the hosts of the plan answer, is the Python there, can the root be written?"""
        from orc.launchers.backends.ssh.preflight import check

        return check(self.hosts, plan)

    def survey(self) -> list[HostReport]:
        """What the hosts are, all asked at once."""
        from orc.launchers.backends.ssh.preflight import report

        return report(self.hosts)

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the store of every host, or of those that *plan* uses."""
        from orc.launchers.transfer.targets import Targets

        names = hosts_of(plan) if plan is not None else self.settings.names
        return Targets(
            {name: (self.hosts.transport(name), self.settings.root_of(name)) for name in names},
            {name: self.settings.python_of(name) or DEFAULT_PYTHON for name in names},
            self.settings.options.shared,
        )

    def recall(self, digest: str, handle: Handle) -> None:
        """From the first of the attempt's hosts that has it."""
        from orc.launchers.transfer.recall import recall

        errors: list[LaunchError] = []
        for name in handle.hosts:
            try:
                recall(digest, self.hosts.transport(name), self.settings.root_of(name), self.store)
            except LaunchError as error:
                errors.append(error)
            else:
                return
        raise errors[0] if errors else BackendError("the attempt had no hosts", where=handle.marker)

    # -- the start

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """The files on every host, then the agent of node 0, then the others. What is held already is left."""
        from orc.launchers.backends.ssh.starting import start

        values = require_secrets(plan, secrets)
        at = time.time()
        start(self.hosts, plan, values)
        return self._handle(plan.marker, hosts_of(plan), at)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Ask the hosts for the attempt, all if it is not known which, and start what is missing of one started half.

        Hosts that do not answer matter only when the attempt may be theirs. Without *complete* nothing is started.
        """
        from orc.launchers.backends.ssh.starting import placement, undo

        seen = self.hosts.look(dict.fromkeys(hosts or self.settings.names, (marker,))).get(marker, {})
        away = {name: sight for name, sight in seen.items() if sight.answer is None}
        placed = placement(seen)
        if not placed:
            if away:
                raise _no_answer(away)
            return None
        started = {name: sight for name, sight in seen.items() if sight.present and _lease(sight)}
        if started:
            if complete:
                self._complete(marker, seen)
            at = min(float((_lease(sight) or {}).get("at") or 0.0) - sight.ahead_s for sight in started.values())
            return self._handle(marker, placed, at)
        # Agents are started in the order of the nodes, once all files are there.
        unknown = {name: sight for name, sight in away.items() if name == placed[0]}
        prepared = all(seen[name].present for name in placed if name in seen and name not in away)
        if unknown and prepared and not _fenced(seen):
            raise _no_answer(unknown)
        undo(self.hosts, marker, [name for name in seen if seen[name].present], only_unstarted=True)
        return None

    def _handle(self, marker: str, hosts: Sequence[str], at: float) -> Handle:
        directory = self.hosts.directory(hosts[0], marker)
        return Handle(self.cluster.name, self.kind, marker, directory, at, tuple(hosts))

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """One round trip per host for all attempts, all hosts at once; those that do not answer are tolerated."""
        from orc.launchers.backends.ssh.sights import merge_records, nodes_of
        from orc.launchers.backends.ssh.verdict import judge

        if not handles:
            return {}
        seen = self._look(handles)
        refused = {handle: self._complete(handle.marker, seen[handle.marker]) for handle in handles}
        found = {}
        for handle in handles:
            sights = seen[handle.marker]
            records = merge_records(handle.native_id, handle.hosts, sights)
            nodes = nodes_of(handle.hosts, sights)
            found[handle] = judge(
                records, nodes, peer_timeout_s=self.settings.options.peer_timeout, refused=refused[handle]
            )
        ended = [handle for handle, observed in found.items() if observed.phase.ended]
        # What an agent that was killed has left behind.
        if left := [h for h in ended if found[h].phase is Phase.LOST or any(map(_left, seen[h.marker].values()))]:
            self._on_each(left, "reap", {})
        return found

    def _look(self, handles: Sequence[Handle]) -> dict[str, dict[str, Sight]]:
        wanted: dict[str, list[str]] = {}
        for handle in handles:
            for name in handle.hosts:
                wanted.setdefault(name, []).append(handle.marker)
        return self.hosts.look(wanted)

    def _complete(self, marker: str, sights: Mapping[str, Sight]) -> str:
        """Start what a submission that was cut off has not; why it cannot be done now. The next look tries again."""
        from orc.launchers.backends.ssh.starting import complete

        try:
            complete(self.hosts, marker, sights)
        except LaunchError as error:
            return f"{error.where}: {error.what}" if error.where else error.what
        return ""

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """The files below ``logs/`` of all hosts that answer. Raises `BackendUnreachable` when none does."""
        found, errors = self._logs(handle)
        if not found:
            raise errors[0]
        selectors = {selector for names in found.values() for selector in names}
        return sorted(selectors, key=lambda s: (s.rank is None, s.rank if s.rank is not None else s.node or 0))

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """Yield from the log on the host that runs the rank."""
        from orc.launchers.attempts.reader import read_log

        return read_log(*self._files_on(self._host_of(handle, selector), handle), selector, offset)

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return the host of node 0, and the attempt's directory there."""
        return self._files_on(handle.hosts[0], handle)

    def _files_on(self, name: str, handle: Handle) -> tuple[Transport, str]:
        transport = self.hosts.transport(name)
        return transport, transport.expand(self.hosts.directory(name, handle.marker))

    def _host_of(self, handle: Handle, selector: LogSelector) -> str:
        """The host that has the log. A launcher may give a rank to another node than its number suggests."""
        if selector.node is not None:
            if selector.node >= len(handle.hosts):
                raise BackendError(f"there is no node {selector.node}", where=handle.marker)
            return handle.hosts[selector.node]
        key = (handle.marker, selector.rank)
        if key not in self._homes:
            found, errors = self._logs(handle)
            for name in (name for name, selectors in found.items() if selector in selectors):
                self._homes[key] = name
                return name
            if errors:  # it may be there
                raise errors[0]
            return handle.hosts[0]
        return self._homes[key]

    def _logs(self, handle: Handle) -> tuple[dict[str, list[LogSelector]], list[LaunchError]]:
        """The logs that each host has, and why others do not tell."""
        from orc.launchers.attempts.reader import log_selectors

        def names(name: str) -> list[LogSelector]:
            return log_selectors(*self._files_on(name, handle))

        results = self.hosts.each(handle.hosts, names)
        errors = [result for result in results.values() if isinstance(result, LaunchError)]
        return {name: result for name, result in results.items() if not isinstance(result, LaunchError)}, errors

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """OpenSSH's own client, with the options of the cluster."""
        from orc.launchers.backends.ssh.entering import entry

        directories = [self.hosts.directory(name, handle.marker) for name in handle.hosts]
        return [
            entry(self.settings, name, node, directory)
            for node, (name, directory) in enumerate(zip(handle.hosts, directories, strict=True))
        ]

    def checkpoint_dir(self, spec: Mapping[str, Any], job: str) -> str:
        """Return the place below the root, which each host has for itself."""
        place, given = super().checkpoint_dir(spec, job), str(spec["checkpoint"]["dir"] or "")
        return place if given.startswith("/") or "://" in given else f"{place} on each host"

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Leave word on every host that answers; the agents pass it on to the others.

        Raises `PartlyUnreachable` for the attempts none of whose hosts could be told; the others are told.
        """
        results = self._on_each(handles, "cancel", {"request": cancel_request(grace)})
        untold: dict[str, LaunchError] = {}
        for handle in handles:
            told = [results[name] for name in handle.hosts]
            errors = [result for result in told if isinstance(result, LaunchError)]
            if len(errors) == len(told):
                untold[handle.marker] = errors[0]
        if untold:
            first = next(iter(untold.values()))
            raise PartlyUnreachable(first.what, where=first.where, hint=first.hint, markers=tuple(untold))

    def reap(self, handle: Handle) -> None:
        """End whatever an attempt that is over may have left on the hosts that answer."""
        self._on_each([handle], "reap", {})

    def _on_each(
        self, handles: Sequence[Handle], do: str, request: Mapping[str, Any]
    ) -> dict[str, dict[str, Any] | LaunchError]:
        from orc.launchers.backends.ssh.calls import WRITE_TIMEOUT_S

        wanted: dict[str, list[str]] = {}
        for handle in handles:
            for name in handle.hosts:
                wanted.setdefault(name, []).append(self.hosts.directory(name, handle.marker))
        return self.hosts.each(
            wanted,
            lambda name: self.hosts.call(name, do, {"directories": wanted[name], **request}, WRITE_TIMEOUT_S),
        )


def _left(sight: Sight) -> bool:
    """Return whether secrets or the token lie there, and no agent that would remove them runs."""
    return not sight.alive and bool((sight.answer or {}).get("confidential"))


def _lease(sight: Sight) -> Mapping[str, Any] | None:
    return sight.record(f"node-{(sight.answer or {}).get('node')}/lease.json")


def _fenced(seen: Mapping[str, Sight]) -> bool:
    """Whether a node 0 that nobody can see, and that none of its peers ever joined, must have given up by now."""
    from orc.launchers.backends.ssh.verdict import Node, fence_s

    ages = [float((sight.answer or {})["age"]) for sight in seen.values() if sight.present]
    return min(ages) > fence_s(Node("", reached=False), 0.0)


def _no_answer(away: Mapping[str, Sight]) -> BackendUnreachable:
    name, sight = next(iter(away.items()))
    others = f" (and {len(away) - 1} more)" if len(away) > 1 else ""
    return BackendUnreachable(f"{name}{others} does not answer: {sight.why}", where=name)
