"""What follows from what the API shows: tables of states."""

from __future__ import annotations

import pytest

from orc.launchers.backends.base import Cause, Phase
from orc.launchers.backends.tpu.lifecycle import (
    Away,
    Create,
    Creation,
    End,
    Failure,
    Node,
    Queued,
    Sight,
    State,
    Step,
    Use,
    Wait,
    next_step,
    no_zone_left,
    refused,
    sight_of,
    to_delete,
)
from orc.launchers.backends.tpu.request import NODES, QUEUED, Place

A, B, C = "us-central2-b", "europe-west4-a", "us-east1-d"
ID = "orc-digits-k3f9a2-a1"
PLACE = Place("p", (A, B, C), QUEUED, ID)


def queued(state: str, zone: str = A, **fields: object) -> Queued:
    return Queued(f"projects/p/locations/{zone}/queuedResources/{ID}", state, **fields)  # type: ignore[arg-type]


def node(state: str, zone: str = A, **fields: object) -> Node:
    return Node(f"projects/p/locations/{zone}/nodes/{ID}", state, **fields)  # type: ignore[arg-type]


def absent(zone: str) -> Sight:
    return Sight(zone, State.ABSENT)


def step(*sights: Sight, now: float = 1000.0) -> Step:
    return next_step(sights, now=now, provision_timeout_s=600.0)


@pytest.mark.parametrize(
    ("request_state", "node_state", "expected"),
    [
        ("CREATING", None, State.WAITING),
        ("ACCEPTED", None, State.WAITING),
        ("WAITING_FOR_RESOURCES", None, State.WAITING),
        ("PROVISIONING", None, State.WAITING),
        ("PROVISIONING", "CREATING", State.WAITING),
        ("PROVISIONING", "READY", State.WAITING),
        ("ACTIVE", None, State.WAITING),
        ("ACTIVE", "READY", State.READY),
        ("ACTIVE", "RESTARTING", State.AWAY),
        ("ACTIVE", "REPAIRING", State.AWAY),
        ("ACTIVE", "REIMAGING", State.AWAY),
        ("ACTIVE", "PREEMPTED", State.PREEMPTED),
        ("ACTIVE", "DELETING", State.GOING),
        ("SUSPENDING", "PREEMPTED", State.PREEMPTED),
        ("SUSPENDING", "READY", State.PREEMPTED),
        ("SUSPENDED", None, State.PREEMPTED),
        ("FAILED", None, State.FAILED),
        ("DELETING", "READY", State.GOING),
        ("A_STATE_OF_NEXT_YEAR", None, State.WAITING),
        (None, "CREATING", State.WAITING),
        (None, "READY", State.READY),
        (None, "PREEMPTED", State.PREEMPTED),
        (None, "TERMINATED", State.PREEMPTED),
        (None, "STOPPED", State.TAKEN_DOWN),
        (None, "STARTING", State.AWAY),
        (None, "DELETING", State.GOING),
        (None, "A_STATE_OF_NEXT_YEAR", State.AWAY),
        (None, None, State.ABSENT),
    ],
)
def test_what_a_zone_has(request_state: str | None, node_state: str | None, expected: State) -> None:
    asked = queued(request_state) if request_state else None
    assert sight_of(A, asked, node(node_state) if node_state else None).state is expected


def test_a_tpu_that_somebody_has_deleted_was_not_preempted() -> None:
    found = step(sight_of(A, queued("SUSPENDED", by_user=True), None))
    assert found == End(Phase.LOST, Cause.NODE_FAILURE, "somebody has taken the TPU down (SUSPENDED in us-central2-b)")


def test_waiting_says_in_which_state() -> None:
    assert step(sight_of(A, queued("WAITING_FOR_RESOURCES"), None), absent(B)) == Wait(
        "the TPU is WAITING_FOR_RESOURCES in us-central2-b"
    )


def test_a_tpu_that_is_up_is_used_whatever_other_zones_say() -> None:
    ready = node("READY", B)
    failed = sight_of(A, queued("FAILED", code="RESOURCE_EXHAUSTED"), None)
    assert step(failed, sight_of(B, queued("ACTIVE", B), ready), absent(C)) == Use(ready)


