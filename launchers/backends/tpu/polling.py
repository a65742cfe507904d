"""Sights of attempts for polls: of an attempt's own zone, and the less often the longer nothing changes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.launchers.backends.tpu.lifecycle import Sight
    from orc.launchers.backends.tpu.request import Place
    from orc.launchers.backends.tpu.sights import Board

SHORTEST_S, LONGEST_S = 1.0, 30.0  # between two looks at a zone
_SHARE = 0.2  # of the time that a zone has not changed: a change is seen at most that much too late


@dataclass(frozen=True)
class _Seen:
    sight: Sight  # alive
    at: float
    since: float  # it has been the same

    def is_fresh(self, now: float) -> bool:
        return now - self.at < min(LONGEST_S, max(SHORTEST_S, _SHARE * (self.at - self.since)))


class Polling:
    """The memory of polls. Only a TPU that is there or comes may be remembered; any other answer is asked for anew."""

    def __init__(self, look: Callable[[Sequence[Place]], Board], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def sights(self, places: Mapping[str, Place], zones: Mapping[str, str]) -> dict[str, list[Sight]]:
        """The sights of each place by its key; *zones* are those in which the attempts were last seen."""
        now = self._clock()
        stale = {key for key in places if (seen := self._seen.get(key)) is None or not seen.is_fresh(now)}
        # One listing serves all attempts of a zone.
        own = {key: seen.sight.zone if (seen := self._seen.get(key)) else zones.get(key, "") for key in places}
        asked = {own[key] for key in stale}
        due = {key: place for key, place in places.items() if key in stale or own[key] in asked}
        narrow = {key: replace(place, zones=(own[key],)) for key, place in due.items() if own[key] in place.zones}
        found = {key: [seen.sight] for key, seen in self._seen.items() if key in places and key not in due}
        if narrow:
            board = self._look(list(narrow.values()))
            found |= {key: board.sights(place) for key, place in narrow.items()}
        if rest := {key: p for key, p in due.items() if key not in found or not any(s.alive for s in found[key])}:
            board = self._look(list(rest.values()))
            found |= {key: board.sights(place) for key, place in rest.items()}
        for key in due:
            self._remember(key, found[key], now)
        return found

    def forget(self, key: str) -> None:
        """Ask about it with the next poll, whatever was seen."""
        self._seen.pop(key, None)

    def _remember(self, key: str, sights: Sequence[Sight], now: float) -> None:
        before = self._seen.pop(key, None)
        if (sight := next((s for s in sights if s.alive), None)) is not None:
            same = before is not None and before.sight == sight
            self._seen[key] = _Seen(sight, now, before.since if before is not None and same else now)
