"""The background thread of a rank that watches the run for stalls and delivers its measurements.

It has its own connection to the run's store and shares no lock with the training thread. What it knows of the training
loop it reads from counters that the loop keeps anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from orc.runtime.core.store import ANSWER_S as STORE_S
from orc.runtime.core.store import StoreError, StoreTimeout, next_name, pace
from orc.runtime.core.timeouts import collectives_end_after_s
from orc.runtime.observe.flight_recorder import flight_record, last_collectives
from orc.runtime.observe.watchdog import (
    EXIT_STATUS,
    LATE_FLOOR_S,
    Beat,
    holding_up,
    late_ranks,
    report,
    report_path,
)
from orc.runtime.observe.whereabouts import main_call_site

if TYPE_CHECKING:
    from orc.runtime.core.config import RuntimeConfig
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.core.store import Store
    from orc.runtime.observe.reporter import Reporter

POLL_S = 1.0
REPORT_AFTER_S = 1800.0  # inside of a job where nothing is configured: report, do not end
ANSWER_S = 5.0  # how long a report waits for the other ranks
REPORT_S = 30.0  # how long it may take besides: a slow disk
HEAD_START_S = 1.0  # ranks that were held up end after the one that held them up, so that it is the first failure


@dataclass(frozen=True)
class StallRules:
    """Rules for reporting stalls and late ranks, and whether a stall ends the process. ``None`` switches a rule off."""

    timeout_s: float | None = None
    factor: float | None = None
    ends: bool = True
    late_floor_s: float = LATE_FLOOR_S

    @classmethod
    def of(cls, config: RuntimeConfig, in_job: bool, collectives_end_after_s: float | None = None) -> StallRules:
        """Return the rules of the configuration. Inside of a job a stall of half an hour is reported by default, or one
        that ends soon because the collectives in which ranks wait for each other have a time-out.
        """
        timeout, action = config.stall_timeout_s, config.stall_action
        asked = timeout is not None
        if not asked and in_job:
            limit = math.inf if collectives_end_after_s is None else collectives_end_after_s
            timeout = min(REPORT_AFTER_S, 0.9 * limit)
        if timeout == 0:
            timeout = None
        return cls(timeout, config.stall_factor, action == "exit" if action is not None else asked)

    @property
    def on(self) -> bool:
        """Return whether any rule is switched on."""
        return self.timeout_s is not None or self.factor is not None


class Watch:
    """Watches one run from one rank. Made by `of`; `start` begins, `close` ends."""

    def __init__(
        self, context: RunContext, rules: StallRules, reporter: Reporter | None = None, *, poll_s: float | None = None
    ) -> None:
        self.context = context
        self.rules = rules
        self.reporter = reporter
        if poll_s is None:
            limits = [POLL_S]
            limits += [rules.timeout_s / 5] if rules.timeout_s is not None else []
            limits += [reporter.interval_s / 2] if reporter is not None else []
            poll_s = max(0.02, min(limits))
        self._poll_s = poll_s * pace(context.world_size)
        self._prefix = f"orc/{next_name(context, 'watch')}"
        self._marks = 0
        self._prepared: list[tuple[Prepared, Callable[[], int]]] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._incident = 0
        self._told_at: tuple[int, ...] | None = None  # the position of the stall that was reported already
        self._told_late: tuple[int, tuple[int, ...]] | None = None
        self._reported = False
        self._unanswered = False  # rank 0's interpreter was busy with something else at the last look
        self._place: tuple[int, ...] = ()  # the position at the last look
        self._pid = os.getpid()
        self._exit: Callable[[int], Any] = os._exit

    @classmethod
    def of(cls, context: RunContext) -> Watch | None:
        """The one of *context*; `None` when nothing is to be watched. Several Accelerators of a process share it."""
        if context not in _known:
            _known[context] = _make(context)
            if (watch := _known[context]) is not None:
                watch.start()
        return _known[context]

    @classmethod
    def forget(cls, context: RunContext) -> None:
        """The run of *context* is over."""
        watch = _known.pop(context, None)
        if watch is not None:
            watch.close()

    def add(self, prepared: Prepared, base_step: Callable[[], int]) -> None:
        """Watch the objects in *prepared*; *base_step* is the step that the run was resumed at."""
        if not any(prepared is known for known, _ in self._prepared):
            self._prepared.append((prepared, base_step))

    def touch(self) -> None:
        """Something that is not a step has begun or ended: it counts as progress."""
        self._marks += 1

    def start(self) -> None:
        """Begin to watch."""
        if self.context.mirrored:
            return
        store = self.context.store
        limit = self.rules.timeout_s
        if store is not None:  # this rank's own stall must be noticed while rank 0's interpreter answers nobody
            store = store.clone(STORE_S if limit is None else min(STORE_S, limit / 4))
        self._arm()  # here, not in the thread: the lock may be gone before the thread has run once
        self._thread = threading.Thread(target=self._run, args=(store,), name="orc-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is not reported yet is written."""
        if os.getpid() != self._pid:
            return  # a forked child has no thread to end, and nothing to report
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
            if self._moved():  # the run may have gone on, and to its end, since the thread last looked
                self._recovered()
        if self.rules.timeout_s is not None and self._thread is not None:
            faulthandler.cancel_dump_traceback_later()
        if self.reporter is not None:
            self.reporter.finish(self.step())

    # ---- where this rank is

    def step(self) -> int:
        """Optimizer steps of the run."""
        return max((base() + prepared.steps() for prepared, base in self._prepared), default=0)

    def position(self) -> tuple[int, ...]:
        """Grows whenever this rank gets on: steps, batches, marks."""
        steps = batches = 0
        for prepared, _ in self._prepared:
            steps += prepared.steps()
            for loader in prepared.dataloaders:
                live = loader.cursor.live
                batches += (live.epoch << 32) + live.done + 1 if live is not None else loader.cursor.epoch << 32
        return steps, batches, self._marks

    # ---- the thread

    def _run(self, store: Store | None) -> None:
        self._place = self.position()
        steps = _Pace(self.step())
        since = last = time.monotonic()
        while not self._closing.wait(self._poll_s):
            now = time.monotonic()
            # A process that was stopped (SIGSTOP, a suspended machine) has not stalled.
            slept = now - last > max(5.0, 5 * self._poll_s) and not self._unanswered
            last = now
            if self._moved() or slept:
                since = now
                self._recovered()
            steps.see(self.step(), now)
            self._arm()
            beat = Beat(self.context.rank, self.step(), self._place, now - since, steps.step_s)
            if store is None:
                self._alone(beat)
                continue
            try:
                self._unanswered = False
                self._together(store, beat)
            except StoreTimeout:
                self._unanswered = True
                self._alone(beat)
            except StoreError:
                store = None  # it went with rank 0's process; this rank watches itself

    def _moved(self) -> bool:
        """Return whether this rank's position has changed since the last call, and store the new position."""
        before, self._place = self._place, self.position()
        return self._place != before

    def _arm(self, busy_s: float = 0.0) -> None:
        """Should an extension hold the interpreter's lock, this thread cannot speak; a thread in C then dumps.

        *busy_s*: how much longer than usual this thread may be away, in seconds.
        """
        limit = self.rules.timeout_s
        if limit is not None and not self._closing.is_set():
            after = max(limit - 2 * self._poll_s, limit / 2) + busy_s
            faulthandler.dump_traceback_later(after, exit=self.rules.ends, file=2)

    def _stalled(self, beat: Beat) -> bool:
        limit = self.rules.timeout_s
        return limit is not None and beat.idle_s > limit and self._told_at != beat.position

    def _alone(self, beat: Beat) -> None:
        if self.reporter is not None:
            self.reporter.poll(beat.step)
        if self._stalled(beat):
            answers: dict[int, Beat | None] = {0: None} if self._unanswered else {}
            self._report("stalled", {**answers, beat.rank: self._answer(beat)}, beat, None)

    def _together(self, store: Store, beat: Beat) -> None:
        prefix, ranks = self._prefix, range(self.context.world_size)
        if self.reporter is not None:
            self.reporter.poll(beat.step, store, prefix)
        if self.rules.factor is not None:
            store.set(f"{prefix}/beat/{beat.rank}", beat.to_json())
        incident = f"{prefix}/incident/{self._incident}"
        if not store.check([incident]):
            kind = "stalled" if self._stalled(beat) else None
            if kind is None and self.rules.factor is not None and self.context.is_main:
                keys = [f"{prefix}/beat/{rank}" for rank in ranks]
                if store.check(keys):
                    beats = [Beat.from_json(value) for value in store.multi_get(keys)]
                    late = late_ranks(beats, self.rules.factor, self.rules.late_floor_s)
                    told = next(((beat.rank, beat.position) for beat in beats if beat.rank in late), None)
                    if told is not None and told != self._told_late:
                        kind, self._told_late = "late", told
            if kind is None:
                return
            store.set(incident, kind)
        self._arm(ANSWER_S)
        kind = store.get(incident).decode()
        self._incident += 1
        store.set(f"{incident}/where/{beat.rank}", self._answer(beat).to_json())
        keys = [f"{incident}/where/{rank}" for rank in ranks]
        if self._await(store, keys):  # all in one answer: every rank asks
            answers: dict[int, Beat | None] = dict(zip(ranks, map(Beat.from_json, store.multi_get(keys)), strict=True))
        else:
            answers = {
                rank: Beat.from_json(store.get(key)) if store.check([key]) else None
                for rank, key in zip(ranks, keys, strict=True)
            }
        self._report(kind, answers, beat, store, f"{incident}/done")

    def _answer(self, beat: Beat) -> Beat:
        issued = last_collectives(flight_record())
        return Beat(beat.rank, beat.step, beat.position, beat.idle_s, beat.step_s, main_call_site(), issued)

    def _await(self, store: Store, keys: list[str]) -> bool:
        """Wait for *keys*; return whether all are there."""
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0 and not self._closing.is_set():
            with suppress(StoreTimeout):
                store.wait(keys, timedelta(seconds=min(left, 1.0)))
                return True
        return False

    def _report(
        self, kind: str, answers: dict[int, Beat | None], beat: Beat, store: Store | None, done: str = ""
    ) -> None:
        self._arm(REPORT_S + ANSWER_S + HEAD_START_S)
        ends = kind == "stalled" and self.rules.ends
        if kind == "stalled":
            self._told_at = beat.position
        self._reported = True
        idle_s = max(answer.idle_s for answer in answers.values() if answer is not None)
        report(self.context, kind, answers, idle_s=idle_s, ends=ends)
        if not ends:
            return
        if store is not None:  # the store goes with its process: everybody must have heard everybody first
            store.set(f"{done}/{beat.rank}", "1")
            self._await(store, [f"{done}/{rank}" for rank, answer in answers.items() if answer is not None])
        if holding_up(answers) and beat.rank not in holding_up(answers):
            time.sleep(HEAD_START_S)
        self._exit(EXIT_STATUS)

    def _recovered(self) -> None:
        if not self._reported:
            return
        self._told_at, self._reported = None, False
        path = report_path(self.context)
        if path is not None:
            path.unlink(missing_ok=True)
        os.write(2, f"orc: rank {self.context.rank} goes on at step {self.step()}\n".encode())


