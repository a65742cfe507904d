"""Which TPUs nobody needs: pure, from what the API shows and what the ledger knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orc.launchers.backends.tpu import TpuBackend
from orc.launchers.backends.tpu.lifecycle import Node, QueuedResource
from orc.launchers.backends.tpu.listing import Listing
from orc.launchers.backends.tpu.provision import idle_for_too_long, leftovers
from orc.launchers.errors import LaunchError
from orc.launchers.spec.clusters import Cluster

ZONE = "us-central2-b"
LIVE, OVER, FOREIGN = "orc-live-a1", "orc-over-a1", "orc-foreign-a1"


def queued(marker: str, state: str = "ACTIVE", **labels: str) -> QueuedResource:
    own = {"orc-marker": marker, "orc-on-finish": "delete", **_dashed(labels)}
    return QueuedResource(f"projects/p/locations/{ZONE}/queuedResources/{marker}", state, labels=own, created_at=5.0)


def node(marker: str, state: str = "READY", *, alone: bool = False, **labels: str) -> Node:
    own = {"orc-marker": marker, "orc-on-finish": "delete", **_dashed(labels)}
    owner = "" if alone else f"projects/p/locations/{ZONE}/queuedResources/{marker}"
    return Node(f"projects/p/locations/{ZONE}/nodes/{marker}", state, labels=own, queued=owner)


def _dashed(labels: dict[str, str]) -> dict[str, str]:
    return {key.replace("_", "-"): value for key, value in labels.items()}


def listing(*items: QueuedResource | Node) -> Listing:
    return Listing(
        "p",
        {(i.zone, i.id): i for i in items if isinstance(i, QueuedResource)},
        {(i.zone, i.id): i for i in items if isinstance(i, Node)},
    )


def found(*items: QueuedResource | Node, now: float = 1000.0) -> list[tuple[str, str, str]]:
    left = leftovers(listing(*items), {LIVE}, {OVER}, now=now)
    return [(one.native_id.split("/")[4], one.marker, one.why) for one in left]


def test_what_a_live_job_needs_is_no_leftover() -> None:
    assert found(queued(LIVE), node(LIVE)) == []


def test_what_is_left_of_a_job_is_found_once_by_its_queued_resource() -> None:
    assert found(queued(OVER), node(OVER)) == [("queuedResources", OVER, "over")]
    assert found(queued(OVER, "FAILED")) == [("queuedResources", OVER, "over")]
    assert found(node(OVER, alone=True)) == [("nodes", OVER, "over")]
    assert found(node(OVER)) == [("nodes", OVER, "over")]  # its queued resource is gone already


def test_what_is_being_deleted_is_no_leftover() -> None:
    assert found(queued(OVER, "DELETING"), node(OVER)) == []
    assert found(node(OVER, "DELETING", alone=True)) == []


def test_what_this_ledger_does_not_know_is_told_apart() -> None:
    assert found(queued(FOREIGN), queued(OVER)) == [
        ("queuedResources", OVER, "over"),
        ("queuedResources", FOREIGN, "unknown"),
    ]


def test_what_is_not_ours_is_not_even_looked_at() -> None:
    theirs = QueuedResource(f"projects/p/locations/{ZONE}/queuedResources/{OVER}", "ACTIVE", labels={"team": "x"})
    plain = Node(f"projects/p/locations/{ZONE}/nodes/{OVER}", "READY")
    assert found(theirs) == found(plain) == []


def test_what_was_kept_is_told_apart_until_its_time_is_over() -> None:
    local = {"orc_on_finish": "keep"}
    assert found(queued(OVER, **local), node(OVER, **local)) == [("queuedResources", OVER, "kept")]
    idle = {"orc_on_finish": "idle", "orc_idle_timeout": "600", "orc_idle_since": "500"}
    items = (queued(OVER, orc_on_finish="idle", orc_idle_timeout="600"), node(OVER, **idle))
    assert found(*items, now=1000) == [("queuedResources", OVER, "kept")]
    assert found(*items, now=1101) == [("queuedResources", OVER, "idle")]
    assert idle_for_too_long(listing(*items), now=1000) == []
    assert idle_for_too_long(listing(*items), now=1101) == [items[0].name]


def test_a_kept_pod_that_was_preempted_is_worth_nothing() -> None:
    local = {"orc_on_finish": "keep"}
    assert found(queued(OVER, "SUSPENDED", **local), node(OVER, "PREEMPTED", **local)) == [
        ("queuedResources", OVER, "over")
    ]


def test_there_is_no_store_to_collect_where_every_attempt_has_machines_of_its_own(
    cluster: Callable[..., Cluster],
) -> None:
    with pytest.raises(LaunchError, match="nothing of a job stays there"):
        TpuBackend(cluster()).stores()
