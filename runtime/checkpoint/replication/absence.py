"""Absence: how a rank that waits in a save finds out that others will not come.

``if accelerator.is_main_process: accelerator.save_state()`` leaves the others training, until they wait for the main
process in their next collective. A thread of every rank looks about once a second whether somebody on the store asks
for its state, and answers. Nobody asks where all ranks come within half a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from orc.runtime.checkpoint.errors import RanksElsewhere
from orc.runtime.checkpoint.replication.rank_state import RankState, absence_reason, is_blocked
from orc.runtime.core.store import StoreError, StoreTimeout, next_name, pace

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.core.store import Store

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
