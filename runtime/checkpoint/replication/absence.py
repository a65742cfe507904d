"""Absence: how a rank that waits in a save finds out that others will not come.

``if accelerator.is_main_process: accelerator.save_state()`` leaves the others training, until they wait for the main
process in their next collective. A thread of every rank looks about once a second whether somebody on the store asks
for its state, and answers. Nobody asks where all ranks come within half a second.

A rank is believed to stay away only where it cannot come: it has gone on further than the rank that waits for it, or it
stands in an operation that the waiting rank has not begun. One that computes, sleeps or reads is late, and may come.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from orc.runtime.checkpoint.errors import RanksElsewhere
from orc.runtime.core.store import StoreError, StoreTimeout, next_name, pace
from orc.runtime.data.position import training_loader
from orc.runtime.observe.whereabouts import WAITING, main_call_site

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.core.store import Store

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


POLL_S = 1.0
GRACE_S = 0.5  # ranks come one after the other
LOOK_S = 0.1  # between looks at answers, on rank 0, where the store is
PATIENCE_S = 5.0  # before the others ask what rank 0 does
ANSWER_S = 5.0


class Responder:
    """The thread of a rank that answers for it. Made by `of`."""

    def __init__(self, context: RunContext, store: Store) -> None:
        self.prefix = f"orc/{next_name(context, 'state')}"
        self.ranks = context.world_size
        # Not kept alive: a training that is over leaves its models to the garbage collector.
        self._prepared: list[weakref.ref[Prepared]] = []
        self._rank = context.rank
        self._context = weakref.ref(context)
        self._store = store.clone(ANSWER_S)
        self._poll_s = POLL_S * pace(context.world_size)
        self._pid = os.getpid()
        self._answered = 0
        self._closing = threading.Event()
        atexit.register(self._leave)
        threading.Thread(target=self._run, name="orc-state", daemon=True).start()

    @classmethod
    def of(cls, context: RunContext, prepared: Prepared | None = None) -> Responder | None:
        """The one of *context*, answering for *prepared* too; `None` where ranks are not processes with a store."""
        if context.world_size == 1:
            return None
        if context not in _known:
            if prepared is None or context.store is None or context.mirrored or not context.key:
                return None
            _known[context] = cls(context, context.store)
        responder = _known[context]
        if prepared is not None and not any(prepared is known for known in responder.prepared()):
            responder._prepared.append(weakref.ref(prepared))
        return responder

    def prepared(self) -> list[Prepared]:
        """Return what the Accelerators that are still there have prepared, in order."""
        return [held for reference in self._prepared if (held := reference()) is not None]

    def state(self) -> RankState:
        """Return that of this rank, now."""
        return RankState.here(self.prepared())

    def _run(self) -> None:
        while not self._closing.wait(self._poll_s) and self._context() is not None:
            try:
                self._answer()
            except StoreTimeout:
                continue  # rank 0 is busy
            except StoreError:
                return  # it is gone

    def _answer(self) -> None:
        while self._store.check([asked := f"{self.prefix}/{self._rank}/{self._answered}"]):
            self._store.set(f"{asked}/answer", self.state().to_json())
            self._store.delete_key(asked)
            self._answered += 1

    def _leave(self) -> None:
        if os.getpid() != self._pid:
            return
        self._closing.set()
        with contextlib.suppress(StoreError):  # rank 0 has ended, and with it the store
            self._store.set(f"{self.prefix}/{self._rank}/ended", "")


class Absence:
    """Waits for ranks, as long as they may come; of one save, on one rank."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._asked: dict[int, str] = {}  # where each rank is going to answer
        self._before: dict[int, RankState] = {}  # how each was first found where it still is
        self._reasons: dict[int, str] = {}  # by the last answer of each
        self._next = 0.0

    @classmethod
    def of(cls, context: RunContext) -> Absence | None:
        """Return the instance for a save of *context*; `None` where no rank could answer."""
        responder = Responder.of(context)
        return None if responder is None else cls(responder)

    def wait_for_ranks(self, store: Store, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when the *keys*, one by each rank, are there.

        Raises:
            StoreTimeout: some are not after *timeout*.
            RanksElsewhere: nobody who is missing will come.
        """
        end = time.monotonic() + timeout.total_seconds()
        slice_s = GRACE_S
        while True:
            left = end - time.monotonic()
            try:
                store.wait(keys, timedelta(seconds=max(min(left, slice_s), 0.001)))
                return
            except StoreTimeout:
                if left <= slice_s:
                    raise
            slice_s = LOOK_S * pace(self._responder.ranks)
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            reasons = self.reasons(store, missing)
            if reasons and not any(store.check([keys[rank]]) for rank in missing):
                raise RanksElsewhere(reasons)

    def wait_for_verdict(self, store: Store, key: str, note: str, timeout: timedelta) -> None:
        """Return when rank 0 has written *key*. Where it has left a *note* of a save of its own, it may not come.

        Raises:
            StoreTimeout: it has not after *timeout*.
            RanksElsewhere: it will not.
        """
        end = time.monotonic() + timeout.total_seconds()
        slice_s = PATIENCE_S
        while True:
            left = end - time.monotonic()
            try:
                store.wait([key], timedelta(seconds=max(min(left, slice_s), 0.001)))
                return
            except StoreTimeout:
                if left <= slice_s:
                    raise
            slice_s = POLL_S * pace(self._responder.ranks)
            if store.check([note]) and (reasons := self.reasons(store, [0])) and not store.check([key]):
                raise RanksElsewhere(reasons)

    def reasons(self, store: Store, missing: Sequence[int]) -> dict[int, str]:
        """Return why each of the *missing* ranks will not come; empty while one of them may."""
        prefix = self._responder.prefix
        now = time.monotonic()
        if now >= self._next:
            for rank in missing:
                if rank not in self._asked:
                    number = store.add(f"{prefix}/{rank}/count", 1) - 1
                    self._asked[rank] = f"{prefix}/{rank}/{number}"
                    store.set(self._asked[rank], "")
            self._next = now + POLL_S * pace(self._responder.ranks)
        here = self._responder.state()
        for rank in missing:
            if store.check([f"{prefix}/{rank}/ended"]):
                self._reasons[rank] = "has ended"
            elif rank in self._asked and store.check([answer := f"{self._asked[rank]}/answer"]):
                state = RankState.from_json(store.get(answer))
                store.delete_key(answer)
                del self._asked[rank]
                before = self._before.get(rank)
                if before is None or not is_blocked(before, state):
                    before = self._before[rank] = state
                reason = absence_reason(here, before, state)
                self._reasons.pop(rank, None)
                if reason is not None:
                    self._reasons[rank] = reason
        reasons = {rank: self._reasons[rank] for rank in missing if rank in self._reasons}
        return reasons if len(reasons) == len(missing) else {}


_known: WeakKeyDictionary[RunContext, Responder] = WeakKeyDictionary()
