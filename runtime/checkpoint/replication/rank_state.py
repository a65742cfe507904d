"""States of ranks: how far a rank is, what its main thread waits in, and whether it can still come to a save.

A rank is believed to stay away only where it cannot come: it has gone on further than the rank that waits for it, or it
stands in an operation that the waiting rank has not begun. One that computes, sleeps or reads is late, and may come.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orc.runtime.data.position import training_loader
from orc.runtime.observe.whereabouts import WAITING, main_call_site

if TYPE_CHECKING:
    from orc.runtime.core.prepared import Prepared

BLOCKED_S = 2.0  # a rank that stands for so long in an operation of all ranks waits there
IDLE = 0.05  # of the time on a processor: whoever uses more computes


@dataclass(frozen=True)
class RankState:
    """State of one rank, as far as others can conclude from it whether it will come to them.

    Attributes:
        progress: for each Accelerator optimizer steps, the number of the loader that training reads, and the position
            of that loader, which grows.
        collectives: collective operations that the process group of all ranks has begun, by kind of device.
        activity: of the main thread, as in `orc.runtime.observe.whereabouts.CallSite`.
        where: the line of the script.
        processor_s: processor time of the process so far, in seconds.
        at_s: time of the look, in seconds on a clock of that process.
    """

    progress: tuple[tuple[int, int, int], ...]
    collectives: Mapping[str, int]
    activity: str
    where: str
    processor_s: float
    at_s: float

    @classmethod
    def here(cls, prepared: Iterable[Prepared]) -> RankState:
        """Return that of this process; *prepared*: by its Accelerators, in order. Callable from any thread."""
        try:
            place = main_call_site()
            activity, where = place.activity, place.where
        except KeyError:  # the main thread has left Python
            activity, where = "", "its end"
        progress = tuple(_progress(accelerator) for accelerator in prepared)
        return cls(progress, _collectives(), activity, where, time.process_time(), time.monotonic())

    def to_json(self) -> str:
        """Return the state as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        """Inverse of `to_json`."""
        data = json.loads(text)
        return cls(**{**data, "progress": tuple(tuple(row) for row in data["progress"])})


def is_blocked(before: RankState, now: RankState) -> bool:
    """Return whether a rank waits in the same operation in both of its states."""
    same = (before.progress, before.collectives, before.activity, before.where)
    return now.activity in WAITING and same == (now.progress, now.collectives, now.activity, now.where)


def absence_reason(here: RankState, before: RankState | None, now: RankState) -> str | None:
    """Return why a rank will not come to the one that waits at *here*; `None` while it may.

    Args:
        here: of the rank that waits, which does nothing else.
        before: of the other rank, some time ago.
        now: of the other rank.
    """
    if _further(now.progress, here.progress):
        return f"goes on at {now.where}"
    if before is None or not is_blocked(before, now) or now.at_s - before.at_s < BLOCKED_S:
        return None
    if not _begun(now.collectives, here.collectives):
        return None  # what it waits for is nothing of ours
    if now.activity == "backward" and now.processor_s - before.processor_s > IDLE * (now.at_s - before.at_s):
        return None  # the pass itself may take long
    return f"waits in a {now.activity} at {now.where}"


def _progress(prepared: Prepared) -> tuple[int, int, int]:
    loader = training_loader(prepared.dataloaders)
    if loader is None:
        return prepared.steps(), -1, 0
    cursor = loader.cursor
    live = cursor.live
    place = cursor.epoch << 32 if live is None else (live.epoch << 32) + live.done + 1
    return prepared.steps(), prepared.dataloaders.index(loader), place


def _further(theirs: tuple[tuple[int, int, int], ...], ours: tuple[tuple[int, int, int], ...]) -> bool:
    """Return whether *theirs* is ahead of *ours* somewhere and behind nowhere."""
    if len(theirs) != len(ours):
        return False
    steps = [a[0] - b[0] for a, b in zip(theirs, ours, strict=True)]
    places = [a[2] - b[2] for a, b in zip(theirs, ours, strict=True) if a[1] == b[1]]
    return min([*steps, *places], default=0) >= 0 and max([*steps, *places], default=0) > 0


def _begun(theirs: Mapping[str, int], ours: Mapping[str, int]) -> bool:
    """Return whether *theirs* are operations that *ours* have not begun."""
    ahead = [theirs[kind] - ours[kind] for kind in theirs if kind in ours]
    return min(ahead, default=0) >= 0 and max(ahead, default=0) > 0


def _collectives() -> dict[str, int]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    group = distributed.group.WORLD
    counts: dict[str, int] = {}
    for device in getattr(group, "_device_types", ()):
        try:
            counts[device.type] = int(group._get_backend(device)._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):  # this library does not count
            continue
    return counts
