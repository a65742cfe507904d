"""A notice to leave, and how all ranks come to stop after the same step.

The platform announces preemption with SIGTERM or SIGUSR1, to all ranks, to those of one machine, or to a single one.
A checkpoint needs all ranks at the same place, so they agree on a *stop*, counted in ticks: a tick is a step boundary
that a rank has passed, and all ranks pass the same boundaries in the same order.

1. The signal handler of a rank sets a flag; nothing else is safe in a handler.
2. Each rank has a watcher, a thread with a connection of its own to the run's store. It looks twice a second
   (less often in a run of hundreds of ranks). A watcher
   that finds its rank's flag writes the key ``notice``; every watcher that finds ``notice`` goes on with 3.
3. The watcher of rank ``r`` takes the rank's tick ``t_r`` and, under the same lock, sets the rank's *limit* to
   ``t_r + 1``. Then it writes ``t_r`` to the store, waits for the ticks of all ranks, and sets
   ``stop = max(t) + 1``. A boundary that the script has asked about ahead (`Preemption.due`), and was told to pass,
   counts as passed.
4. At each boundary the main thread counts its tick. Below its limit it goes on without looking further. At its limit
   or beyond it waits until the watcher has set ``stop``, and goes on if the boundary is below ``stop``. At ``stop``
   the run is saved and ends.
5. The store goes with the process of rank 0, so that rank does not end before all know ``stop``.

No rank passes ``stop``: it cannot pass its limit before it knows ``stop``, and its limit is at most ``stop``. No
deadlock with the collectives of training: what a rank waits for in 4 depends on watchers alone, never on the progress
of another main thread; a watcher needs no collective. Once ``stop`` is known all ranks run the same steps up to it, so
their collectives match. No cost while nothing happens: a boundary counts a number, without network or collective.

A run that ends before ``stop`` ends normally. A rank that died never writes its tick: the others wait `PATIENCE_S` and
fail with its number, unless the agent ends them first.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.core.store import StoreError, StoreTimeout, next_name, pace

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.store import Store

EXIT_STATUS = 75  # "run me again", as agents and schedulers read it
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
POLL_S = 0.5
PATIENCE_S = 60.0
FAREWELL_S = 10.0  # how long the end of a rank waits for an agreement that is under way


class Preempted(SystemExit):
    """Ends the process with the status that requests another run. ``except Exception`` does not catch it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(EXIT_STATUS)
        self.message = message

    def __str__(self) -> str:
        return self.message


class PreemptionError(OrcRuntimeError):
    """The ranks could not agree on the step to stop at."""


class Signals:
    """The signal handlers of this process, for all listeners; one set, as a chain would outlive its links."""

    def __init__(self) -> None:
        self._listeners: WeakSet[Preemption] = WeakSet()
        self._previous: dict[int, Any] = {}
        self._pid = 0

    def listen(self, listener: Preemption) -> None:
        """Call *listener* on signals from now on. Python allows it in the main thread only."""
        if self._pid != os.getpid():  # a forked child starts with its parent's handlers, not with its listeners
            self._pid = os.getpid()
            self._listeners = WeakSet()
        self._listeners.add(listener)
        if not self._previous and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)

    def stop_listening(self, listener: Preemption) -> None:
        """The opposite; the last listener gives the signals back."""
        self._listeners.discard(listener)
        if self._listeners or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                # A launcher that sees the first rank leave signals the others: those are on their way already.
                signal.signal(number, signal.SIG_IGN if listener.leaving else previous or signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        listeners = list(self._listeners)
        if os.getpid() != self._pid or not any(listener.ticks or listener.in_job for listener in listeners):
            # A forked child, or a script outside of a job that is not training: nothing to save, do as was asked.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for listener in listeners:
            listener.signal = number
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)


