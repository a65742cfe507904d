"""The backend of kind tpu: a TPU is asked for, becomes a few SSH hosts, and is given back.

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
    Finding,
    Handle,
    Leftover,
    LogChunk,
    LogSelector,
    NodeEntry,
    Observation,
    Phase,
    Placement,
    Snapshot,
    require_secrets,
)
from orc.launchers.backends.tpu import accelerators, lifecycle, request
from orc.launchers.backends.tpu.asking import ask, own_sights
from orc.launchers.backends.tpu.lifecycle import Away, Create, End, Node, Sight, State, Use, Wait
from orc.launchers.backends.tpu.pods import Pods
from orc.launchers.backends.tpu.polling import Polling
from orc.launchers.backends.tpu.rendering import hosts_of, render_plan
from orc.launchers.backends.tpu.request import Place
from orc.launchers.backends.tpu.settings import Settings, read_settings
from orc.launchers.backends.tpu.workers import directory_of, has_begun, worker_name
from orc.launchers.errors import (
    AmbiguousSubmit,
    BackendError,
    BackendUnreachable,
    LaunchError,
    NoRoom,
    PartlyUnreachable,
)
from orc.launchers.plan import Plan

if TYPE_CHECKING:
    from orc.launchers.backends.ssh import SshBackend
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.kept import Kept
    from orc.launchers.backends.tpu.sights import Board
    from orc.launchers.ids import AttemptId
    from orc.launchers.remote.transport import Transport
    from orc.launchers.spec import JobSpec
    from orc.launchers.spec.clusters import Cluster
    from orc.launchers.transfer.targets import Targets


_IDLE_LOOK_S = 60.0  # between two looks for TPUs that have been idle for too long


class TpuBackend(Backend):
    """Jobs on TPUs of one project, each attempt on one of its own unless the options name one."""

    kind = "tpu"
    visibility_s = 15.0

    def __init__(self, cluster: Cluster, *, state_dir: Path | None = None) -> None:
        super().__init__(cluster, state_dir=state_dir)
        self.settings: Settings = read_settings(cluster)
        self._pods = Pods(cluster, self.settings, state_dir, lambda: self.api)
        self._named_workers: Mapping[str, Transport] | None = None
        self._polling = Polling(self._look)
        self._idle_looked_at = float("-inf")  # monotonic

    @cached_property
    def api(self) -> TpuApi:
        """The TPU API, connected when it is first asked."""
        from orc.launchers.backends.tpu.client import TpuApi

        return TpuApi(self.settings.options)

    @property
    def root(self) -> str:
        """The directory on the workers."""
        return self.settings.root

    @property
    def is_remote(self) -> bool:
        """True: the workers are other machines."""
        return True

    def close(self) -> None:
        """Close all connections; they are made anew when they are needed again."""
        self._pods.close()
        for transport in (self._named_workers or {}).values():
            transport.close()
        self._named_workers = None
        if "api" in self.__dict__:
            self.api.close()

    # -- before the start

    def render(self, job: JobSpec, snapshot: Snapshot, attempt: AttemptId, placement: Placement | None = None) -> Plan:
        """The requests to the TPU API, ``agent.json``, and one command for each worker."""
        return render_plan(job, snapshot, attempt, self.cluster, self.settings)

    def preflight(self, plan: Plan) -> list[Finding]:
        """Does the API let us in, and does it have what is asked for?"""
        from orc.launchers.backends.tpu.preflight import check

        return check(self.api, plan)

    def stage(self, snapshot: Snapshot, plan: Plan | None = None) -> None:
        """Nothing: there are no workers yet. They get the snapshot when they are up, before the agents start."""

    def stores(self, plan: Plan | None = None) -> Targets:
        """Return the stores of the workers of the TPU that the options name. Raises `BackendError` without one."""
        from orc.launchers.backends.tpu.workers import worker_transports
        from orc.launchers.remote.ssh.options import DEFAULT_PYTHON
        from orc.launchers.transfer.targets import Targets

        if self.settings.options.name is None:
            raise BackendError(
                "TPUs are made for an attempt and deleted after it: nothing of a job stays there",
                where=f"cluster {self.cluster.name}",
                hint="`orc prune` deletes TPUs that are left. A TPU that `name:` in the options names keeps a store.",
            )
        if self._named_workers is None:
            self._named_workers = worker_transports(self.cluster, state_dir=self._given_state_dir)
        roots = {name: (transport, self.root) for name, transport in self._named_workers.items()}
        python = self.cluster.python or DEFAULT_PYTHON
        return Targets(roots, dict.fromkeys(roots, python), shared="auto")

    def submit(self, plan: Plan, secrets: Mapping[str, str]) -> Handle:
        """Ask for the TPU in the first zone that takes the request; what was asked for before is adopted.

        Raises `NoRoom` when no zone takes it now. A TPU that the options name is used at once.
        """
        secrets = require_secrets(plan, secrets)
        handle = self._handle(plan)
        place = Place.parse(handle.native_id)
        if not place.is_made_for(plan.marker):
            self._pods.start(self._named(plan, place), plan, secrets)
            return handle
        if any(s.state is not State.ABSENT for s in own_sights(self._look([place]), place, plan.marker)):
            return handle
        refusals = ask(self.api, plan, place.zones)
        if len(refusals) < len(place.zones):
            return handle
        end = lifecycle.no_zone_left(refusals)
        if end.cause is Cause.LAUNCH:
            raise BackendError(end.reason, where=self.cluster.name)
        raise NoRoom(f"waiting for a TPU: {end.reason}", where=self.cluster.name)

    def _handle(self, plan: Plan) -> Handle:
        place = str(request.in_plan(plan)["place"])
        return Handle(self.cluster.name, self.kind, plan.marker, place, time.time(), hosts_of(plan))

    def find(self, marker: str, hosts: Collection[str] = (), *, complete: bool = True) -> Handle | None:
        """What is there under the attempt's name in any of the cluster's zones; on a TPU that is named, the attempt."""
        options = self.settings.options
        if options.name is not None:
            place = request.place_of(options, marker)
            for sight in self._look([place]).sights(place):
                if sight.state is State.READY and sight.node is not None:
                    found = self._pods.on(sight.node).find(marker)
                    return None if found is None else replace(found, backend=self.kind, native_id=str(place))
            return None
        queued = Place(options.project, options.zones, request.QUEUED, request.tpu_id(marker))
        if ended := self._kept_of(marker).handle:
            return ended
        places = [queued, replace(queued, collection=request.NODES)]
        board = self._look(places)
        for place in places:
            for sight in board.sights(place):
                if sight.state is State.WAITING and sight.queued is None and sight.node is None:
                    raise BackendUnreachable("its TPU is being created, and not listed yet", where=sight.zone)
                if sight.state in (State.ABSENT, State.GOING) or request.MARKER not in sight.labels:
                    continue
                if place.collection == request.NODES and sight.node is not None and sight.node.queued:
                    continue  # it goes with its queued resource
                hosts = tuple(map(worker_name, range(accelerators.parse(sight.accelerator_type).hosts)))
                return Handle(self.cluster.name, self.kind, marker, str(place), time.time(), hosts)
        return None

    # -- the start on the workers

    def advance(self, handle: Handle, plan: Plan, secrets: Mapping[str, str]) -> Observation:
        """Ask in the next zone, or start the agents on a TPU that is up."""
        kept, place = self._kept(handle), Place.parse(handle.native_id)
        sights = self._look([place]).sights(place)
        step = self._step(sights)
        if kept.end() is None and not kept.cancelled and isinstance(step, Create):
            zones = place.zones[place.zones.index(step.zone) :]
            refusals = ask(self.api, plan, zones)
            if len(refusals) == len(zones):
                failed = [sight for sight in sights if sight.state is State.FAILED]
                return self._over(handle, _observed(lifecycle.no_zone_left([*failed, *refusals])))
            return Observation(Phase.PENDING, reason=f"the TPU is asked for in {zones[len(refusals)]} ({step.reason})")
        if kept.end() is None and not kept.cancelled and not kept.started and isinstance(step, Use):
            try:
                self._pods.start(step.node, plan, secrets)
            except (BackendUnreachable, NoRoom, AmbiguousSubmit) as error:
                seen = self._booting(handle, step.node, _told(error))
                return self._over(handle, seen) if seen.phase.ended else seen
            except LaunchError as error:
                return self._over(handle, Observation(Phase.FAILED, Cause.LAUNCH, _told(error)))
            kept.mark_started()
        return self.poll([handle])[handle]

    def _named(self, plan: Plan, place: Place) -> Node:
        """The TPU that the options name. Raises `NoRoom` while it is not up, `BackendError` when it will not do."""
        step = self._step(self._look([place]).sights(place))
        if isinstance(step, Use):
            wanted = str(request.in_plan(plan)["accelerator_type"])
            if step.node.accelerator_type not in ("", wanted):
                raise BackendError(
                    f"it is a {step.node.accelerator_type}, and the options say {wanted}", where=step.node.name
                )
            return step.node
        if isinstance(step, (Wait, Away)):
            raise NoRoom(f"waiting for {place.id}: {step.reason}", where=self.cluster.name)
        raise BackendError(
            f"there is no TPU {place.id} to be used: {step.reason}",
            where=self.cluster.name,
            hint="Create it, or remove `name:` and let orc make one for each attempt.",
        )

    # -- afterwards

    def poll(self, handles: Sequence[Handle]) -> dict[Handle, Observation]:
        """Two listings of each attempt's own zone, and one round trip to each worker that is up; many at a time.

        All zones are asked where an attempt's TPU is not (any more) where it was; see `Polling`.
        """
        from orc.launchers.remote.ssh.fanout import each

        if not handles:
            return {}
        self._end_idle()
        places = {handle.marker: Place.parse(handle.native_id) for handle in handles}
        kept = {handle.marker: self._kept(handle) for handle in handles}
        live = {marker: place for marker, place in places.items() if kept[marker].end() is None}
        sights = self._polling.sights(live, {marker: kept[marker].zone for marker in live})
        for marker, found in sights.items():
            if (zone := next((sight.zone for sight in found if sight.alive), "")) not in ("", kept[marker].zone):
                kept[marker].zone = zone
        results = each({h.marker: h for h in handles}, lambda handle: self._observe(handle, sights.get(handle.marker)))
        return {handle: _answer(results[handle.marker]) for handle in handles}

    def _observe(self, handle: Handle, sights: Sequence[Sight] | None) -> Observation:
        """One attempt. What has ended is reported once nothing of its TPU is left that should not be."""
        kept = self._kept(handle)
        if sights is None or kept.end() is not None:
            return self._settle(handle)
        step = self._step(sights)
        if kept.cancelled and not kept.started:
            return self._over(handle, Observation(Phase.CANCELLED, Cause.CANCELLED, "cancelled before it was started"))
        if isinstance(step, Use):
            seen = self._look_at_workers(handle, step.node)
            return self._over(handle, seen) if seen.phase.ended else seen
        if isinstance(step, End):
            return self._over(handle, _observed(step))
        if isinstance(step, Create):
            return Observation(Phase.PENDING, reason=f"{step.reason}; next in {step.zone}", due=True)
        if isinstance(step, Wait) and not kept.started:
            return Observation(Phase.PENDING, reason=step.reason)
        return Observation(Phase.UNKNOWN, reason=step.reason)

    def _look_at_workers(self, handle: Handle, node: Node) -> Observation:
        """What the agents on a TPU that is up say."""
        kept, place = self._kept(handle), Place.parse(handle.native_id)
        started = kept.started or not place.is_made_for(handle.marker)
        try:
            inner = self._pods.on(node)
        except BackendUnreachable as error:
            if started:
                return Observation(Phase.UNKNOWN, reason=error.what)
            return self._booting(handle, node, error.what)
        if not started:
            sights = inner.hosts.look(dict.fromkeys(handle.hosts, (handle.marker,)))[handle.marker]
            if not any(has_begun(sight) for sight in sights.values()):
                away = [sight for sight in sights.values() if sight.answer is None]
                if away:
                    return self._booting(handle, node, f"{away[0].host}: {away[0].why}")
                return Observation(Phase.PENDING, reason=f"the TPU is up in {node.zone}", due=True)
            kept.mark_started()
        own = replace(handle, backend=inner.kind, native_id=inner.hosts.directory(handle.hosts[0], handle.marker))
        seen = replace(inner.poll([own])[own], culprits=())  # workers are nobody's to avoid: the next TPU has others
        if seen.phase.ended and seen.phase is not Phase.SUCCEEDED:
            # What ranks die of when their TPU is taken away says nothing about them.
            step = self._step(self._look([place]).sights(place))
            if isinstance(step, End) and step.cause is Cause.PREEMPTED:
                return replace(_observed(step), exit=seen.exit, hosts=seen.hosts, started_at=seen.started_at)
            if isinstance(step, Away):
                return Observation(Phase.UNKNOWN, reason=step.reason)
        if seen.phase is Phase.UNKNOWN:
            self._polling.forget(handle.marker)  # are they silent because their TPU is gone?
        if node.health and not seen.phase.ended:
            return replace(seen, reason="; ".join(filter(None, [seen.reason, f"the TPU is not well: {node.health}"])))
        return seen

    def _booting(self, handle: Handle, node: Node, why: str) -> Observation:
        """The machines are there, and let nobody in yet: that takes a minute after the creation."""
        age = time.time() - node.created_at if node.created_at is not None else 0.0
        own = Place.parse(handle.native_id).is_made_for(handle.marker)
        if own and age > self.settings.options.boot_timeout:
            reason = f"the workers could not be used {age:.0f} s after the creation of the TPU: {why}"
            return Observation(Phase.LOST, Cause.NODE_FAILURE, reason)
        return Observation(Phase.PENDING, reason=f"waiting for the workers: {why}", due=True)

    def _over(self, handle: Handle, end: Observation) -> Observation:
        """The attempt has ended: remember how, and clear up."""
        self._kept(handle).record_end(handle, replace(end, ended_at=end.ended_at or time.time()))
        return self._settle(handle)

    def _settle(self, handle: Handle) -> Observation:
        from orc.launchers.backends.tpu.ending import settle

        place = Place.parse(handle.native_id)
        return settle(self, handle, self._look([place]).sights(place))

    # -- logs

    def log_selectors(self, handle: Handle) -> list[LogSelector]:
        """From the workers, or from the copy that was made before the TPU was deleted."""
        from orc.launchers.attempts.reader import log_selectors
        from orc.launchers.remote.transport import LocalTransport

        kept = self._kept(handle)
        if kept.has_logs:
            return log_selectors(LocalTransport(), kept.attempt_directory)
        inner = self._reached(handle)
        return [] if inner is None else inner.log_selectors(handle)

    def logs(self, handle: Handle, selector: LogSelector, offset: int = 0) -> Iterator[LogChunk]:
        """From the worker that runs the rank, or from the copy."""
        from orc.launchers.attempts.reader import read_log
        from orc.launchers.remote.transport import LocalTransport

        kept = self._kept(handle)
        if kept.has_logs:
            return read_log(LocalTransport(), kept.attempt_directory, selector, offset)
        inner = self._reached(handle)
        return iter(()) if inner is None else inner.logs(handle, selector, offset)

    def read_file(self, handle: Handle, name: str, offset: int = 0) -> bytes:
        """From worker 0, or from the copy."""
        from orc.launchers.attempts.reader import read_job_file
        from orc.launchers.remote.transport import LocalTransport

        kept = self._kept(handle)
        if kept.has_logs:
            return read_job_file(LocalTransport(), kept.attempt_directory, name, offset)
        inner = self._reached(handle)
        return b"" if inner is None else inner.read_file(handle, name, offset)

    def entries(self, handle: Handle) -> list[NodeEntry]:
        """OpenSSH's own client, with the addresses and host keys that were found when the TPU came up."""
        from orc.launchers.backends.tpu.workers import kept_workers

        directory = directory_of(self.cluster, Place.parse(handle.native_id).id, self._given_state_dir)
        return self._pods.hosts(kept_workers(directory)).entries(handle)

    def recall(self, digest: str, handle: Handle) -> None:
        """From the workers, while they are there."""
        inner = self._reached(handle)
        if inner is None:
            raise BackendError("its TPU is not up", where=handle.marker)
        inner.recall(digest, handle)

    def _reached(self, handle: Handle) -> SshBackend | None:
        """The workers of an attempt; `None` when they are not up. Asks the API only when this machine never did."""
        place = Place.parse(handle.native_id)
        if (inner := self._pods.known(place.id)) is not None:
            return inner
        step = self._step(self._look([place]).sights(place))
        return self._pods.on(step.node) if isinstance(step, Use) else None

    # -- the end

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        """Leave word for the agents; where they have not been started, they will not be.

        Raises `PartlyUnreachable` for the attempts that could not be reached; the others are told.
        """
        from orc.launchers.remote.ssh.fanout import each

        if not handles:
            return
        board = self._look([Place.parse(handle.native_id) for handle in handles])
        results = each({h.marker: h for h in handles}, lambda handle: self._cancel(handle, board, grace))
        failed = {marker: error for marker, error in results.items() if isinstance(error, LaunchError)}
        if failed:
            first = next(iter(failed.values()))
            raise PartlyUnreachable(first.what, where=first.where, hint=first.hint, markers=tuple(failed))

    def _cancel(self, handle: Handle, board: Board, grace: timedelta) -> None:
        kept, place = self._kept(handle), Place.parse(handle.native_id)
        if kept.end() is not None:
            return
        step = self._step(board.sights(place))
        if isinstance(step, Use):
            inner = self._pods.on(step.node) if kept.started or not place.is_made_for(handle.marker) else None
            if inner is None:
                seen = self._look_at_workers(handle, step.node)
                inner = self._pods.on(step.node) if kept.started else None
                if inner is None and seen.phase.ended:
                    return
            if inner is not None:
                inner.cancel([handle], grace)
                return
        if not kept.started:
            kept.mark_cancelled()  # the next look ends the attempt, and clears up

    def reap(self, handle: Handle) -> None:
        """The attempt is over, and the job goes on elsewhere: nothing of its TPU may be left, whatever the policy says.

        Raises `BackendUnreachable`.
        """
        place = Place.parse(handle.native_id)
        if not place.is_made_for(handle.marker):
            if (inner := self._reached(handle)) is not None:
                inner.reap(handle)
            return
        for name in lifecycle.to_delete(self._look([place]).sights(place), place):
            try:
                self.api.delete(name)
            except BackendError as error:
                raise BackendUnreachable(f"{name} cannot be deleted: {error.what}", where=error.where) from error

    def leftovers(self, live: Collection[str], over: Collection[str]) -> list[Leftover]:
        """TPUs with our label, in the zones of the cluster."""
        from orc.launchers.backends.tpu.sweeping import leftovers

        return leftovers(self._look([self._everywhere]), live, over, now=time.time())

    def sweep(self, leftover: Leftover) -> None:
        """Delete it, and wait until that is done."""
        self.api.delete(leftover.native_id, wait_s=self.settings.options.delete_timeout)

    def _end_idle(self) -> None:
        """Delete what has been idle for long enough. What cannot be deleted now is left to a later pass."""
        from orc.launchers.backends.tpu.sweeping import idle_for_too_long

        if self.settings.options.on_finish != "idle" or time.monotonic() - self._idle_looked_at < _IDLE_LOOK_S:
            return
        for name in idle_for_too_long(self._look([self._everywhere]), now=time.time()):
            with suppress(BackendError):
                self.api.delete(name)
        self._idle_looked_at = time.monotonic()

    # -- parts of the above

    @property
    def _everywhere(self) -> Place:
        """All that there is in the zones of the cluster."""
        return Place(self.settings.options.project, self.settings.options.zones, request.QUEUED, "")

    def _look(self, places: Sequence[Place]) -> Board:
        from orc.launchers.backends.tpu.sights import look

        return look(self.api, places)

    def _step(self, sights: Sequence[Sight]) -> lifecycle.Step:
        limit = self.settings.options.provision_timeout
        return lifecycle.next_step(sights, now=time.time(), provision_timeout_s=limit)

    def _kept(self, handle: Handle) -> Kept:
        return self._kept_of(handle.marker)

    def _kept_of(self, marker: str) -> Kept:
        from orc.launchers.backends.tpu.kept import Kept

        return Kept(directory_of(self.cluster, request.tpu_id(marker), self._given_state_dir), marker)


def _observed(end: End) -> Observation:
    return Observation(end.phase, end.cause, end.reason, ended_at=time.time())


def _told(error: LaunchError) -> str:
    """In one line; the long name of the TPU goes without saying."""
    return f"{error.where}: {error.what}" if error.where and "/" not in error.where else error.what


def _answer(result: Observation | LaunchError) -> Observation:
    """An attempt about which nothing can be said now."""
    return Observation(Phase.UNKNOWN, reason=result.what) if isinstance(result, LaunchError) else result
