"""Metrics of a job: its `metrics.jsonl`, read where the first nodes of its attempts are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.records import parse_object
from orc.launchers.errors import BackendUnreachable

if TYPE_CHECKING:
    from orc.launchers.backends.base import Backend
    from orc.orchestrator.workspace import Workspace

FILE = "metrics.jsonl"
_OF_LINE = ("at", "attempt", "restart", "step")  # which are no measurements
Line = Mapping[str, Any]


class Reader:
    """Reads on from where it stopped. Attempts on different hosts have left a file each.

    ``unreachable`` says which of those hosts could not be asked by the last call, and why.
    """

    def __init__(self, ws: Workspace, job_id: str) -> None:
        self.unreachable: dict[str, BackendUnreachable] = {}
        self._ws, self._job_id = ws, job_id
        self._offsets: dict[tuple[str, ...], int] = {}

    def read(self) -> list[Line]:
        """Return the lines that were written since the last call, oldest first.

        Raises `BackendUnreachable` when nobody could be asked.
        """
        from orc.launchers.backends.base import Handle

        job = self._ws.ledger.job(self._job_id)
        if job is None:
            return []
        places: dict[tuple[str, ...], tuple[Backend, Handle]] = {}  # each account has a root of its own
        for attempt in self._ws.ledger.attempts(self._job_id):
            if attempt.handle:
                handle = Handle.from_dict(attempt.handle)
                backend = self._ws.backend_of_attempt(job.cluster, job.owner, attempt)
                places[(str(attempt.sent_to or ""), *handle.hosts[:1])] = backend, handle
        found: list[Line] = []
        self.unreachable = {}
        for place, (backend, handle) in places.items():
            offset = self._offsets.get(place, 0)
            try:
                data = backend.read_file(handle, FILE, offset)
            except BackendUnreachable as error:
                self.unreachable["".join(place[1:]) or job.cluster] = error
                continue
            whole = data[: data.rfind(b"\n") + 1]  # what is being written is read next time
            self._offsets[place] = offset + len(whole)
            found += parse(whole)
        if self.unreachable and len(self.unreachable) == len(places):
            raise next(iter(self.unreachable.values()))
        return sorted(found, key=lambda line: _number(line.get("at")) or 0.0)


def parse(data: bytes) -> list[Line]:
    """Return the JSON objects of *data*, one on each line; a line that a crashed machine has spoilt is left out."""
    found = (parse_object(text) for text in data.splitlines())
    return [line for line in found if line is not None]


def course(lines: Iterable[Line]) -> list[Line]:
    """Return the training as it counts: what came after the step from which a later attempt went on is left out."""
    kept: list[Line] = []
    run = None
    for line in lines:
        this = (line.get("attempt"), line.get("restart"))
        step = _number(line.get("step"))
        if this != run and step is not None:
            while kept and (_number(kept[-1].get("step")) or 0.0) >= step:
                kept.pop()
        run = this
        kept.append(line)
    return kept


def names(lines: Iterable[Line]) -> list[str]:
    """Return the names of the measurements, in order of appearance."""
    found = dict.fromkeys(name for line in lines for name, value in line.items() if _number(value) is not None)
    return [name for name in found if name not in _OF_LINE]


def series(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    """``(step, value)`` of one measurement, where it is known."""
    pairs = ((_number(line.get("step")), _number(line.get(name))) for line in lines)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def curves(lines: Iterable[Line]) -> dict[str, list[tuple[float, float]]]:
    """Return ``(step, value)`` of every measurement by its name, in order of appearance, in one pass."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        step = _number(line.get("step"))
        for name, value in line.items():
            if name not in _OF_LINE and (number := _number(value)) is not None:
                points = found.setdefault(name, [])
                if step is not None:
                    points.append((step, number))
    return found


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None  # 1e999 is an infinity without its name
