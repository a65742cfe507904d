"""Listing of the zones of attempts: two calls for each zone, whatever the number of attempts; none while it is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        if not creation.done or creation.code:
            continue
        # It may have been done between the two listings.
        if location.collection == QUEUED and (queued := api.queued_resource(zone, location.id)) is not None:
            listing.queued[zone, location.id] = queued
        elif location.collection == NODES and (node := api.node(zone, location.id)) is not None:
            listing.nodes[zone, location.id] = node


def _is_listed(listing: Listing, location: TpuLocation, zone: str) -> bool:
    return (zone, location.id) in (listing.queued if location.collection == QUEUED else listing.nodes)


SHORTEST_S, LONGEST_S = 1.0, 30.0  # between two looks at a zone
_SHARE = 0.2  # of the time that a zone has not changed: a change is seen at most that much too late


@dataclass(frozen=True)
class _Cached:
    status: ZoneStatus  # alive
    at: float
    since: float  # it has been the same

    def is_fresh(self, now: float) -> bool:
        return now - self.at < min(LONGEST_S, max(SHORTEST_S, _SHARE * (self.at - self.since)))


class Poller:
    """Cache between polls. Only a TPU that exists or comes is cached; all else is listed anew."""

    def __init__(
        self, list_resources: Callable[[Sequence[TpuLocation]], Listing], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._list = list_resources
        self._clock = clock
        self._seen: dict[str, _Cached] = {}

    def statuses(
        self, locations: Mapping[str, TpuLocation], zones: Mapping[str, str], *, anew: bool = False
    ) -> dict[str, list[ZoneStatus]]:
        """Return the statuses of each location by its key, *anew*: none of what was seen before.

        *zones* are those in which the attempts were last seen, or asked for.
        """
        now = self._clock()
        stale = {key for key in locations if anew or (seen := self._seen.get(key)) is None or not seen.is_fresh(now)}
        # One listing serves all attempts of a zone.
        own = {key: seen.status.zone if (seen := self._seen.get(key)) else zones.get(key, "") for key in locations}
        asked = {own[key] for key in stale}
        due = {key: location for key, location in locations.items() if key in stale or own[key] in asked}
        narrow = {
            key: replace(location, zones=(own[key],)) for key, location in due.items() if own[key] in location.zones
        }
        found = {key: [self._seen[key].status] for key in locations if key not in due}
        if narrow:
            listing = self._list(list(narrow.values()))
            found |= {key: listing.statuses(location) for key, location in narrow.items()}
        if rest := {key: p for key, p in due.items() if key not in found or not any(s.alive for s in found[key])}:
            listing = self._list(list(rest.values()))
            found |= {key: listing.statuses(location) for key, location in rest.items()}
        for key in due:
            self._store(key, found[key], now)
        return found

    def invalidate(self, key: str) -> None:
        """List it anew with the next poll, whatever was seen."""
        self._seen.pop(key, None)

    def _store(self, key: str, statuses: Sequence[ZoneStatus], now: float) -> None:
        before = self._seen.pop(key, None)
        if (status := next((s for s in statuses if s.alive), None)) is not None:
            same = before is not None and before.status == status
            self._seen[key] = _Cached(status, now, before.since if before is not None and same else now)