class _Pace:
    """The typical duration of a step, from how many happened between two looks; the median over the last few."""

    def __init__(self, step: int) -> None:
        self._step, self._at = step, time.monotonic()
        self._times: deque[float] = deque(maxlen=32)

    def see(self, step: int, now: float) -> None:
        if step > self._step:
            self._times.append((now - self._at) / (step - self._step))
            self._step, self._at = step, now

    @property
    def step_s(self) -> float | None:
        if len(self._times) < 2:
            return None
        ordered = sorted(self._times)
        return round(ordered[len(ordered) // 2], 6)


def _make(context: RunContext) -> Watch | None:
    job = context.env.job
    limit = collectives_end_after_s(context.group, context.device)
    rules = StallRules.of(context.config, job.attempt_dir is not None, limit)
    reporter = None
    wanted = context.config.metrics
    if wanted or (wanted is None and job.job_dir is not None):
        from orc.runtime.observe.reporter import Reporter

        reporter = Reporter.of(context)
    if not rules.on and reporter is None:
        return None
    return Watch(context, rules, reporter)


@contextlib.contextmanager
def aside(context: RunContext) -> Iterator[None]:
    """A block of work that is no training step (saving, loading): progress at both ends, not part of step times."""
    watch = _known.get(context)
    if watch is None:
        yield
        return
    watch.touch()
    meter = watch.reporter.meter if watch.reporter is not None else None
    began = time.perf_counter()
    try:
        yield
    finally:
        watch.touch()
        if meter is not None:
            meter.away_s += time.perf_counter() - began


def close_all() -> None:
    """End the watches of this process."""
    for context in list(_known):
        Watch.forget(context)


_known: WeakKeyDictionary[RunContext, Watch | None] = WeakKeyDictionary()
atexit.register(close_all)
