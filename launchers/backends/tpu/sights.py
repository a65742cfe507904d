"""One look at all the zones of some attempts: two listings for each zone, however many attempts there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.backends.tpu.client import in_zones
from orc.launchers.backends.tpu.lifecycle import Creation, Node, Queued, Sight, sight_of
from orc.launchers.backends.tpu.request import NODES, QUEUED, Place, parent

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.client import TpuApi


@dataclass(frozen=True)
class Board:
    """What the API showed, by zone and id."""

    project: str
    queued: dict[tuple[str, str], Queued] = field(default_factory=dict)
    nodes: dict[tuple[str, str], Node] = field(default_factory=dict)
    creations: dict[str, Creation] = field(default_factory=dict)  # of what is not listed, by its full name

    def sights(self, place: Place) -> list[Sight]:
        """What each zone has of the TPU at *place*, in the order of the zones."""
        return [self._sight(place, zone) for zone in place.zones]

    def _sight(self, place: Place, zone: str) -> Sight:
        creation = self.creations.get(f"{parent(self.project, zone)}/{place.collection}/{place.id}")
        queued = self.queued.get((zone, place.id)) if place.collection == QUEUED else None
        return sight_of(zone, queued, self.nodes.get((zone, place.id)), creation)


def look(api: TpuApi, places: Iterable[Place]) -> Board:
    """Everything that the API has in the zones of *places*. Raises `BackendError`, `BackendUnreachable`."""
    wanted = list(places)
    zones = list(dict.fromkeys(zone for place in wanted for zone in place.zones))
    for_queue = {zone for place in wanted if place.collection == QUEUED for zone in place.zones}
    # The nodes first: a queued resource that is seen as ACTIVE afterwards may lack its node, which is waited for; the
    # other way round a preempted one would look as if it were up.
    nodes = in_zones(zones, api.nodes)
    queued = in_zones([zone for zone in zones if zone in for_queue], api.queued)
    board = Board(
        api.options.project,
        {(zone, item.id): item for zone, items in queued.items() for item in items},
        {(zone, item.id): item for zone, items in nodes.items() for item in items},
    )
    _add_creations(api, board, wanted)
    return board


def _add_creations(api: TpuApi, board: Board, places: Iterable[Place]) -> None:
    """Look for the creation of what is not listed: what is under way is not gone, and what failed is not either."""
    missing = [
        (zone, place) for place in places for zone in place.zones if place.id and not _is_listed(board, place, zone)
    ]
    creations = in_zones(list(dict.fromkeys(zone for zone, _ in missing)), api.creations)
    for zone, place in missing:
        name = f"{parent(board.project, zone)}/{place.collection}/{place.id}"
        creation = creations[zone].get(name)
        if creation is None:
            continue
        board.creations[name] = creation
        if not creation.done or creation.failure is not None:
            continue
        # It may have been done between the two listings.
        if place.collection == QUEUED and (queued := api.queued_resource(zone, place.id)) is not None:
            board.queued[zone, place.id] = queued
        elif place.collection == NODES and (node := api.node(zone, place.id)) is not None:
            board.nodes[zone, place.id] = node


def _is_listed(board: Board, place: Place, zone: str) -> bool:
    return (zone, place.id) in (board.queued if place.collection == QUEUED else board.nodes)
