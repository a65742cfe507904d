"""What follows from what the API shows: tables of states."""

from __future__ import annotations

import pytest

from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.tpu.lifecycle import (
    Create,
    Creation,
    Node,
    Pending,
    QueuedResource,
    State,
    Step,
    ZoneStatus,
    next_step,
    no_zone_left,
    to_delete,
    zone_rejected,
    zone_status,
)
from orc.launchers.backends.tpu.request import NODES, QUEUED, TpuLocation

A, B, C = "us-central2-b", "europe-west4-a", "us-east1-d"
ID = "orc-digits-k3f9a2-a1"
PLACE = TpuLocation("p", (A, B, C), QUEUED, ID)


def queued(state: str, zone: str = A, **fields: object) -> QueuedResource:
    return QueuedResource(f"projects/p/locations/{zone}/queuedResources/{ID}", state, **fields)  # type: ignore[arg-type]


def node(state: str, zone: str = A, **fields: object) -> Node:
    return Node(f"projects/p/locations/{zone}/nodes/{ID}", state, **fields)  # type: ignore[arg-type]


def absent(zone: str) -> ZoneStatus:
    return ZoneStatus(zone, State.NOT_FOUND)


def step(*statuses: ZoneStatus, now: float = 1000.0) -> Step:
    return next_step(statuses, now=now, provision_timeout_s=600.0)


@pytest.mark.parametrize(
    ("request_state", "node_state", "expected"),
    [
        ("CREATING", None, State.PROVISIONING),
        ("ACCEPTED", None, State.PROVISIONING),
        ("WAITING_FOR_RESOURCES", None, State.PROVISIONING),
        ("PROVISIONING", None, State.PROVISIONING),
        ("PROVISIONING", "CREATING", State.PROVISIONING),
        ("PROVISIONING", "READY", State.PROVISIONING),
        ("ACTIVE", None, State.PROVISIONING),
        ("ACTIVE", "READY", State.READY),
        ("ACTIVE", "RESTARTING", State.RESTARTING),
        ("ACTIVE", "REPAIRING", State.RESTARTING),
        ("ACTIVE", "REIMAGING", State.RESTARTING),
        ("ACTIVE", "PREEMPTED", State.PREEMPTED),
        ("ACTIVE", "DELETING", State.DELETING),
        ("SUSPENDING", "PREEMPTED", State.PREEMPTED),
        ("SUSPENDING", "READY", State.PREEMPTED),
        ("SUSPENDED", None, State.PREEMPTED),
        ("FAILED", None, State.FAILED),
        ("DELETING", "READY", State.DELETING),
        ("A_STATE_OF_NEXT_YEAR", None, State.PROVISIONING),
        (None, "CREATING", State.PROVISIONING),
        (None, "READY", State.READY),
        (None, "PREEMPTED", State.PREEMPTED),
        (None, "TERMINATED", State.PREEMPTED),
        (None, "STOPPED", State.STOPPED),
        (None, "STARTING", State.RESTARTING),
        (None, "DELETING", State.DELETING),
        (None, "A_STATE_OF_NEXT_YEAR", State.RESTARTING),
        (None, None, State.NOT_FOUND),
    ],
)
def test_what_a_zone_has(request_state: str | None, node_state: str | None, expected: State) -> None:
    asked = queued(request_state) if request_state else None
    assert zone_status(A, asked, node(node_state) if node_state else None).state is expected


def test_a_tpu_that_somebody_has_deleted_was_not_preempted() -> None:
    found = step(zone_status(A, queued("SUSPENDED", by_user=True), None))
    assert found == Observation(
        Phase.LOST, Cause.NODE_FAILURE, "the TPU was stopped outside of orc (SUSPENDED in us-central2-b)"
    )


def test_waiting_says_in_which_state() -> None:
    assert step(zone_status(A, queued("WAITING_FOR_RESOURCES"), None), absent(B)) == Pending(
        "the TPU is WAITING_FOR_RESOURCES in us-central2-b"
    )


def test_a_tpu_that_is_up_is_used_whatever_other_zones_say() -> None:
    ready = node("READY", B)
    failed = zone_status(A, queued("FAILED", code="RESOURCE_EXHAUSTED"), None)
    assert step(failed, zone_status(B, queued("ACTIVE", B), ready), absent(C)) == ready


def test_a_preempted_tpu_ends_the_attempt_so_that_another_follows() -> None:
    found = step(zone_status(A, queued("SUSPENDING"), node("PREEMPTED")))
    assert isinstance(found, Observation)
    assert (found.phase, found.cause) == (Phase.FAILED, Cause.PREEMPTED)


def test_a_tpu_that_is_being_repaired_says_nothing() -> None:
    assert step(zone_status(A, queued("ACTIVE"), node("REPAIRING"))) == Pending(
        "the TPU is REPAIRING in us-central2-b", restarting=True
    )


