"""Measurements and stacks of running jobs, from their nodes."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import BackendError, BackendUnreachable
from orc.launchers.hosts.sessions import command

if TYPE_CHECKING:
    from orc.launchers.backends.base import NodeEntry


@dataclass(frozen=True)
class Sample:
    """Measurement of one node of a job, or the reason why there is none."""

    job: str
    node: int
    host: str
    data: Mapping[str, Any]
    step_s: float | None = None  # optimizer steps per second since the measurement before
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        own = {"job": self.job, "node": self.node, "host": self.host, "steps_per_s": self.step_s}
        return {**self.data, **own, **({"error": self.error} if self.error else {})}


class Sampling:
    """Measures nodes again and again, with one process per node that stays. A context manager: it ends them."""

    def __init__(self, entries: Sequence[tuple[str, NodeEntry]], interval_s: float, count: int = 0) -> None:
        """*entries* are nodes with the ids of their jobs; *count* is how often, 0 for ever."""
        self._lines: queue.Queue[Sample | None] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._open = len(entries)
        for job, entry in entries:
            argv = command(entry, "sample", str(interval_s), str(count))
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            self._processes.append(process)
            threading.Thread(target=self._read, args=(job, entry, process), daemon=True).start()

    def __enter__(self) -> Sampling:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()

    def _read(self, job: str, entry: NodeEntry, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        before: Mapping[str, Any] | None = None
        for line in process.stdout:
            try:
                data = json.loads(line)
            except ValueError:
                continue  # a start-up file of the other side that prints
            self._lines.put(Sample(job, entry.node, str(data["host"]), data, steps_per_second(before, data)))
            before = data
        said = process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        if process.wait():
            reason = said[-1] if said else f"exit status {process.returncode}"
            self._lines.put(Sample(job, entry.node, entry.host, {}, error=reason.removeprefix("orc: ")))
        self._lines.put(None)

    def next(self, timeout_s: float) -> Sample | None:
        """Return the next measurement; `None` when there is none within *timeout_s* or no node is left."""
        while self._open:
            try:
                found = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if found is not None:
                return found
            self._open -= 1
        return None

    @property
    def ended(self) -> bool:
        """True when all nodes have ended."""
        return self._open == 0


def steps_per_second(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> float | None:
    """Return the training's speed between two measurements of a node; `None` where there is none. Pure."""
    if before is None:
        return None
    first, last = before.get("progress", {}).get("step"), now.get("progress", {}).get("step")
    if not isinstance(first, int) or not isinstance(last, int) or last < first or now["at"] <= before["at"]:
        return None
    return float(round((last - first) / (now["at"] - before["at"]), 2))


def stacks(entries: Sequence[NodeEntry], timeout_s: float) -> dict[str, Any]:
    """``{"answers": [...], "missing": [nodes]}``: the agents' answers (attempt-directory.md, Stacks).

    The first node knows of all others; where it cannot be asked, each node is asked for itself. Raises
    `BackendUnreachable` when no node could be asked.
    """
    answers: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    asked = False
    for entry in entries:
        if asked and entry.node in answers:
            continue
        try:
            document = _ask(entry, timeout_s)
        except BackendError as error:
            problems.append(f"{entry.host}: {error.what}")
            continue
        asked = True
        answers |= {int(answer["node"]): answer for answer in document["answers"]}
        if not document["missing"]:
            break
    if not asked:
        raise BackendUnreachable("; ".join(problems))
    missing = [entry.node for entry in entries if entry.node not in answers]
    return {"answers": [answers[node] for node in sorted(answers)], "missing": missing, "problems": problems}


def _ask(entry: NodeEntry, timeout_s: float) -> dict[str, Any]:
    argv = command(entry, "stacks", str(timeout_s))
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s + 30, check=False)
    except subprocess.TimeoutExpired:
        raise BackendUnreachable(f"no answer within {timeout_s + 30:g} s") from None
    except OSError as error:
        raise BackendError(f"{argv[0]}: {error.strerror}") from None
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        try:
            return dict(json.loads(line))
        except ValueError:
            continue
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise BackendError((said[-1] if said else f"exit status {done.returncode}").removeprefix("orc: "))


@dataclass(frozen=True)
class Group:
    """Ranks whose main threads stand at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[tuple[str, int, str], ...]  # file, line, function; innermost first
    error: str = ""  # why there are none


def grouped(answers: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return ranks by equal stacks, the smallest group first: the one that differs comes first. Pure."""
    found: dict[tuple[tuple[tuple[str, int, str], ...], str], list[int]] = {}
    for answer in answers:
        for rank in answer["ranks"]:
            frames = tuple((f["file"], f["line"], f["function"]) for f in _main(rank.get("threads") or ()))
            found.setdefault((frames, "" if frames else rank.get("error") or "no stack"), []).append(int(rank["rank"]))
    groups = [Group(tuple(sorted(ranks)), frames, error) for (frames, error), ranks in found.items()]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def _main(threads: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    for thread in threads:
        if thread.get("main"):
            return list(thread["frames"])
    return list(threads[-1]["frames"]) if threads else []


def ranges(numbers: Sequence[int]) -> str:
    """``0-3,7``."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda place: place[1] - place[0]))
    return ",".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs)
