"""Backend of kind tpu: creates a TPU, runs the attempt on its workers over SSH, and deletes it.

Between the submission and the start minutes or days pass in which nothing of orc runs: every pass looks where things
stand and takes the next step (`lifecycle`). On the workers everything is done by the ssh backend.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from orc.launchers.backends.base import (
    Backend,
    Cause,
    Handle,
    Leftover,
    LogChunk,
    LogSelector,
    NodeEntry,
    Observation,
    Phase,
    Placement,
    Snapshot,
    raise_unreached,
    require_secrets,
)
from orc.launchers.backends.ssh.rendering import hosts_of
from orc.launchers.backends.tpu import accelerators, lifecycle, provision, request
from orc.launchers.backends.tpu.lifecycle import Create, Node, Pending, State, ZoneStatus
from orc.launchers.backends.tpu.listing import Poller
from orc.launchers.backends.tpu.provision import Teardown, request_tpu, require_own
from orc.launchers.backends.tpu.rendering import render_plan
from orc.launchers.backends.tpu.request import TpuLocation
from orc.launchers.backends.tpu.settings import JobOptions, Options, Settings, read_settings
from orc.launchers.backends.tpu.workers import Pods, directory_of, find_node, saved_workers, worker_name
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError, NoRoom
from orc.launchers.findings import Finding
from orc.launchers.plan import Plan

if TYPE_CHECKING:
    from orc.launchers.backends.ssh import SshBackend
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.listing import Listing
    from orc.launchers.backends.tpu.local_state import LocalState
    from orc.launchers.ids import AttemptId
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


_IDLE_CHECK_S = 60.0  # between two looks for TPUs that have been idle for too long


class TpuBackend(Backend):
    """Backend of the TPUs of one project: one for each attempt, unless the options name one."""

    kind = "tpu"
    options_model, job_options_model = Options, JobOptions
    visibility_s = 15.0

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self.settings: Settings = read_settings(cluster)
        self._pods = Pods(cluster, self.settings, state_dir, lambda: self.api)
        self._poller = Poller(self._list)
        self._idle_listed_at = float("-inf")  # monotonic

    @cached_property
    def api(self) -> TpuApi:
        """Client of the TPU API, connected on first use."""
        from orc.launchers.backends.tpu.client import TpuApi

        return TpuApi(self.settings.options)

    @property
    def root(self) -> str:
        """The directory on the workers."""
        return self.settings.root

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        self._pods.close()
        if "api" in self.__dict__:
            self.api.close()

    # -- before the start

    def check_installed(self) -> None:
        """Raise `BackendUnreachable` where fabric or the library of Cloud TPU is missing."""
        from orc.launchers.backends.tpu.client import check_library
        from orc.launchers.remote.ssh.transport import check_fabric

        check_fabric()
        check_library()

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """Return the requests to the TPU API, ``agent.json``, and one command for each worker."""
        return render_plan(job, snapshot, attempt, self.cluster, self.settings)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Check access to the API and the availability of the types in the plan."""
        from orc.launchers.backends.tpu.preflight import check

        return check(self.api, plan)

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Do nothing: workers get the snapshot when they are up, before the agents start."""

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the stores of the workers of the TPU that the options name. Raises `BackendError` without one."""
        if self.settings.options.name is None:
            what = "TPUs are made for an attempt and deleted after it: nothing of a job stays there"
            hint = "`orc prune` deletes TPUs that are left. A TPU that `name:` in the options names keeps a store."
            raise BackendError(what, where=f"cluster {self.cluster.name}", hint=hint)
        return replace(self._pods.on(find_node(self.api, self.settings)).stores(), shared="auto")

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Request the TPU in the first zone that takes the request; adopt what was requested before.

        Raises `NoRoom` when no zone takes it now. A TPU that the options name is used at once.
        """
        self.check_installed()  # a TPU costs as much while nothing can be started on it
        secrets = require_secrets(plan, secrets)
        handle = self._handle(plan)
        location = TpuLocation.parse(handle.native_id)
        if not location.is_made_for(plan.marker):
            self._pods.start(self._named(plan, location), plan, secrets)
            return handle
        statuses = self._look(handle)
        require_own(statuses, plan.marker)
        if any(status.state is not State.NOT_FOUND for status in statuses):
            return handle
        rejections = request_tpu(self.api, self._local(handle.marker), plan, location.zones)
        if len(rejections) < len(location.zones):
            return handle
        end = lifecycle.no_zone_left(rejections)
        if end.cause is Cause.LAUNCH:
            raise BackendError(end.reason, where=self.cluster.name)
        raise NoRoom(f"waiting for a TPU: {end.reason}", where=self.cluster.name)

    def _handle(self, plan: Plan) -> Handle:
        location = str(request.read_requests(plan)["place"])
        return Handle(self.cluster.name, self.kind, plan.marker, location, time.time(), hosts_of(plan))

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """Return the attempt's TPU in any of the cluster's zones; on a TPU that is named, the attempt.

        Zones are asked all together only where the TPU is not in the one that was asked for it last.
        """
        options = self.settings.options
        if options.name is not None:
            location = request.location_of(options, marker)
            for status in self._list([location]).statuses(location):
                if status.state is State.READY and status.node is not None:
                    found = self._pods.on(status.node).find(marker)
                    return None if found is None else replace(found, backend=self.kind, native_id=str(location))
            return None
        local = self._local(marker)
        if ended := local.handle:
            return ended
        last = (local.zone,) if local.zone in options.zones else ()
        return (self._find_in(last, marker) if last else None) or self._find_in(options.zones, marker)

    def _find_in(self, zones: tuple[str, ...], marker: str) -> Handle | None:
        options = self.settings.options
        queued = TpuLocation(options.project, options.zones, request.QUEUED, request.tpu_id(marker))
        locations = [queued, replace(queued, collection=request.NODES)]
        listing = self._list([replace(location, zones=zones) for location in locations])
        for location in locations:
            for status in listing.statuses(replace(location, zones=zones)):
                if status.state is State.PROVISIONING and status.queued is None and status.node is None:
                    raise BackendUnreachable("its TPU is being created, and not listed yet", where=status.zone)
                if status.state in (State.NOT_FOUND, State.DELETING) or request.MARKER not in status.labels:
                    continue
                if location.collection == request.NODES and status.node is not None and status.node.queued:
                    continue  # it goes with its queued resource
                hosts = tuple(map(worker_name, range(accelerators.parse(status.accelerator_type).hosts)))
                return Handle(self.cluster.name, self.kind, marker, str(location), time.time(), hosts)
        return None

    # -- the start on the workers

    def advance(self, handle: Handle, plan: Plan, secrets: Mapping[str, str]) -> Observation:
        """Request the TPU in the next zone, or start the agents on one that is up."""
        self.check_installed()
        local, location = self._local(handle.marker), TpuLocation.parse(handle.native_id)
        statuses = self._look(handle)
        step = self._step(statuses)
        if local.end() is not None or local.cancelled:
            return self.poll([handle])[handle]
        if isinstance(step, Create):
            zones = location.zones[location.zones.index(step.zone) :]
            rejections = request_tpu(self.api, local, plan, zones)
            if len(rejections) == len(zones):
                failed = [status for status in statuses if status.state is State.FAILED]
                return self._over(handle, lifecycle.no_zone_left([*failed, *rejections]))
            asked = f"the TPU is asked for in {zones[len(rejections)]} ({step.reason})"
            return Observation(Phase.PENDING, reason=asked)
        if isinstance(step, Node) and not local.started:
            try:
                self._pods.start(step, plan, secrets)
            except (BackendUnreachable, NoRoom, AmbiguousSubmit) as error:
                seen = self._booting(handle, step, _one_line(error))
                return self._over(handle, seen) if seen.phase.ended else seen
            except LaunchError as error:
                return self._over(handle, Observation(Phase.FAILED, Cause.LAUNCH, _one_line(error)))
            local.mark_started()
        return self.poll([handle])[handle]

    def _named(self, plan: Plan, location: TpuLocation) -> Node:
        """Return the TPU that the options name. Raises `NoRoom` while it is not up, `BackendError` when unfit."""
        step = self._step(self._list([location]).statuses(location))
        if isinstance(step, Node):
            wanted = str(request.read_requests(plan)["accelerator_type"])
            if step.accelerator_type not in ("", wanted):
                raise BackendError(f"it is a {step.accelerator_type}, and the options say {wanted}", where=step.name)
            return step
        if isinstance(step, Pending):
            raise NoRoom(f"waiting for {location.id}: {step.reason}", where=self.cluster.name)
        what = f"there is no TPU {location.id} to be used: {step.reason}"
        hint = "Create it, or remove `name:` and let orc make one for each attempt."
        raise BackendError(what, where=self.cluster.name, hint=hint)

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Observe attempts with two listings of each own zone and one round trip to each worker that is up.

        All zones are asked where an attempt's TPU is not (any more) where it was; see `Poller`.
        """
        from orc.launchers.remote.ssh.fanout import each

        if not handles:
            return {}
        self._end_idle()
        statuses = self._statuses([handle for handle in handles if self._local(handle.marker).end() is None])
        results = each(
            {h.marker: h for h in handles}, lambda handle: self._observe(handle, statuses.get(handle.marker))
        )
        return {handle: _answer(results[handle.marker]) for handle in handles}

    def _observe(self, handle: Handle, statuses: Sequence[ZoneStatus] | None) -> Observation:
        """Observe one attempt. Its end is reported once nothing of its TPU is left that should not be."""
        local = self._local(handle.marker)
        if statuses is None or local.end() is not None:
            return self._settle(handle)
        step = self._step(statuses)
        if local.cancelled and not local.started:
            return self._over(handle, Observation(Phase.CANCELLED, Cause.CANCELLED, "cancelled before it was started"))
        if isinstance(step, Node):
            seen = self._poll_workers(handle, step)
            return self._over(handle, seen) if seen.phase.ended else seen
        if isinstance(step, Observation):
            return self._over(handle, step)
        if isinstance(step, Create):
            return Observation(Phase.PENDING, reason=f"{step.reason}; next in {step.zone}", due=True)
        if isinstance(step, Pending) and not step.restarting and not local.started:
            return Observation(Phase.PENDING, reason=step.reason)
        return Observation(Phase.UNKNOWN, reason=step.reason)

    def _poll_workers(self, handle: Handle, node: Node) -> Observation:
        """Observe the agents on a TPU that is up."""
        self.check_installed()  # what is missing here says nothing about whether it boots
        local, location = self._local(handle.marker), TpuLocation.parse(handle.native_id)
        started = local.started or not location.is_made_for(handle.marker)
        try:
            inner = self._pods.on(node)
        except BackendUnreachable as error:
            if started:
                return Observation(Phase.UNKNOWN, reason=error.what)
            return self._booting(handle, node, error.what)
        if not started:
            statuses = inner.hosts.statuses(dict.fromkeys(handle.hosts, (handle.marker,)))[handle.marker]
            if not any(status.lease for status in statuses.values()):
                away = [status for status in statuses.values() if status.answer is None]
                if away:
                    return self._booting(handle, node, f"{away[0].host}: {away[0].why}")
                return Observation(Phase.PENDING, reason=f"the TPU is up in {node.zone}", due=True)
            local.mark_started()
        own = replace(handle, backend=inner.kind, native_id=inner.hosts.directory(handle.hosts[0], handle.marker))
        seen = replace(inner.poll([own])[own], failed_hosts=())  # nothing to avoid: the next TPU has other workers
        if seen.phase.ended and seen.phase is not Phase.SUCCEEDED:
            # What ranks die of when their TPU is taken away says nothing about them.
            step = self._step(self._look(handle))
            if isinstance(step, Observation) and step.cause is Cause.PREEMPTED:
                return replace(step, exit=seen.exit, hosts=seen.hosts, started_at=seen.started_at)
            if isinstance(step, Pending) and step.restarting:
                return Observation(Phase.UNKNOWN, reason=step.reason)
        if seen.phase is Phase.UNKNOWN:
            self._poller.invalidate(handle.marker)  # are they silent because their TPU is gone?
        if node.health and not seen.phase.ended:
            return replace(seen, reason="; ".join(filter(None, [seen.reason, f"the TPU is not well: {node.health}"])))
        return seen

    def _booting(self, handle: Handle, node: Node, why: str) -> Observation:
        """Observe workers that do not accept logins yet, which takes a minute after the creation."""
        age = time.time() - node.created_at if node.created_at is not None else 0.0
        own = TpuLocation.parse(handle.native_id).is_made_for(handle.marker)
        if own and age > self.settings.options.boot_timeout:
            reason = f"the workers could not be used {age:.0f} s after the creation of the TPU: {why}"
            return Observation(Phase.LOST, Cause.NODE_FAILURE, reason)
        return Observation(Phase.PENDING, reason=f"waiting for the workers: {why}", due=True)

    def _over(self, handle: Handle, end: Observation) -> Observation:
        """Record the end of the attempt, and clean up."""
        self._local(handle.marker).record_end(handle, replace(end, ended_at=end.ended_at or time.time()))
        return self._settle(handle)

    def _settle(self, handle: Handle) -> Observation:
        timeout_s = self.settings.options.delete_timeout
        return Teardown(self.cluster.name, timeout_s, self.api, self._pods).settle(self._local(handle.marker), handle)

    # -- logs

    def files(self, handle: Handle) -> tuple[Transport, str]:
        """Return this machine, and the copy of the attempt's directory, which is made before the TPU is deleted."""
        from orc.launchers.remote.transport import LocalTransport

        return LocalTransport(), self._local(handle.marker).attempt_directory

    def _pod(self, handle: Handle) -> SshBackend | None:
        """Return the pod that has the attempt's files; `None` when they have been copied here."""
        return None if self._local(handle.marker).has_logs else self._reachable(handle)

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """Return the logs on the workers, or in the copy."""
        return self.log_listing(handle)[0]

    def log_listing(self, handle: Handle) -> tuple[list[LogSelector], dict[str, str]]:
        """Return the logs on the workers that answer, or in the copy, and why others do not."""
        pod = self._pod(handle)
        return pod.log_listing(handle) if pod else (super().log_selectors(handle), {})

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """Yield a log from the worker that runs the rank, or from the copy."""
        pod = self._pod(handle)
        return pod.logs(handle, selector, offset) if pod else super().logs(handle, selector, offset)

    def read_file(self, handle: Handle, name: str, offset: int = 0, limit: int | None = None) -> bytes:
        """Return a file of the job from worker 0, or from the copy."""
        read = pod.read_file if (pod := self._pod(handle)) else super().read_file
        return read(handle, name, offset, limit)

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """Return OpenSSH commands with the addresses and host keys that were found when the TPU came up."""
        directory = directory_of(self.cluster, TpuLocation.parse(handle.native_id).id, self._given_state_dir)
        return self._pods.hosts(saved_workers(directory)).entries(handle)

    def recall(self, digest: str, handle: Handle) -> None:
        """Bring the tree back from the workers, while they are there."""
        inner = self._reachable(handle)
        if inner is None:
            raise BackendError("its TPU is not up", where=handle.marker)
        inner.recall(digest, handle)

    def _reachable(self, handle: Handle) -> SshBackend | None:
        """Return the workers of an attempt; `None` when not up. Calls the API only for pods not used before."""
        if (inner := self._pods.known(TpuLocation.parse(handle.native_id).id)) is not None:
            return inner
        step = self._step(self._look(handle))
        return self._pods.on(step) if isinstance(step, Node) else None

    # -- the end

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Write the cancel request for the agents; agents that have not been started never will be.

        Raises `PartlyUnreachable` for the attempts that could not be reached; the others are told.
        """
        from orc.launchers.remote.ssh.fanout import each

        if not handles:
            return
        statuses = self._statuses(handles, anew=True)
        results = each({h.marker: h for h in handles}, lambda h: self._cancel(h, statuses[h.marker], grace))
        raise_unreached({marker: error for marker, error in results.items() if isinstance(error, LaunchError)})

    def _cancel(self, handle: Handle, statuses: Sequence[ZoneStatus], grace: timedelta) -> None:
        local, step = self._local(handle.marker), self._step(statuses)
        if local.end() is not None:
            return
        own = TpuLocation.parse(handle.native_id).is_made_for(handle.marker)
        if isinstance(step, Node):
            ended = own and not local.started and self._poll_workers(handle, step).phase.ended
            if ended and not local.started:  # the look notes agents that it finds
                return
            if local.started or not own:
                self._pods.on(step).cancel([handle], grace)
                return
        if not local.started:
            local.mark_cancelled()  # the next look ends the attempt, and clears up

    def reap(self, handle: Handle) -> None:
        """Delete the attempt's TPU under any policy: the attempt is over, and the job goes on elsewhere.

        Raises `BackendUnreachable`.
        """
        location = TpuLocation.parse(handle.native_id)
        if not location.is_made_for(handle.marker):
            if (inner := self._reachable(handle)) is not None:
                inner.reap(handle)
            return
        for name in lifecycle.to_delete(self._list([location]).statuses(location), location):
            try:
                self.api.delete(name)
            except BackendError as error:
                raise BackendUnreachable(f"{name} cannot be deleted: {error.what}", where=error.where) from error

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """Return TPUs with orc's label in the zones of the cluster."""
        return provision.leftovers(self._list([self._all_zones]), live, over, now=time.time())

    def sweep(self, leftover: Leftover) -> None:
        """Delete a leftover, and wait until that is done."""
        self.api.delete(leftover.native_id, wait_s=self.settings.options.delete_timeout)

    def _end_idle(self) -> None:
        """Delete TPUs whose idle time is over. A deletion that fails is left to a later pass."""
        if self.settings.options.on_finish != "idle" or time.monotonic() - self._idle_listed_at < _IDLE_CHECK_S:
            return
        for name in provision.idle_for_too_long(self._list([self._all_zones]), now=time.time()):
            with suppress(BackendError):
                self.api.delete(name)
        self._idle_listed_at = time.monotonic()

    # -- parts of the above

    @property
    def _all_zones(self) -> TpuLocation:
        """Location of everything in the zones of the cluster."""
        return TpuLocation(self.settings.options.project, self.settings.options.zones, request.QUEUED, "")

    def _list(self, locations: Sequence[TpuLocation]) -> Listing:
        from orc.launchers.backends.tpu.listing import list_resources

        return list_resources(self.api, locations)

    def _look(self, handle: Handle) -> list[ZoneStatus]:
        """Return the statuses of an attempt's TPU as they are now."""
        return self._statuses([handle], anew=True)[handle.marker]

    def _statuses(self, handles: Sequence[Handle], *, anew: bool = False) -> dict[str, list[ZoneStatus]]:
        """Return the statuses of attempts by their markers: of the own zone alone where the TPU is there."""
        local = {handle.marker: self._local(handle.marker) for handle in handles}
        zones = {marker: state.zone for marker, state in local.items()}
        locations = {handle.marker: TpuLocation.parse(handle.native_id) for handle in handles}
        found = self._poller.statuses(locations, zones, anew=anew)
        for marker, statuses in found.items():
            if (zone := next((status.zone for status in statuses if status.alive), "")) not in ("", zones[marker]):
                local[marker].zone = zone
        return {marker: local[marker].dated(statuses) for marker, statuses in found.items()}

    def _step(self, statuses: Sequence[ZoneStatus]) -> lifecycle.Step:
        limit = self.settings.options.provision_timeout
        return lifecycle.next_step(statuses, now=time.time(), provision_timeout_s=limit)

    def _local(self, marker: str) -> LocalState:
        from orc.launchers.backends.tpu.local_state import LocalState

        return LocalState(directory_of(self.cluster, request.tpu_id(marker), self._given_state_dir), marker)


def _one_line(error: LaunchError) -> str:
    """Return an error on one line, without the long name of the TPU."""
    return f"{error.where}: {error.what}" if error.where and "/" not in error.where else error.what


def _answer(result: Observation | LaunchError) -> Observation:
    """Return an observation; `Phase.UNKNOWN` for an error."""
    return Observation(Phase.UNKNOWN, reason=result.what) if isinstance(result, LaunchError) else result
