"""Lifecycle of a TPU: from the API's listing to the next step. Pure: no clock, no network.

An attempt asks for its TPU in one zone after the other. Requests that failed are left in place until the attempt is
over: they are its memory, for nothing of orc runs between two passes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Cause, Observation, Phase

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.request import TpuLocation

# Capacity that is not there now may be there later; what these say stays as it is.
_PERMANENT = frozenset({"INVALID_ARGUMENT", "PERMISSION_DENIED", "NOT_FOUND", "UNAUTHENTICATED", "FAILED_PRECONDITION"})


@dataclass(frozen=True)
class _Resource:
    name: str  # projects/P/locations/Z/queuedResources/ID, or .../nodes/ID

    @property
    def id(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]

    @property
    def zone(self) -> str:
        """Its zone."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class QueuedResource(_Resource):
    """Queued resource, as the API shows it."""

    state: str  # ACCEPTED, ...
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # of the node that it is for
    code: str = ""  # of the error, when it FAILED
    error: str = ""
    by_user: bool = False  # suspended by a user, not by the service
    created_at: float | None = None


@dataclass(frozen=True)
class Node(_Resource):
    """TPU node, as the API shows it."""

    state: str  # READY, ...
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[tuple[str, str], ...] = ()  # internal and external (or "") of each worker, in order
    health: str = ""  # what the service says about it, when it is not well
    queued: str = ""  # name of the queued resource that it belongs to
    created_at: float | None = None
    serial: int = 0  # tells it from an earlier one of the same name


@dataclass(frozen=True)
class Creation:
    """Newest create operation of a resource: under way, done, or failed, which leaves no node behind."""

    done: bool
    started_at: float | None = None
    code: str = ""  # of the error, when it failed
    error: str = ""


class State(enum.Enum):
    """State of an attempt's TPU in one zone."""

    NOT_FOUND = enum.auto()
    PROVISIONING = enum.auto()
    READY = enum.auto()
    RESTARTING = enum.auto()  # it is being restarted or repaired: it will be back
    PREEMPTED = enum.auto()
    FAILED = enum.auto()
    STOPPED = enum.auto()  # by a user, not by the service
    DELETING = enum.auto()  # it is being deleted


