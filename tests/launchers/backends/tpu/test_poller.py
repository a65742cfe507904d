"""How often polls ask the API, and about which zones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orc.launchers.backends.tpu.lifecycle import Creation, Node, QueuedResource
from orc.launchers.backends.tpu.listing import LONGEST_S, Listing, Poller, list_resources
from orc.launchers.backends.tpu.request import QUEUED, TpuLocation

A, B, C = ZONES = ("us-central2-b", "europe-west4-a", "us-east1-d")


class Cloud:
    """An API that counts its looks, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.items: dict[str, QueuedResource] = {}
        self.looks: list[tuple[str, ...]] = []
        self.polling = Poller(self.list_resources, lambda: self.now)

    def put(self, name: str, zone: str, state: str = "WAITING_FOR_RESOURCES") -> None:
        self.items[name] = QueuedResource(f"projects/p/locations/{zone}/queuedResources/{name}", state)

    def list_resources(self, locations: Sequence[TpuLocation]) -> Listing:
        self.looks.append(tuple(dict.fromkeys(zone for location in locations for zone in location.zones)))
        return Listing("p", {(item.zone, item.id): item for item in self.items.values() if item.zone in self.looks[-1]})

    def poll(self, *names: str, zones: dict[str, str] | None = None) -> dict[str, list[str]]:
        locations = {name: TpuLocation("p", ZONES, QUEUED, name) for name in names}
        found = self.polling.statuses(locations, zones or {})
        return {name: [status.state.name for status in statuses] for name, statuses in found.items()}


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


def test_a_tpu_that_was_found_is_looked_for_in_its_own_zone_alone(cloud: Cloud) -> None:
    cloud.put("a", B)
    for _ in range(3):
        cloud.poll("a")
        cloud.now += 60
    assert cloud.looks == [ZONES, (B,), (B,)]


def test_another_process_begins_with_the_zone_that_was_noted(cloud: Cloud) -> None:
    cloud.put("a", B)
    cloud.poll("a", zones={"a": B})
    assert cloud.looks == [(B,)]


def test_a_zone_that_does_not_change_is_asked_less_and_less(cloud: Cloud) -> None:
    cloud.put("a", A)
    for _ in range(170):  # 17 s
        assert cloud.poll("a")["a"][0] == "PROVISIONING"
        cloud.now += 0.1
    assert 5 < len(cloud.looks) < 15
    cloud.now += 1000
    cloud.poll("a")
    before = len(cloud.looks)
    for _ in range(10 * int(LONGEST_S)):
        cloud.now += 1
        cloud.poll("a")
    assert 9 <= len(cloud.looks) - before <= 10


def test_a_change_makes_polls_frequent_again(cloud: Cloud) -> None:
    cloud.put("a", A)
    cloud.poll("a")
    cloud.now += 1000
    cloud.poll("a")
    cloud.put("a", A, "PROVISIONING")
    cloud.now += LONGEST_S
    cloud.poll("a")
    before = len(cloud.looks)
    for _ in range(3):
        cloud.now += 1.1
        cloud.poll("a")
    assert len(cloud.looks) - before == 3


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "DELETING", None])
def test_what_ends_an_attempt_or_moves_it_on_is_never_taken_from_memory(cloud: Cloud, state: str | None) -> None:
    cloud.put("a", A)
    cloud.poll("a")
    if state is None:
        del cloud.items["a"]
    else:
        cloud.put("a", A, state)
    cloud.now += LONGEST_S
    cloud.looks.clear()
    cloud.poll("a")
    assert cloud.looks == [(A,), ZONES]  # everywhere, before anything is concluded
    cloud.poll("a")
    assert cloud.looks[2:] == [ZONES]


def test_one_listing_serves_all_attempts_of_a_zone(cloud: Cloud) -> None:
    cloud.put("a", A)
    cloud.poll("a")
    cloud.now += 500
    cloud.put("b", A)
    cloud.poll("a", "b")
    cloud.now += 2
    cloud.looks.clear()
    cloud.poll("a", "b")
    assert cloud.looks == [(A,)]
    assert cloud.poll("a", "b") == {"a": ["PROVISIONING"], "b": ["PROVISIONING"]}
    assert cloud.looks == [(A,)]


def test_a_tpu_whose_workers_are_silent_is_looked_at_again_at_once(cloud: Cloud) -> None:
    cloud.put("a", A)
    cloud.poll("a")
    cloud.polling.invalidate("a")
    cloud.poll("a", zones={"a": A})
    assert cloud.looks == [ZONES, (A,)]


class Listed:
    """An API whose node comes up between two of its answers."""

    class options:
        project = "p"

    def __init__(self, name: str) -> None:
        self._name = name

    def nodes(self, zone: str) -> list[Node]:
        return []

    def queued(self, zone: str) -> list[QueuedResource]:
        return []

    def creations(self, zone: str) -> dict[str, Creation]:
        return {self._name: Creation(True, 5.0)}

    def node(self, zone: str, name: str) -> Node | None:
        return Node(self._name, "READY")

    def queued_resource(self, zone: str, name: str) -> QueuedResource | None:
        return QueuedResource(self._name, "ACCEPTED")


@pytest.mark.parametrize(("collection", "state"), [("nodes", "READY"), ("queuedResources", "PROVISIONING")])
def test_a_creation_that_ends_between_two_listings_loses_nothing(collection: str, state: str) -> None:
    location = TpuLocation("p", (A,), collection, "a")
    listing = list_resources(Listed(f"projects/p/locations/{A}/{collection}/a"), [location])  # type: ignore[arg-type]
    assert [status.state.name for status in listing.statuses(location)] == [state]
