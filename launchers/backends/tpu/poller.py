"""Polls of an attempt's own zone, the rarer the longer nothing changes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.lifecycle import ZoneStatus
    from orc.launchers.backends.tpu.listing import Listing
    from orc.launchers.backends.tpu.request import TpuLocation

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
