"""Provision of a TPU, in one zone after the other, and its teardown after the end of an attempt.

Resources of the same name that are others' are left alone. Teardown fetches the logs, then deletes or keeps the TPU.
The end is reported when that is done, because an attempt is not polled again afterwards. Failures are reported, and
tried with every pass; at last the end is reported nevertheless, with what is left to do.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from orc.launchers.backends.base import Leftover, Observation, Phase
from orc.launchers.backends.tpu import lifecycle
from orc.launchers.backends.tpu.lifecycle import State, ZoneStatus
from orc.launchers.backends.tpu.listing import list_resources
from orc.launchers.backends.tpu.request import (
    IDLE_SINCE,
    IDLE_TIMEOUT,
    MARKER,
    ON_FINISH,
    TpuLocation,
    read_requests,
    tpu_id,
)
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError

if TYPE_CHECKING:
    from orc.launchers.backends.base import Handle
    from orc.launchers.backends.tpu.client import TpuApi
    from orc.launchers.backends.tpu.lifecycle import Node, QueuedResource
    from orc.launchers.backends.tpu.listing import Listing
    from orc.launchers.backends.tpu.local_state import LocalState
    from orc.launchers.backends.tpu.workers import Pods
    from orc.launchers.plan import Plan


def request_tpu(api: TpuApi, local: LocalState, plan: Plan, zones: Sequence[str]) -> list[ZoneStatus]:
    """Request the TPU in *zones* until one accepts; return the statuses of those that did not.

    Each zone is noted before it is asked: where this is cut off, the TPU is looked for there.
    """
    from orc.launchers.backends.tpu.client import AlreadyExists, ApiRejected, ResourceExhausted

    location = TpuLocation.parse(read_requests(plan)["place"])
    requests = {item["parent"].rpartition("/")[2]: item for item in read_requests(plan)["requests"]}
    rejections: list[ZoneStatus] = []
    for zone in zones:
        local.zone = zone
        try:
            api.create(requests[zone])
        except AlreadyExists:
            there = replace(location, zones=(zone,))
            require_own(list_resources(api, [there]).statuses(there), plan.marker)
        except ResourceExhausted as error:
            rejections.append(lifecycle.zone_rejected(zone, "RESOURCE_EXHAUSTED", error.what))
            continue
        except ApiRejected as error:
            rejections.append(lifecycle.zone_rejected(zone, error.code, error.what))
            continue
        except BackendUnreachable as error:
            raise AmbiguousSubmit(f"the request was cut off: {error.what}", where=error.where) from error
        break
    return rejections


def require_own(statuses: Sequence[ZoneStatus], marker: str) -> None:
    """Raise `BackendError` when the name of the attempt's TPU is taken by another."""
    for status in statuses:
        owner = status.queued or status.node
        if owner is not None and status.labels.get(MARKER) != tpu_id(marker):
            what = f"{owner.name} exists, and is not of this attempt: it lacks the label {MARKER}"
            hint = "Delete it, and submit the job again."
            raise BackendError(what, where=marker, hint=hint)


