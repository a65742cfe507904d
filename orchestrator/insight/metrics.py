"""Metrics of a job: its `metrics.jsonl`, read where the first nodes of its attempts are, and the curves made of it.

Curves are of bounded size, grown line by line and kept from one look to the next.
"""

from __future__ import annotations

import heapq
import math
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from orc.launchers.agent.records import clean_text, parse_object, plain
from orc.launchers.errors import BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend, Handle
    from orc.orchestrator.workspace import Workspace


FILE = "metrics.jsonl"
RANKS_FILE = "ranks.json"
SLICE = 1 << 20  # bytes that are read at a time
_MOST_FIELDS = 10_000  # of a line
_POSITION = re.compile(r"([0-9]{1,18}(\.[0-9]{1,18}){0,999})?")
_OF_LINE = ("at", "attempt", "restart", "step")  # which are no measurements
Line = Mapping[str, Any]


@dataclass
class Position:
    """Position in the files of a job: the bytes of each that were read, in the order of its attempts.

    ``unreachable`` says which of the hosts that have them could not be asked last time, and why; ``complete`` whether
    all was read that there was.
    """

    offsets: list[int] = field(default_factory=list)
    unreachable: dict[str, BackendUnreachable] = field(default_factory=dict)
    complete: bool = False

    def to_text(self) -> str:
        """Return the offsets as a text, from which `from_text` makes a position."""
        return ".".join(map(str, self.offsets))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Return the position of which `to_text` gave *text*. Raises `ValueError`."""
        if not _POSITION.fullmatch(text):
            raise ValueError(f"no such position: {text}")
        return cls([int(number) for number in text.split(".")] if text else [])


class Reader:
    """Reads on from where it stopped. Attempts on different hosts have left a file each.

    ``unreachable`` says which of those hosts could not be asked by the last call, and why.
    """

    def __init__(self, ws: Workspace, job_id: str) -> None:
        self._ws, self._job_id = ws, job_id
        self._position = Position()

    @property
    def unreachable(self) -> Mapping[str, BackendUnreachable]:
        """Hosts that the last call could not reach, with the reasons."""
        return self._position.unreachable

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first.

        Raises `BackendUnreachable` when nobody could be asked.
        """
        return list(new_lines(self._ws, self._job_id, self._position))


def new_lines(ws: Workspace, job_id: str, position: Position, seconds: float = math.inf) -> Iterator[Line]:
    """Yield the lines beyond *position*, oldest first, and move it with each: whoever stops goes on there.

    The files are read in slices, so they never lie in memory as a whole, and for *seconds* at most. Raises
    `BackendUnreachable` at the end when nobody could be asked.
    """
    from orc.launchers.backends.base import Handle

    position.unreachable, position.complete = {}, False
    job = ws.ledger.job(job_id)
    if job is None:
        return
    places: dict[tuple[str, ...], tuple[Backend, Handle]] = {}  # each account has a root of its own
    for attempt in ws.ledger.attempts(job_id):
        if attempt.handle:
            handle = Handle.from_dict(attempt.handle)
            backend = ws.backend_of_attempt(job.cluster, job.owner, attempt)
            places.setdefault((str(attempt.sent_to or ""), *handle.hosts[:1]), (backend, handle))
    position.offsets += [0] * (len(places) - len(position.offsets))
    files = [
        _lines_of(backend, handle, position, index, "".join(place[1:]) or job.cluster, time.monotonic() + seconds)
        for index, (place, (backend, handle)) in enumerate(places.items())
    ]
    try:
        merged = files[0] if len(files) == 1 else heapq.merge(*files, key=lambda entry: entry[0])
        for _, index, end, line in merged:
            position.offsets[index] = end
            yield line
    except _TimeIsUp:
        return
    position.complete = True
    if position.unreachable and len(position.unreachable) == len(places):
        raise next(iter(position.unreachable.values()))