class Preemption:
    """The notice and the agreement of one process. Made by `of`; signals are handled from `install` on."""

    def __init__(self, context: RunContext, *, poll_s: float = POLL_S, patience_s: float = PATIENCE_S) -> None:
        self.rank = context.rank
        self.world_size = context.world_size
        self.in_job = context.env.job.attempt_dir is not None
        self.ticks = 0
        self._passed = 0  # the last boundary that is passed, or sure to be
        self.signal: int | None = None
        self.leaving = False  # the run is saved and this process ends
        self._given_store = context.store
        self._prefix = f"orc/{next_name(context, 'preemption')}"
        self._poll_s = poll_s * pace(context.world_size)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._limit: int | None = None
        self._stop: int | None = None
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._watcher: threading.Thread | None = None

    @classmethod
    def of(cls, context: RunContext) -> Preemption:
        """The one of *context*; several Accelerators of a process share it."""
        if context not in _known:
            _known[context] = cls(context)
            _known[context].install()
        return _known[context]

    @classmethod
    def forget(cls, context: RunContext) -> None:
        """The run of *context* is over; another one in this process starts anew."""
        if (known := _known.pop(context, None)) is not None:
            known.close()

    def install(self) -> None:
        """Handle the signals (in the main thread; elsewhere Python cannot) and start the watcher."""
        signals.listen(self)
        if self.world_size > 1 and self._given_store is not None:
            given: Any = self._given_store  # the stub does not know clone
            store = given.clone()
            self._watcher = threading.Thread(target=self._watch, args=(store,), name="orc-preemption", daemon=True)
            self._watcher.start()

    def close(self) -> None:
        """End the watcher and give the signals back."""
        watcher = self._watcher if self._watcher is not threading.current_thread() else None
        if watcher is not None and self._limit is not None:
            watcher.join(timeout=FAREWELL_S)  # others may still have to read where to stop
        self._closing.set()
        if watcher is not None:
            watcher.join(timeout=5)
        signals.stop_listening(self)

    def tick(self) -> bool:
        """A step boundary is passed; whether the run is to stop here. The same answer on every rank.

        Raises:
            PreemptionError: a notice is out, and a rank did not answer it.
        """
        if self.world_size == 1:
            self.ticks += 1
            return self.signal is not None
        with self._lock:
            self.ticks += 1
            now = self.ticks
            if self._passes(now):
                return False
        return self._reached(now)

    def due(self) -> bool:
        """Return whether the next boundary is the one to stop at; the same on all ranks that call it at this place."""
        if self.world_size == 1:
            return self.signal is not None
        with self._lock:
            now = self.ticks + 1
            if self._passes(now):
                return False
        return self._reached(now)

    def _passes(self, boundary: int) -> bool:
        """Return whether this rank passes *boundary* without waiting for others; if so, note it as passed."""
        if self._limit is not None and boundary >= self._limit:
            return False
        # A limit that comes later must not take back what the script was told.
        self._passed = max(self._passed, boundary)
        return True

    def _reached(self, now: int) -> bool:
        if not self._settled.wait(self._patience_s):
            self._closing.set()  # there will be no agreement that the end of this rank had to wait for
            raise PreemptionError(
                f"rank {self.rank} was told to stop and waited {self._patience_s:g} s for the other ranks to say where "
                "they are; one of them is gone or stuck"
            )
        if self._stop is None:
            raise PreemptionError(
                f"rank {self.rank} was told to stop but cannot reach the run's store: {self._failure}"
            ) from self._failure
        return now >= self._stop

    def _watch(self, store: Store) -> None:
        told = False
        try:
            while not self._closing.wait(self._poll_s):
                try:
                    if self.signal is not None and not told:
                        notice = {"rank": self.rank, "signal": signal.Signals(self.signal).name, "at": time.time()}
                        store.set(f"{self._prefix}/notice", json.dumps(notice))
                        told = True
                    noticed = store.check([f"{self._prefix}/notice"])
                except StoreTimeout:  # rank 0's interpreter is busy with something else, for long
                    continue
                if noticed:
                    self._agree(store)
                    return
        except StoreError as error:
            # The store goes with rank 0's process. Without it nothing can be agreed; who waits is told.
            self._failure = error
            self._settled.set()

    def _agree(self, store: Store) -> None:
        with self._lock:
            mine = self._passed
            self._limit = mine + 1
        store.set(f"{self._prefix}/tick/{self.rank}", str(mine))
        keys = [f"{self._prefix}/tick/{rank}" for rank in range(self.world_size)]
        while not store.check(keys):
            if self._closing.wait(0.02):
                return
        self._stop = max(int(value) for value in store.multi_get(keys)) + 1
        self._settled.set()
        if self.rank != 0:
            store.set(f"{self._prefix}/knows/{self.rank}", "1")
            return
        others = [f"{self._prefix}/knows/{rank}" for rank in range(1, self.world_size)]
        while not store.check(others) and not self._closing.wait(0.02):
            pass


def close_all() -> None:
    """End the watchers of this process and give the signals back."""
    for preemption in list(_known.values()):
        preemption.close()


signals = Signals()
_known: WeakKeyDictionary[RunContext, Preemption] = WeakKeyDictionary()
atexit.register(close_all)