def test_a_preempted_tpu_ends_the_attempt_so_that_another_follows() -> None:
    found = step(sight_of(A, queued("SUSPENDING"), node("PREEMPTED")))
    assert isinstance(found, End)
    assert (found.phase, found.cause) == (Phase.FAILED, Cause.PREEMPTED)


def test_a_tpu_that_is_being_repaired_says_nothing() -> None:
    assert step(sight_of(A, queued("ACTIVE"), node("REPAIRING"))) == Away("the TPU is REPAIRING in us-central2-b")


def test_the_next_zone_follows_the_last_one_that_failed() -> None:
    out = sight_of(A, queued("FAILED", code="RESOURCE_EXHAUSTED", error="no capacity"), None)
    assert step(out, absent(B), absent(C)) == Create(B, "us-central2-b: no capacity")
    also_out = sight_of(B, queued("FAILED", B, code="DEADLINE_EXCEEDED", error="expired"), None)
    assert step(out, also_out, absent(C)) == Create(C, "us-central2-b: no capacity; europe-west4-a: expired")
    # The request for the first zone was refused at once, and left nothing behind.
    assert step(absent(A), also_out, absent(C)) == Create(C, "europe-west4-a: expired")


def test_when_all_zones_are_out_another_attempt_may_have_more_luck() -> None:
    found = step(sight_of(A, queued("FAILED", code="RESOURCE_EXHAUSTED", error="no capacity"), None))
    assert isinstance(found, End)
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
    assert no_zone_left([refused(A, code, "no") for code in codes]).cause is cause


def test_a_creation_that_hangs_is_given_up() -> None:
    hanging = sight_of(A, queued("PROVISIONING"), node("CREATING", created_at=100.0))
    assert step(hanging, now=700.0) == Wait("the TPU is PROVISIONING in us-central2-b")
    found = step(hanging, now=701.0)
    assert isinstance(found, End)
    assert (found.cause, found.reason) == (
        Cause.NODE_FAILURE,
        "the TPU is still PROVISIONING in us-central2-b after 601 s",
    )


def test_waiting_for_capacity_has_no_end_of_its_own() -> None:
    assert isinstance(step(sight_of(A, queued("WAITING_FOR_RESOURCES", created_at=0.0), None), now=1e9), Wait)


@pytest.mark.parametrize("sight", [absent(A), sight_of(A, queued("DELETING"), None)])
def test_a_tpu_that_is_gone_ends_the_attempt(sight: Sight) -> None:
    found = step(sight)
    assert isinstance(found, End)
    assert (found.phase, found.cause) == (Phase.LOST, Cause.NODE_FAILURE)


def test_a_node_that_could_not_be_made_is_known_by_its_operation() -> None:
    failure = Failure("RESOURCE_EXHAUSTED", "no more capacity")
    found = sight_of(A, None, None, Creation(True, 5.0, failure))
    assert (found.state, found.said) == (State.FAILED, "us-central2-b: no more capacity")
    assert step(found, absent(B)) == Create(B, "us-central2-b: no more capacity")


def test_a_creation_under_way_is_waited_for_and_not_for_ever() -> None:
    found = sight_of(A, None, None, Creation(False, 100.0))
    assert step(found, absent(B), now=700.0) == Wait("the TPU is CREATING in us-central2-b")
    assert isinstance(step(found, absent(B), now=701.0), End)
    assert to_delete([found, absent(B)], Place("p", (A, B), NODES, ID)) == [node("").name]


def test_a_creation_that_is_done_says_nothing_of_a_tpu_that_is_not_there() -> None:
    assert sight_of(A, None, None, Creation(True, 100.0)).state is State.ABSENT


def test_everything_of_an_attempt_is_deleted_and_nothing_twice() -> None:
    sights = [
        sight_of(A, queued("FAILED"), None),
        sight_of(B, queued("DELETING", B), None),
        sight_of(C, queued("ACTIVE", C), node("READY", C)),
    ]
    assert to_delete(sights, PLACE) == [queued("", A).name, queued("", C).name]
    alone = Place("p", (A,), NODES, ID)
    assert to_delete([sight_of(A, None, node("PREEMPTED"))], alone) == [node("").name]
    assert to_delete([sight_of(A, None, node("DELETING"))], alone) == []


def test_a_place_survives_as_text() -> None:
    assert Place.parse(str(PLACE)) == PLACE
    with pytest.raises(ValueError, match="not a place"):
        Place.parse("projects/p/locations/z/disks/d")
