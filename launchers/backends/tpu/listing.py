"""Listing of the zones of attempts: two calls for each zone, however many attempts there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orc.launchers.backends.tpu.client import in_zones
from orc.launchers.backends.tpu.lifecycle import Creation, Node, QueuedResource, ZoneStatus, zone_status
from orc.launchers.backends.tpu.request import NODES, QUEUED, TpuLocation, parent

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.client import TpuApi


@dataclass(frozen=True)
class Listing:
    """Resources of the listed zones, by zone and id."""

    project: str
    queued: dict[tuple[str, str], QueuedResource] = field(default_factory=dict)
    nodes: dict[tuple[str, str], Node] = field(default_factory=dict)
    creations: dict[str, Creation] = field(default_factory=dict)  # of what is not listed, by its full name

    def statuses(self, location: TpuLocation) -> list[ZoneStatus]:
        """Return the status of the TPU at *location* in each zone, in their order."""
        return [self._status(location, zone) for zone in location.zones]

    def _status(self, location: TpuLocation, zone: str) -> ZoneStatus:
        creation = self.creations.get(f"{parent(self.project, zone)}/{location.collection}/{location.id}")
        queued = self.queued.get((zone, location.id)) if location.collection == QUEUED else None
        return zone_status(zone, queued, self.nodes.get((zone, location.id)), creation)


def list_resources(api: TpuApi, locations: Iterable[TpuLocation]) -> Listing:
    """Return all resources in the zones of *locations*. Raises `BackendError`, `BackendUnreachable`."""
    wanted = list(locations)
    zones = list(dict.fromkeys(zone for location in wanted for zone in location.zones))
    for_queue = {zone for location in wanted if location.collection == QUEUED for zone in location.zones}
    # The nodes first: a queued resource that is seen as ACTIVE afterwards may lack its node, which is waited for; the
    # other way round a preempted one would look as if it were up.
    nodes = in_zones(zones, api.nodes)
    queued = in_zones([zone for zone in zones if zone in for_queue], api.queued)
    listing = Listing(
        api.options.project,
        {(zone, item.id): item for zone, items in queued.items() for item in items},
        {(zone, item.id): item for zone, items in nodes.items() for item in items},
    )
    _add_creations(api, listing, wanted)
    return listing


def _add_creations(api: TpuApi, listing: Listing, locations: Iterable[TpuLocation]) -> None:
    """Add the create operations of unlisted resources: they may be under way, or have failed."""
    missing = [
        (zone, location)
        for location in locations
        for zone in location.zones
        if location.id and not _is_listed(listing, location, zone)
    ]
    creations = in_zones(list(dict.fromkeys(zone for zone, _ in missing)), api.creations)
    for zone, location in missing:
        name = f"{parent(listing.project, zone)}/{location.collection}/{location.id}"
        creation = creations[zone].get(name)
        if creation is None:
            continue
        listing.creations[name] = creation
        if not creation.done or creation.failure is not None:
            continue
        # It may have been done between the two listings.
        if location.collection == QUEUED and (queued := api.queued_resource(zone, location.id)) is not None:
            listing.queued[zone, location.id] = queued
        elif location.collection == NODES and (node := api.node(zone, location.id)) is not None:
            listing.nodes[zone, location.id] = node


def _is_listed(listing: Listing, location: TpuLocation, zone: str) -> bool:
    return (zone, location.id) in (listing.queued if location.collection == QUEUED else listing.nodes)