@dataclass(frozen=True)
class Teardown:
    """Teardown of the TPUs of one cluster."""

    cluster: str
    delete_timeout_s: float  # after which an end is reported with what is left to do
    api: TpuApi
    pods: Pods

    def settle(self, local: LocalState, handle: Handle) -> Observation:
        """Return the attempt's end once its teardown is done; until then `Phase.UNKNOWN` with the reason."""
        location = TpuLocation.parse(handle.native_id)
        statuses = list_resources(self.api, [location]).statuses(location)
        recorded = local.end()
        assert recorded is not None
        end, at = recorded
        if not location.is_made_for(handle.marker):
            return end
        up = next((status for status in statuses if status.state is State.READY and status.node is not None), None)
        if up is not None and up.node is not None and local.started:
            try:
                trouble = local.fetch_logs(self.pods.on(up.node).hosts, handle.hosts, at)
            except LaunchError as error:
                trouble = error.what
            if trouble and time.time() - at < self.delete_timeout_s:
                return _not_yet(end, f"fetching the logs: {trouble}")
        policy = up.labels.get(ON_FINISH, "delete") if up is not None and local.started else "delete"
        if policy == "delete":
            return self._deleted(end, at, location, statuses)
        if policy == "idle" and up is not None:
            return self._idle(end, at, up)
        return end

    def _deleted(self, end: Observation, at: float, location: TpuLocation, statuses: list[ZoneStatus]) -> Observation:
        names = lifecycle.to_delete(statuses, location)
        if not names:
            return end
        rejections = []
        for name in names:
            try:
                self.api.delete(name)
            except BackendError as error:
                rejections.append(f"{name}: {error.what}")
        left = lifecycle.to_delete(list_resources(self.api, [location]).statuses(location), location)
        if not left:
            return end
        return self._late(end, at, f"deleting its TPU: {'; '.join(rejections) or f'{left[0]} is still there'}")

    def _idle(self, end: Observation, at: float, up: ZoneStatus) -> Observation:
        """Label the TPU with the start of its idle time."""
        if IDLE_SINCE in up.labels or up.node is None:
            return end
        try:
            self.api.label(up.node, {**up.node.labels, IDLE_SINCE: f"{at:.0f}"})
        except BackendError as error:
            return self._late(end, at, f"labelling its TPU as idle: {error.what}")
        return end

    def _late(self, end: Observation, at: float, trouble: str) -> Observation:
        if time.time() - at < self.delete_timeout_s:
            return _not_yet(end, trouble)
        undone = f"NOT DONE: {trouble}; see `orc prune --cluster {self.cluster}`"
        return replace(end, reason="; ".join(filter(None, [end.reason, undone])))


def _not_yet(end: Observation, trouble: str) -> Observation:
    how = end.reason or str(end.phase)
    return Observation(Phase.UNKNOWN, reason=f"over ({how}); {trouble}")


def leftovers(listing: Listing, live: Collection[str], over: Collection[str], *, now: float) -> list[Leftover]:
    """Return labelled TPUs of none of the attempts *live*, those that can be deleted first."""
    needed = {tpu_id(marker) for marker in live}
    ended = {tpu_id(marker): marker for marker in over}
    found = []
    for item, node in _labelled(listing):
        own = _label(item, node, MARKER)
        if own in needed or item.state == "DELETING":
            continue
        why = _why(item, node, now) if own in ended else "unknown"
        what = f"{'TPU' if item is node else 'queued resource'} {item.id} in {item.zone}"
        found.append(Leftover(item.name, ended.get(own, own), what, item.state, why, item.created_at))
    return sorted(found, key=lambda one: (("over", "idle", "kept", "unknown").index(one.why), one.what))


def idle_for_too_long(listing: Listing, *, now: float) -> list[str]:
    """Return the names of kept TPUs whose idle time is over."""
    return [i.name for i, n in _labelled(listing) if _is_idle_for_too_long(i, n, now) and i.state != "DELETING"]


def _labelled(listing: Listing) -> Iterator[tuple[QueuedResource | Node, Node | None]]:
    """Yield resources with orc's label, each with its node; a node goes with its queued resource."""
    for (zone, name), queued in listing.queued.items():
        if MARKER in queued.labels:
            yield queued, listing.nodes.get((zone, name))
    for node in listing.nodes.values():
        if MARKER in node.labels and (node.zone, node.queued.rpartition("/")[2]) not in listing.queued:
            yield node, node


def _why(item: QueuedResource | Node, node: Node | None, now: float) -> Literal["over", "idle", "kept"]:
    if _label(item, node, ON_FINISH) == "delete" or node is None or node.state != "READY":
        return "over"
    return "idle" if _is_idle_for_too_long(item, node, now) else "kept"


def _is_idle_for_too_long(item: QueuedResource | Node, node: Node | None, now: float) -> bool:
    since, allowed = _label(item, node, IDLE_SINCE), _label(item, node, IDLE_TIMEOUT)
    return since.isdecimal() and allowed.isdecimal() and now - int(since) > int(allowed)


def _label(item: QueuedResource | Node, node: Node | None, key: str) -> str:
    """Return a label: the node's are newer than those of the request for it."""
    return str({**item.labels, **(node.labels if node is not None else {})}.get(key, ""))
