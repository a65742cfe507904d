"""From what the TPU API shows to what is to be done next. Pure: no clock, no network.

An attempt asks for its TPU in one zone after the other. Requests that failed are left in place until the attempt is
over: they are its memory, for nothing of orc runs between two passes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.backends.base import Cause, Phase

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.request import Place

# Capacity that is not there now may be there later; what these say stays as it is.
_FOR_GOOD = frozenset({"INVALID_ARGUMENT", "PERMISSION_DENIED", "NOT_FOUND", "UNAUTHENTICATED", "FAILED_PRECONDITION"})


@dataclass(frozen=True)
class _Resource:
    name: str  # projects/P/locations/Z/queuedResources/ID, or .../nodes/ID

    @property
    def id(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]

    @property
    def zone(self) -> str:
        """Where it is."""
        return self.name.split("/")[3]


@dataclass(frozen=True)
class Queued(_Resource):
    """A queued resource, as the API shows it."""

    state: str  # ACCEPTED, ...
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # of the node that it is for
    code: str = ""  # of the error, when it FAILED
    error: str = ""
    by_user: bool = False  # somebody, not the service, has it suspended
    created_at: float | None = None


@dataclass(frozen=True)
class Node(_Resource):
    """A TPU, as the API shows it."""

    state: str  # READY, ...
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[tuple[str, str], ...] = ()  # internal and external (or "") of each worker, in order
    health: str = ""  # what the service says about it, when it is not well
    queued: str = ""  # name of the queued resource that it belongs to
    created_at: float | None = None
    serial: int = 0  # tells it from an earlier one of the same name


@dataclass(frozen=True)
class Failure:
    """A creation that failed and has left no node behind."""

    code: str
    error: str


@dataclass(frozen=True)
class Creation:
    """The newest creation of a resource, as its operation shows it: under way, failed, or done."""

    done: bool
    started_at: float | None = None
    failure: Failure | None = None


class State(enum.Enum):
    """What one zone has of an attempt's TPU."""

    ABSENT = enum.auto()
    WAITING = enum.auto()
    READY = enum.auto()
    AWAY = enum.auto()  # it is being restarted or repaired: it will be back
    PREEMPTED = enum.auto()
    FAILED = enum.auto()
    TAKEN_DOWN = enum.auto()  # by somebody, not by the service
    GOING = enum.auto()  # it is being deleted


@dataclass(frozen=True)
class Sight:
    """What one zone has, and the words for it."""

    zone: str
    state: State
    said: str = ""
    failure: Failure | None = None
    node: Node | None = None
    queued: Queued | None = None
    since: float | None = None  # when its creation began, seconds since the epoch

    @property
    def alive(self) -> bool:
        """Return whether the attempt has its TPU here, or will get it here: other zones do not matter then."""
        return self.state in (State.WAITING, State.READY, State.AWAY)

    @property
    def labels(self) -> Mapping[str, str]:
        """Of the TPU: those of the node are newer than those that the request was made with."""
        return {**(self.queued.labels if self.queued else {}), **(self.node.labels if self.node else {})}

    @property
    def accelerator_type(self) -> str:
        """What was asked for."""
        found = self.queued or self.node
        return found.accelerator_type if found else ""


_NODE_STATES = {
    "CREATING": State.WAITING,
    "READY": State.READY,
    "PREEMPTED": State.PREEMPTED,
    "TERMINATED": State.PREEMPTED,  # the end of its life, as spot TPUs had it after a day
    "DELETING": State.GOING,
    "STOPPING": State.TAKEN_DOWN,
    "STOPPED": State.TAKEN_DOWN,
    "HIDING": State.TAKEN_DOWN,
    "HIDDEN": State.TAKEN_DOWN,
}


def sight_of(zone: str, queued: Queued | None, node: Node | None, creation: Creation | None = None) -> Sight:
    """One zone, from what the API shows there. States that this version does not know are waited for.

    What is being created may not be listed yet: then its operation stands for it.
    """
    if queued is not None:
        return _of_queued(zone, queued, node)
    if node is not None:
        state = _NODE_STATES.get(node.state, State.AWAY)
        return Sight(zone, state, f"{node.state} in {zone}", node=node, since=node.created_at)
    if creation is not None and not creation.done:
        return Sight(zone, State.WAITING, f"CREATING in {zone}", since=creation.started_at)
    if creation is not None and creation.failure is not None:
        return Sight(zone, State.FAILED, f"{zone}: {creation.failure.error}", creation.failure)
    return Sight(zone, State.ABSENT)


