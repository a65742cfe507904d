"""Backend for bare hosts: a thin shell around pure placement, rendering and judgement."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
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
    raise_unreached,
    require_secrets,
)
from orc.launchers.backends.ssh import rendering
from orc.launchers.backends.ssh.rendering import hosts_of, render_plan
from orc.launchers.backends.ssh.settings import DEFAULT_PYTHON, JobOptions, Options, Settings, read_settings
from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError
from orc.launchers.findings import Finding
from orc.launchers.oldest_python import brings_python
from orc.launchers.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from orc.launchers.backends.ssh.hosts import HostConnections
    from orc.launchers.backends.ssh.verdict import HostStatus
    from orc.launchers.ids import AttemptId
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


class SshBackend(Backend):
    """Jobs on the hosts of one cluster, which are reached through *open_all* (SSH unless given)."""

    kind = "ssh"
    options_model, job_options_model = Options, JobOptions
    passes_artefacts = True
    logs_in = True
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
    def hosts(self) -> HostConnections:
        """Connections to the cluster's hosts, made when they are first needed."""
        from orc.launchers.backends.ssh.hosts import HostConnections, open_transports

        return HostConnections(self.settings, self._open_all or partial(open_transports, self.cluster))

    @property
    def root(self) -> str:
        """The root of hosts that have none of their own."""
        return self.settings.root

    def close(self) -> None:
        """Close the connections; they are made anew when they are needed again."""
        if "hosts" in self.__dict__:
            self.hosts.close()

    def addresses(self, hosts: Collection[str] = ()) -> dict[str, str]:
        """Return address, port and root of each of *hosts* that the cluster has; the user where the root is at home."""
        found: dict[str, str] = {}
        for name in hosts:
            if name in self.settings.names:
                host, root = self.settings.host(name), self.settings.root_of(name)
                user = host.user if root.startswith("~") else None
                known = {"address": host.address, "port": host.port, "user": user, "root": root}
                found |= {f"{key} of {name}": str(value) for key, value in known.items() if value}
        return found

    # -- before the start

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where fabric is missing."""
        from orc.launchers.remote.ssh.transport import check_fabric

        if self._open_all is None:
            check_fabric()

    def place(self, job: JobSpec, taken: Mapping[str, int], avoid: Collection[str] = ()) -> Placement:
        """Return hosts in the order of the cluster's list, as many as are free up to the job's maximum."""
        return rendering.place(job, self.settings, taken, avoid)

    def capacity(self) -> dict[str, int]:
        """Return the slots of each host of the cluster."""
        return {host.name: host.slots or 0 for host in self.settings.hosts}

    def candidates(self, job: JobSpec) -> Collection[str]:
        """Return every host that has the slots and labels that *job* requests."""
        return rendering.candidates(job, self.settings)

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Return ``agent.json`` for every host, and one command on each that starts its agent and returns."""
        where = placement or self.place(job, {})
        return render_plan(job, snapshot, attempt, self.cluster, self.settings, where)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Check that the hosts of the plan answer, have the Python and a root that can be written."""
        from orc.launchers.backends.ssh.preflight import check

        return check(self.hosts, plan)

    def survey(self) -> list[HostReport]:
        """Return a report of each host, all probed at once."""
        from orc.launchers.backends.ssh.preflight import report

        made = self.cluster.environment
        python = made.venv.python if made.venv is not None else None
        return report(self.hosts, own_python=brings_python({"kind": made.kind, "python": python}))

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
        """Fetch it from the first of the attempt's hosts that has it."""
        from orc.launchers.transfer.fetch import recall

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
        """Write the files on every host, start the agent of node 0, then the others. What is held already is left."""
        from orc.launchers.backends.ssh.start import start

        values = require_secrets(plan, secrets)
        at = time.time()
        start(self.hosts, plan, values)
        return self._handle(plan.marker, hosts_of(plan), at)

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Look for the attempt on its hosts, or on all, and start what is missing of one started half.

        Hosts that do not answer matter only when the attempt may be theirs. Without *complete* nothing is started.
        """
        from orc.launchers.backends.ssh.start import placement, undo

        seen = self.hosts.statuses(dict.fromkeys(hosts or self.settings.names, (marker,))).get(marker, {})
        away = {name: status for name, status in seen.items() if status.answer is None}
        placed = placement(seen)
        if not placed:
            if away:
                raise _no_answer(away)
            return None
        started = {name: status for name, status in seen.items() if status.lease}
        if started:
            if complete:
                self._complete(marker, seen)
            at = min(float((status.lease or {}).get("at") or 0.0) - status.ahead_s for status in started.values())
            return self._handle(marker, placed, at)
        # Agents are started in the order of the nodes, once all files are there.
        unknown = {name: status for name, status in away.items() if name == placed[0]}
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
        """Poll all hosts at once, in one round trip each for all attempts; those that do not answer are tolerated."""
        from orc.launchers.backends.ssh.verdict import judge, merge_records, nodes_of

        if not handles:
            return {}
        seen = self._look(handles)
        refused = {handle: self._complete(handle.marker, seen[handle.marker]) for handle in handles}
        found = {}
        for handle in handles:
            statuses = seen[handle.marker]
            records = merge_records(handle.native_id, handle.hosts, statuses)
            nodes = nodes_of(handle.hosts, statuses)
            found[handle] = judge(
                records, nodes, peer_timeout_s=self.settings.options.peer_timeout, refused=refused[handle]
            )
        ended = [handle for handle, observed in found.items() if observed.phase.ended]
        # What an agent that was killed has left behind.
        if left := [h for h in ended if found[h].phase is Phase.LOST or any(map(_left, seen[h.marker].values()))]:
            self._reap(left)
        return found

    def _look(self, handles: Sequence[Handle]) -> dict[str, dict[str, HostStatus]]:
        wanted: dict[str, list[str]] = {}
        for handle in handles:
            for name in handle.hosts:
                wanted.setdefault(name, []).append(handle.marker)
        return self.hosts.statuses(wanted)

    def _complete(self, marker: str, statuses: Mapping[str, HostStatus]) -> str:
        """Start what a submission that was cut off has not; return why it cannot be done now."""
        from orc.launchers.backends.ssh.start import complete

        try:
            complete(self.hosts, marker, statuses)
        except LaunchError as error:
            return f"{error.where}: {error.what}" if error.where else error.what
        return ""

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """Return the logs on all hosts that answer. Raises `BackendUnreachable` when none does."""
        return self.log_listing(handle)[0]

    def log_listing(self, handle: Handle) -> tuple[list[LogSelector], dict[str, str]]:
        """Return the logs on all hosts that answer, and why others do not. Raises what `log_selectors` raises."""
        found, errors = self._logs(handle)
        if not found:
            raise errors[0]
        selectors = {selector for names in found.values() for selector in names}
        order = sorted(selectors, key=lambda s: (s.rank is None, s.rank if s.rank is not None else s.node or 0))
        return order, {error.where or handle.marker: error.what for error in errors}

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
        """Return the host that has the log. A launcher may give a rank to another node than its number suggests."""
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
        """Return the logs that each host has, and the errors of the others."""
        from orc.launchers.attempts.reader import log_selectors

        def names(name: str) -> list[LogSelector]:
            return log_selectors(*self._files_on(name, handle))

        results = self.hosts.each(handle.hosts, names)
        errors = [result for result in results.values() if isinstance(result, LaunchError)]
        return {name: result for name, result in results.items() if not isinstance(result, LaunchError)}, errors

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """Return OpenSSH command lines, with the options of the cluster."""
        from orc.launchers.remote.ssh.routes import ssh_argv

        access = self.settings.options.access
        return [
            NodeEntry(
                node,
                name,
                self.hosts.directory(name, handle.marker),
                self.settings.python_of(name) or DEFAULT_PYTHON,
                ssh_argv(self.settings.spec(name), access, terminal=False),
                ssh_argv(self.settings.spec(name), access, terminal=True),
                through_shell=True,
            )
            for node, name in enumerate(handle.hosts)
        ]

    def checkpoint_dir(self, spec: Mapping[str, Any], job: str) -> str:
        """Return the place below the root, which each host has for itself."""
        place, given = super().checkpoint_dir(spec, job), str(spec["checkpoint"]["dir"] or "")
        return place if given.startswith("/") or "://" in given else f"{place} on each host"

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Write the request on every host that answers; the agents pass it on to the others.

        Raises `PartlyUnreachable` for the attempts none of whose hosts could be reached; the others are cancelled.
        """
        results = self._on_each(handles, "cancel", {"request": cancel_request(grace)})
        unreached: dict[str, LaunchError] = {}
        for handle in handles:
            answers = [results[name] for name in handle.hosts]
            errors = [result for result in answers if isinstance(result, LaunchError)]
            if len(errors) == len(answers):
                unreached[handle.marker] = errors[0]
        raise_unreached(unreached)

    def reap(self, handle: Handle) -> None:
        """End whatever an attempt that is over may have left on the hosts that answer."""
        self._reap([handle])

    def _reap(self, handles: Sequence[Handle]) -> None:
        self._on_each(handles, "reap", {"peer_timeout_s": self.settings.options.peer_timeout})

    def _on_each(
        self, handles: Sequence[Handle], do: str, request: Mapping[str, Any]
    ) -> dict[str, dict[str, Any] | LaunchError]:
        from orc.launchers.backends.ssh.hosts import WRITE_TIMEOUT_S

        wanted: dict[str, list[str]] = {}
        for handle in handles:
            for name in handle.hosts:
                wanted.setdefault(name, []).append(self.hosts.directory(name, handle.marker))
        return self.hosts.each(
            wanted, lambda name: self.hosts.call(name, do, {"directories": wanted[name], **request}, WRITE_TIMEOUT_S)
        )


def _left(status: HostStatus) -> bool:
    """Return whether secrets or the token lie there, and no agent that would remove them runs."""
    return not status.alive and bool((status.answer or {}).get("confidential"))


def _fenced(seen: Mapping[str, HostStatus]) -> bool:
    """Return True when a node 0 that cannot be reached, and that none of its peers ever joined, has given up by now."""
    from orc.launchers.backends.ssh.verdict import NodeStatus, fence_s

    ages = [float((status.answer or {})["age"]) for status in seen.values() if status.present]
    return min(ages) > fence_s(NodeStatus("", reached=False), 0.0)


def _no_answer(away: Mapping[str, HostStatus]) -> BackendUnreachable:
    name, status = next(iter(away.items()))
    others = f" (and {len(away) - 1} more)" if len(away) > 1 else ""
    return BackendUnreachable(f"{name}{others} does not answer: {status.why}", where=name)