def test_the_next_zone_follows_the_last_one_that_failed() -> None:
    out = zone_status(A, queued("FAILED", code="RESOURCE_EXHAUSTED", error="no capacity"), None)
    assert step(out, absent(B), absent(C)) == Create(B, "us-central2-b: no capacity")
    also_out = zone_status(B, queued("FAILED", B, code="DEADLINE_EXCEEDED", error="expired"), None)
    assert step(out, also_out, absent(C)) == Create(C, "us-central2-b: no capacity; europe-west4-a: expired")
    # The request for the first zone was refused at once, and left nothing behind.
    assert step(absent(A), also_out, absent(C)) == Create(C, "europe-west4-a: expired")


def test_when_all_zones_are_out_another_attempt_may_have_more_luck() -> None:
    found = step(zone_status(A, queued("FAILED", code="RESOURCE_EXHAUSTED", error="no capacity"), None))
    assert isinstance(found, Observation)
    assert (found.phase, found.cause) == (Phase.LOST, Cause.NODE_FAILURE)
    assert found.reason == "no TPU could be had: us-central2-b: no capacity"


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        (["INVALID_ARGUMENT"], Cause.LAUNCH),
        (["PERMISSION_DENIED", "INVALID_ARGUMENT"], Cause.LAUNCH),
        (["PERMISSION_DENIED", "RESOURCE_EXHAUSTED"], Cause.NODE_FAILURE),
        (["INTERNAL"], Cause.NODE_FAILURE),
        ([""], Cause.NODE_FAILURE),
    ],
)
def test_what_no_zone_will_ever_take_is_not_tried_again(codes: list[str], cause: Cause) -> None:
    assert no_zone_left([zone_rejected(A, code, "no") for code in codes]).cause is cause


def test_a_creation_that_hangs_is_given_up() -> None:
    hanging = zone_status(A, queued("PROVISIONING"), node("CREATING", created_at=100.0))
    assert step(hanging, now=700.0) == Pending("the TPU is PROVISIONING in us-central2-b")
    found = step(hanging, now=701.0)
    assert isinstance(found, Observation)
    assert (found.cause, found.reason) == (
        Cause.NODE_FAILURE,
        "the TPU is still PROVISIONING in us-central2-b after 601 s",
    )


def test_waiting_for_capacity_has_no_end_of_its_own() -> None:
    assert isinstance(step(zone_status(A, queued("WAITING_FOR_RESOURCES", created_at=0.0), None), now=1e9), Pending)


@pytest.mark.parametrize("status", [absent(A), zone_status(A, queued("DELETING"), None)])
def test_a_tpu_that_is_gone_ends_the_attempt(status: ZoneStatus) -> None:
    found = step(status)
    assert isinstance(found, Observation)
    assert (found.phase, found.cause) == (Phase.LOST, Cause.NODE_FAILURE)


def test_a_node_that_could_not_be_made_is_known_by_its_operation() -> None:
    found = zone_status(A, None, None, Creation(True, 5.0, "RESOURCE_EXHAUSTED", "no more capacity"))
    assert (found.state, found.message) == (State.FAILED, "us-central2-b: no more capacity")
    assert step(found, absent(B)) == Create(B, "us-central2-b: no more capacity")


def test_a_creation_under_way_is_waited_for_and_not_for_ever() -> None:
    found = zone_status(A, None, None, Creation(False, 100.0))
    assert step(found, absent(B), now=700.0) == Pending("the TPU is CREATING in us-central2-b")
    assert isinstance(step(found, absent(B), now=701.0), Observation)
    assert to_delete([found, absent(B)], TpuLocation("p", (A, B), NODES, ID)) == [node("").name]


def test_a_creation_that_is_done_says_nothing_of_a_tpu_that_is_not_there() -> None:
    assert zone_status(A, None, None, Creation(True, 100.0)).state is State.NOT_FOUND


def test_everything_of_an_attempt_is_deleted_and_nothing_twice() -> None:
    statuses = [
        zone_status(A, queued("FAILED"), None),
        zone_status(B, queued("DELETING", B), None),
        zone_status(C, queued("ACTIVE", C), node("READY", C)),
    ]
    assert to_delete(statuses, PLACE) == [queued("", A).name, queued("", C).name]
    alone = TpuLocation("p", (A,), NODES, ID)
    assert to_delete([zone_status(A, None, node("PREEMPTED"))], alone) == [node("").name]
    assert to_delete([zone_status(A, None, node("DELETING"))], alone) == []


def test_a_place_survives_as_text() -> None:
    assert TpuLocation.parse(str(PLACE)) == PLACE
    with pytest.raises(ValueError, match="not a place"):
        TpuLocation.parse("projects/p/locations/z/disks/d")