@dataclass(frozen=True)
class ZoneStatus:
    """Status of an attempt's TPU in one zone."""

    zone: str
    state: State
    message: str = ""
    code: str = ""  # of the error, when it FAILED
    node: Node | None = None
    queued: QueuedResource | None = None
    since: float | None = None  # when its creation began, seconds since the epoch

    @property
    def alive(self) -> bool:
        """Return whether the attempt has its TPU here, or will get it here: other zones do not matter then."""
        return self.state in (State.PROVISIONING, State.READY, State.RESTARTING)

    @property
    def lacks_node(self) -> bool:
        """Return whether capacity was granted, and the node is not there (yet); the API does not say since when."""
        granted = self.queued is not None and self.queued.state in ("PROVISIONING", "ACTIVE")
        return self.state is State.PROVISIONING and granted and self.node is None

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the TPU: those of the node are newer than those of its request."""
        return {**(self.queued.labels if self.queued else {}), **(self.node.labels if self.node else {})}

    @property
    def accelerator_type(self) -> str:
        """Accelerator type of the request."""
        found = self.queued or self.node
        return found.accelerator_type if found else ""


_NODE_STATES = {
    "CREATING": State.PROVISIONING,
    "READY": State.READY,
    "PREEMPTED": State.PREEMPTED,
    "TERMINATED": State.PREEMPTED,  # the end of its life, as spot TPUs had it after a day
    "DELETING": State.DELETING,
    "STOPPING": State.STOPPED,
    "STOPPED": State.STOPPED,
    "HIDING": State.STOPPED,
    "HIDDEN": State.STOPPED,
}


def zone_status(
    zone: str, queued: QueuedResource | None, node: Node | None, creation: Creation | None = None
) -> ZoneStatus:
    """Return the status of one zone. Unknown states count as passing.

    What is being created may not be listed yet: then its operation stands for it.
    """
    if queued is not None:
        return _of_queued(zone, queued, node)
    if node is not None:
        state = _NODE_STATES.get(node.state, State.RESTARTING)
        return ZoneStatus(zone, state, f"{node.state} in {zone}", node=node, since=node.created_at)
    if creation is not None and not creation.done:
        return ZoneStatus(zone, State.PROVISIONING, f"CREATING in {zone}", since=creation.started_at)
    if creation is not None and creation.code:
        return zone_rejected(zone, creation.code, creation.error)
    return ZoneStatus(zone, State.NOT_FOUND)


def _of_queued(zone: str, queued: QueuedResource, node: Node | None) -> ZoneStatus:
    message = f"{queued.state} in {zone}"
    if queued.state == "FAILED":
        why = queued.error or "the request failed"
        return ZoneStatus(zone, State.FAILED, f"{zone}: {why}", queued.code, node, queued)
    if queued.state in ("SUSPENDING", "SUSPENDED"):
        taken = State.STOPPED if queued.by_user else State.PREEMPTED
        return ZoneStatus(zone, taken, message, node=node, queued=queued)
    if queued.state == "DELETING":
        return ZoneStatus(zone, State.DELETING, message, node=node, queued=queued)
    if queued.state == "ACTIVE" and node is not None:
        state = _NODE_STATES.get(node.state, State.RESTARTING)
        return ZoneStatus(zone, state, f"{node.state} in {zone}", node=node, queued=queued)
    return ZoneStatus(
        zone, State.PROVISIONING, message, node=node, queued=queued, since=node.created_at if node else None
    )


# -- what to do


@dataclass(frozen=True)
class Pending:
    """Step: wait for the service."""

    reason: str
    restarting: bool = False  # machines that were up; nothing can be observed now


@dataclass(frozen=True)
class Create:
    """Step: request the TPU in this zone."""

    zone: str
    reason: str  # why not in the one before


# What to do: use the TPU, which is up; end the attempt, which gets no TPU or has lost it, as observed; or one of these.
Step = Node | Observation | Pending | Create


def next_step(statuses: Sequence[ZoneStatus], *, now: float, provision_timeout_s: float) -> Step:
    """Return the step that follows from *statuses*, one for each zone in the order in which they are tried."""
    by_state = {state: [s for s in statuses if s.state is state] for state in State}
    for ready in by_state[State.READY]:
        if ready.node is not None:
            return ready.node
    for away in by_state[State.RESTARTING]:
        return Pending(f"the TPU is {away.message}", restarting=True)
    for gone in by_state[State.PREEMPTED]:
        return Observation(Phase.FAILED, Cause.PREEMPTED, f"the TPU was preempted ({gone.message})")
    for waiting in by_state[State.PROVISIONING]:
        if waiting.since is not None and now - waiting.since > provision_timeout_s:
            took = f"{now - waiting.since:.0f} s"
            return Observation(Phase.LOST, Cause.NODE_FAILURE, f"the TPU is still {waiting.message} after {took}")
        return Pending(f"the TPU is {waiting.message}")
    for down in by_state[State.STOPPED]:
        return Observation(Phase.LOST, Cause.NODE_FAILURE, f"the TPU was stopped outside of orc ({down.message})")
    for going in by_state[State.DELETING]:
        return Observation(Phase.LOST, Cause.NODE_FAILURE, f"the TPU is being deleted outside of orc ({going.message})")
    return _after_failures(statuses)


def _after_failures(statuses: Sequence[ZoneStatus]) -> Step:
    """Return a step into the next zone that has no request yet; none gets two."""
    failed = [status for status in statuses if status.state is State.FAILED]
    if not failed:
        where = ", ".join(status.zone for status in statuses)
        return Observation(Phase.LOST, Cause.NODE_FAILURE, f"the TPU is gone: it was deleted outside of orc ({where})")
    last = max(number for number, status in enumerate(statuses) if status.state is State.FAILED)
    message = "; ".join(status.message for status in failed)
    for status in statuses[last + 1 :]:
        return Create(status.zone, message)
    return no_zone_left(failed)


def no_zone_left(failed: Sequence[ZoneStatus]) -> Observation:
    """Return the end of an attempt that all zones rejected; another may follow unless all rejections are permanent."""
    message = "; ".join(status.message for status in failed)
    if all(status.code in _PERMANENT for status in failed):
        return Observation(Phase.FAILED, Cause.LAUNCH, f"the TPU cannot be made: {message}")
    return Observation(Phase.LOST, Cause.NODE_FAILURE, f"no TPU could be had: {message}")


def zone_rejected(zone: str, code: str, error: str) -> ZoneStatus:
    """Return the status of a zone that rejected the request itself."""
    return ZoneStatus(zone, State.FAILED, f"{zone}: {error}", code)


def to_delete(statuses: Sequence[ZoneStatus], location: TpuLocation) -> list[str]:
    """Return the names of resources to delete, so that nothing of an attempt is left, and nothing else."""
    names = []
    for status in statuses:
        if status.state in (State.NOT_FOUND, State.DELETING):
            continue
        if status.queued is not None:
            names.append(status.queued.name)
        elif status.node is not None and status.node.id == location.id:
            names.append(status.node.name)
        elif status.state is State.PROVISIONING:  # its creation is under way, and it is not listed yet
            names.append(f"projects/{location.project}/locations/{status.zone}/{location.collection}/{location.id}")
    return names