def _lines_of(
    backend: Backend, handle: Handle, position: Position, index: int, host: str, until: float
) -> Iterator[tuple[float, int, int, Line]]:
    """Yield ``(time, index, end, line)`` of one file, *end* being where the next line begins. Raises `_TimeIsUp`."""
    while True:
        offset = position.offsets[index]
        try:
            data = backend.read_file(handle, FILE, offset, SLICE)
        except BackendUnreachable as error:
            position.unreachable[host] = error
            return
        whole = data[: data.rfind(b"\n") + 1]  # what is being written is read next time
        if not whole and len(data) == SLICE:
            whole = data  # no line is so long
        for text in whole.splitlines(keepends=True):
            offset += len(text)
            if (line := line_of(text)) is not None:
                yield number_of(line.get("at")) or 0.0, index, offset, line
        position.offsets[index] = offset
        if len(data) < SLICE:
            return
        if time.monotonic() > until:
            raise _TimeIsUp


class _TimeIsUp(Exception):
    """There is more to read; another call goes on."""


def line_of(text: bytes) -> Line | None:
    """Return the measurements in a line of the file; `None` for one that a crashed machine has spoilt."""
    found = parse_object(text)
    if found is None:
        return None
    line = {name: _plain(value) for name, value in islice(found.items(), _MOST_FIELDS)}
    # What no answer could pass on, a half of a surrogate pair, is written with an escape.
    return {clean_text(name): value for name, value in line.items()} if b"\\u" in text else line


def _plain(value: Any) -> Any:
    """Return a value as a reader of metrics can take it: a number, a text, or a list of those."""
    if isinstance(value, (int, float)):
        return value
    return [plain(item) for item in value[:_MOST_FIELDS]] if isinstance(value, list) else plain(value)


def latest_ranks(backend: Backend, handle: Handle, attempt: int) -> tuple[float | None, dict[int, dict[str, float]]]:
    """Return when the ranks of *attempt* last told how they get on, and what: by rank its step, seconds per step and
    share of waiting for data. What the program has spoilt is left out, and what an earlier attempt has left.
    """
    found = parse_object(backend.read_file(handle, RANKS_FILE, 0, SLICE))
    if found is None or number_of(found.get("attempt")) != attempt:
        return None, {}
    ranks: dict[int, dict[str, float]] = {}
    given = found.get("ranks")
    for name, values in islice(given.items(), _MOST_FIELDS) if isinstance(given, dict) else ():
        if isinstance(values, dict) and name.isdecimal() and len(name) < 10:
            known = {key: number_of(values.get(key)) for key in ("step", "step_s", "data_wait")}
            ranks[int(name)] = {key: value for key, value in known.items() if value is not None}
    return number_of(found.get("at")), ranks


def course(lines: Iterable[Line]) -> list[Line]:
    """Return the training as it counts: what came after the step from which a later attempt went on is left out."""
    kept: list[Line] = []
    run = None
    for line in lines:
        this = (line.get("attempt"), line.get("restart"))
        step = number_of(line.get("step"))
        if this != run and step is not None:
            while kept and (number_of(kept[-1].get("step")) or 0.0) >= step:
                kept.pop()
        run = this
        kept.append(line)
    return kept


def names(lines: Iterable[Line]) -> list[str]:
    """Return the names of the measurements, in order of appearance."""
    return list(dict.fromkeys(name for line in lines for name, _ in measurements(line)))


def series(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    """``(step, value)`` of one measurement, where it is known."""
    pairs = ((number_of(line.get("step")), number_of(line.get(name))) for line in lines)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def measurements(line: Line) -> Iterator[tuple[str, float]]:
    """Yield the measurements of a line, by name."""
    for name, value in line.items():
        if name not in _OF_LINE and (number := number_of(value)) is not None:
            yield name, number


def number_of(value: Any) -> float | None:
    """Return a number that can be drawn; `None` for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None  # 1e999 is an infinity without its name


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