def _of_queued(zone: str, queued: Queued, node: Node | None) -> Sight:
    said = f"{queued.state} in {zone}"
    if queued.state == "FAILED":
        failure = Failure(queued.code, queued.error or "the request failed")
        return Sight(zone, State.FAILED, f"{zone}: {failure.error}", failure, node, queued)
    if queued.state in ("SUSPENDING", "SUSPENDED"):
        taken = State.TAKEN_DOWN if queued.by_user else State.PREEMPTED
        return Sight(zone, taken, said, node=node, queued=queued)
    if queued.state == "DELETING":
        return Sight(zone, State.GOING, said, node=node, queued=queued)
    if queued.state == "ACTIVE" and node is not None:
        state = _NODE_STATES.get(node.state, State.AWAY)
        return Sight(zone, state, f"{node.state} in {zone}", node=node, queued=queued)
    return Sight(zone, State.WAITING, said, node=node, queued=queued, since=node.created_at if node else None)


# -- what to do


@dataclass(frozen=True)
class Wait:
    """Nothing, until the next look."""

    reason: str


@dataclass(frozen=True)
class Away:
    """Nothing can be said now: the machines are being restarted."""

    reason: str


@dataclass(frozen=True)
class Use:
    """The TPU is up."""

    node: Node


@dataclass(frozen=True)
class Create:
    """Ask for it in this zone."""

    zone: str
    reason: str  # why not in the one before


@dataclass(frozen=True)
class End:
    """There will be no TPU for this attempt, or there is none any more."""

    phase: Phase
    cause: Cause
    reason: str


Step = Wait | Away | Use | Create | End


def next_step(sights: Sequence[Sight], *, now: float, provision_timeout_s: float) -> Step:
    """What follows from *sights*, one for each zone in the order in which they are tried."""
    by_state = {state: [s for s in sights if s.state is state] for state in State}
    for ready in by_state[State.READY]:
        if ready.node is not None:
            return Use(ready.node)
    for away in by_state[State.AWAY]:
        return Away(f"the TPU is {away.said}")
    for gone in by_state[State.PREEMPTED]:
        return End(Phase.FAILED, Cause.PREEMPTED, f"the TPU was preempted ({gone.said})")
    for waiting in by_state[State.WAITING]:
        if waiting.since is not None and now - waiting.since > provision_timeout_s:
            took = f"{now - waiting.since:.0f} s"
            return End(Phase.LOST, Cause.NODE_FAILURE, f"the TPU is still {waiting.said} after {took}")
        return Wait(f"the TPU is {waiting.said}")
    for down in by_state[State.TAKEN_DOWN]:
        return End(Phase.LOST, Cause.NODE_FAILURE, f"somebody has taken the TPU down ({down.said})")
    for going in by_state[State.GOING]:
        return End(Phase.LOST, Cause.NODE_FAILURE, f"somebody deletes the TPU ({going.said})")
    return _after_failures(sights)


def _after_failures(sights: Sequence[Sight]) -> Step:
    """The next zone that has not been asked; none is asked twice."""
    failed = [sight for sight in sights if sight.state is State.FAILED]
    if not failed:
        where = ", ".join(sight.zone for sight in sights)
        return End(Phase.LOST, Cause.NODE_FAILURE, f"the TPU is gone: somebody has deleted it ({where})")
    last = max(number for number, sight in enumerate(sights) if sight.state is State.FAILED)
    said = "; ".join(sight.said for sight in failed)
    for sight in sights[last + 1 :]:
        return Create(sight.zone, said)
    return no_zone_left(failed)


def no_zone_left(failed: Sequence[Sight]) -> End:
    """All zones have been asked in vain: another attempt may have more luck, unless they said no for good."""
    said = "; ".join(sight.said for sight in failed)
    if all(sight.failure is not None and sight.failure.code in _FOR_GOOD for sight in failed):
        return End(Phase.FAILED, Cause.LAUNCH, f"the TPU cannot be made: {said}")
    return End(Phase.LOST, Cause.NODE_FAILURE, f"no TPU could be had: {said}")


def refused(zone: str, code: str, error: str) -> Sight:
    """A zone whose answer to the request itself was no."""
    return Sight(zone, State.FAILED, f"{zone}: {error}", Failure(code, error))


def to_delete(sights: Sequence[Sight], place: Place) -> list[str]:
    """Names of what still has to be deleted, so that nothing of an attempt is left. Others' things are none of it."""
    names = []
    for sight in sights:
        if sight.state in (State.ABSENT, State.GOING):
            continue
        if sight.queued is not None:
            names.append(sight.queued.name)
        elif sight.node is not None and sight.node.id == place.id:
            names.append(sight.node.name)
        elif sight.state is State.WAITING:  # its creation is under way, and it is not listed yet
            names.append(f"projects/{place.project}/locations/{sight.zone}/{place.collection}/{place.id}")
    return names
