"""Curves of what a job measures, of bounded size, grown line by line and kept from one look to the next."""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from orc.launchers.errors import BackendUnreachable
from orc.orchestrator.insight.metrics import Line, Position, measurements, new_lines, number_of

if TYPE_CHECKING:
    from orc.orchestrator.workspace import Workspace

MOST_POINTS = 2048  # of a curve; each stands for as many measurements as there have to be
MOST_CURVES = 1000  # of a job
MOST_BEGINS = 100  # of attempts, which are kept
_KEPT_POINTS = 4 << 20  # of all jobs together, at 32 bytes each
Points = list[tuple[float, float]]
_Result = TypeVar("_Result")


class Curve:
    """Course of one measurement. A point stands for some that followed each other: the last of them, and the range."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")
        self._lows, self._highs = array("d"), array("d")
        self._stride = 1  # so many measurements are a point
        self._step = self._value = self._low = self._high = 0.0  # the point that is not full
        self._count = 0

    def add(self, step: float, value: float) -> None:
        """Add the newest measurement."""
        if self._count == self._stride:
            self._keep()
        if not self._count:
            self._low = self._high = value
        elif value < self._low:
            self._low = value
        elif value > self._high:
            self._high = value
        self._step, self._value = step, value
        self._count += 1

    def _keep(self) -> None:
        if len(self._steps) == MOST_POINTS:  # two points become one
            self._lows = array("d", map(min, self._lows[::2], self._lows[1::2]))
            self._highs = array("d", map(max, self._highs[::2], self._highs[1::2]))
            self._steps, self._values = self._steps[1::2], self._values[1::2]
            self._stride *= 2
            return  # the one that was full is half full now
        self._steps.append(self._step)
        self._values.append(self._value)
        self._lows.append(self._low)
        self._highs.append(self._high)
        self._count = 0

    def go_back(self, step: float) -> None:
        """Forget what was measured from *step* on: the training went on from there."""
        if self._count and self._step >= step:
            self._count = 0
        while not self._count and self._steps and self._steps[-1] >= step:
            for kept in (self._steps, self._values, self._lows, self._highs):
                kept.pop()

    def __len__(self) -> int:
        return len(self._steps) + bool(self._count)

    def points(self, most: int) -> Points:
        """Return *most* points, and the last one, at most."""
        found = list(zip(self._steps, self._values, strict=True))
        if self._count:
            found.append((self._step, self._value))
        every = max(1, -(-len(found) // most))
        return [point for index, point in enumerate(found) if index % every == 0 or index == len(found) - 1]

    def summary(self) -> dict[str, float] | None:
        """Return the last value and its step, the lowest and the highest value; `None` without one."""
        if not len(self):
            return None
        step, value = (self._step, self._value) if self._count else (self._steps[-1], self._values[-1])
        own = ([self._low], [self._high]) if self._count else ([], [])
        lows, highs = [*self._lows, *own[0]], [*self._highs, *own[1]]
        return {"last": value, "step": step, "min": min(lows), "max": max(highs)}


class Curves:
    """Curves of a training as it counts: what came after the step from which a later attempt went on is left out."""

    def __init__(self) -> None:
        self.by_name: dict[str, Curve] = {}
        self.times = Curve()  # seconds since the epoch
        self.begins: list[tuple[float, float]] = []  # step at which an attempt, or its restart, went on; its number
        self._run: tuple[object, object] | None = None

    def add(self, line: Line) -> None:
        """Add the newest line."""
        run, step = (line.get("attempt"), line.get("restart")), number_of(line.get("step"))
        if step is None:
            return
        if run != self._run:
            for curve in (self.times, *self.by_name.values()):
                curve.go_back(step)
            kept = [begin for begin in self.begins if begin[0] < step]
            self.begins = [*kept[-MOST_BEGINS:], (step, number_of(run[0]) or 0.0)]
        self._run = run
        if (at := number_of(line.get("at"))) is not None:
            self.times.add(step, at)
        for name, value in measurements(line):
            if name not in self.by_name and len(self.by_name) < MOST_CURVES:
                self.by_name[name] = Curve()
            if name in self.by_name:
                self.by_name[name].add(step, value)

    def points(self, most: int) -> dict[str, Points]:
        """Return *most* points at most of each measurement."""
        return {name: curve.points(most) for name, curve in self.by_name.items()}

    def summaries(self) -> dict[str, dict[str, float]]:
        """Return the summary of each measurement."""
        return {name: found for name, curve in self.by_name.items() if (found := curve.summary())}

    @property
    def size(self) -> int:
        """Number of points."""
        return len(self.times) + sum(len(curve) for curve in self.by_name.values())


class Measured:
    """Curves of one job, and how far its files were read."""

    def __init__(self) -> None:
        self.curves = Curves()
        self._lock = threading.Lock()
        self._position = Position()
        self._silent: frozenset[str] = frozenset()

    @property
    def unreachable(self) -> Mapping[str, BackendUnreachable]:
        """Hosts that the last look could not reach, with the reasons."""
        return self._position.unreachable

    @property
    def complete(self) -> bool:
        """True when everything that there was at the last look is in the curves."""
        return self._position.complete

    def update(self, ws: Workspace, job_id: str, make: Callable[[Curves], _Result], seconds: float) -> _Result:
        """Read what is new, for *seconds* at most, and return what *make* makes of the curves.

        Raises `BackendUnreachable` when nobody could be asked.
        """
        with self._lock:  # two looks at one job read it once
            before = self._silent
            self._take(ws, job_id, seconds)
            if before - self._silent:  # what they have comes between the lines that were taken
                self.curves, self._position = Curves(), Position()
                self._take(ws, job_id, seconds)
            return make(self.curves)

    def _take(self, ws: Workspace, job_id: str, seconds: float) -> None:
        try:
            for line in new_lines(ws, job_id, self._position, seconds):
                self.curves.add(line)
        finally:
            self._silent = frozenset(self.unreachable)


class MeasuredJobs:
    """Curves of the jobs that were looked at last. One look reads for *seconds* at most, the next goes on."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._jobs: OrderedDict[str, Measured] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job_id: str) -> Measured:
        """Return what was read of a job so far. The jobs that were not looked at for the longest time are forgotten."""
        with self._lock:
            found = self._jobs.pop(job_id, None) or Measured()
            left = _KEPT_POINTS
            for name in reversed(self._jobs):
                left -= self._jobs[name].curves.size + MOST_POINTS
                if left < 0:
                    for old in list(self._jobs)[: list(self._jobs).index(name) + 1]:
                        del self._jobs[old]
                    break
            self._jobs[job_id] = found
            return found
