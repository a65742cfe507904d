"""The stall watchdog: what counts as a stall, which ranks hold the others up, and the report about it.

Nothing here runs on the training thread. A background thread (`watch.Watch`) looks at the run's position about once a
second, as the training loop leaves it behind anyway: optimizer steps and batches taken. Two things are noticed:

- *stalled*: the position of this rank has not changed for ``stall_timeout_s``. The run cannot be trusted to go on; it
  is reported and, if so configured, ended.
- *late*: some ranks, but not all, are behind the others, and have been where they are for more than ``stall_factor``
  times the median step. They may recover; it is reported, once per occurrence.

Every rank then prints which rank is where, with all its stacks, and leaves the same in ``stall-<rank>.json``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orc.runtime.observe.flight_recorder import LastCollective, flight_record, newest
from orc.runtime.observe.flight_recorder import behind as behind_in_collectives
from orc.runtime.observe.whereabouts import WAITING, CallSite, all_stacks

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

EXIT_STATUS = 79  # stalled; an agent adds the report to its exit record
LATE_FLOOR_S = 3.0  # less is noise: garbage collection, a slow disk, the watch's own pace


@dataclass(frozen=True)
class Beat:
    """State of one rank: how far it is, for how long it has been there, and what it is doing.

    ``position`` grows with every step and every batch; positions of different ranks compare. ``collectives`` are the
    last ones that it has issued, by process group, where torch records them.
    """

    rank: int
    step: int
    position: tuple[int, ...]
    idle_s: float
    step_s: float | None = None  # typical duration of a step; `None` before the second one
    place: CallSite | None = None
    collectives: Mapping[str, LastCollective] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the beat as one line of JSON."""
        return json.dumps(
            {
                "rank": self.rank,
                "step": self.step,
                "position": self.position,
                "idle_s": round(self.idle_s, 3),
                "step_s": self.step_s,
                "place": self.place.to_dict() if self.place else None,
                "collectives": {group: asdict(last) for group, last in self.collectives.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Inverse of `to_json`."""
        data = json.loads(text)
        place = data["place"]
        return cls(
            data["rank"],
            data["step"],
            tuple(data["position"]),
            data["idle_s"],
            data["step_s"],
            CallSite(**place) if place else None,
            {group: LastCollective(**last) for group, last in data["collectives"].items()},
        )


def late_ranks(beats: Sequence[Beat], factor: float, floor_s: float = LATE_FLOOR_S) -> list[int]:
    """The ranks that are behind the others and idle for more than *factor* times the median step of all ranks."""
    times = [beat.step_s for beat in beats if beat.step_s is not None]
    if len(beats) < 2 or not times:
        return []
    limit = max(factor * statistics.median(times), floor_s)
    front = max(beat.position for beat in beats)
    return [beat.rank for beat in beats if beat.position < front and beat.idle_s > limit]


def holding_up(beats: Mapping[int, Beat | None]) -> list[int]:
    """Return the ranks that the others seem to wait for; empty when none stands out.

    First those that give no answer, then those that have issued fewer collectives than others, then those that are
    behind, then those that are not waiting themselves.
    """
    silent = [rank for rank, beat in beats.items() if beat is None]
    if silent:
        return silent if len(silent) < len(beats) else []
    known = [beat for beat in beats.values() if beat is not None]
    missing = behind_in_collectives({beat.rank: beat.collectives for beat in known})
    if missing:
        return sorted(missing)
    last = min(beat.position for beat in known)
    behind = [beat for beat in known if beat.position == last]
    if len(behind) == len(known):
        behind = [beat for beat in known if beat.place is not None and beat.place.activity not in WAITING]
    return [beat.rank for beat in behind] if len(behind) < len(known) else []


def summarize(kind: str, idle_s: float, beats: Mapping[int, Beat | None]) -> str:
    """Return a line to read: ``stalled: no step for 60 s at step 12; rank 1 is at train.py:31 in main: x = read()``."""
    known = [beat for beat in beats.values() if beat is not None]
    missing = behind_in_collectives({beat.rank: beat.collectives for beat in known})
    step = max((beat.step for beat in known), default=0)
    culprits = holding_up(beats)
    head = "stalled: no step" if kind == "stalled" else "late: no step on some ranks"
    parts = [
        f"{head} for {idle_s:.0f} s at step {step}" if idle_s >= 10 else f"{head} for {idle_s:.1f} s at step {step}"
    ]
    for rank in (culprits or list(beats))[:3]:
        beat = beats[rank]
        if beat is None:
            parts.append(f"rank {rank} gives no answer (its interpreter is blocked or its process is gone)")
        elif beat.place is not None:
            doing = f" ({beat.place.activity})" if beat.place.activity != "script" else ""
            if rank in culprits and rank in missing:
                group, count, most = missing[rank]
                doing += f", having issued {count} collectives of {group} where others have {most}"
            parts.append(f"rank {rank} is at {beat.place}{doing}")
    if len(culprits) > 3 or (not culprits and len(beats) > 3):
        parts.append("more ranks in the report")
    return "; ".join(parts)


def table(beats: Mapping[int, Beat | None]) -> list[str]:
    """Return a table of all ranks, one line per rank."""
    culprits = set(holding_up(beats))
    lines = []
    for rank, beat in sorted(beats.items()):
        mark = "   <- the others wait for this one" if rank in culprits else ""
        if beat is None:
            lines.append(f"  rank {rank}: no answer{mark}")
            continue
        place = beat.place
        doing = f"{place.activity}, {place}" if place else "unknown"
        for group, last in beat.collectives.items():
            state = "" if last.done else ", not done"
            doing += f", collective {last.number} of {group} ({last.operation}{state})"
        lines.append(f"  rank {rank}: step {beat.step}, there for {beat.idle_s:.1f} s, {doing}{mark}")
    return lines


def report(
    context: RunContext, kind: str, beats: Mapping[int, Beat | None], *, idle_s: float, ends: bool, errors: int = 2
) -> str:
    """Write the position of every rank to file descriptor *errors* and ``stall-<rank>.json``; return the summary."""
    summary = summarize(kind, idle_s, beats)
    text = [f"orc: rank {context.rank}: {summary}", *table(beats), f"orc: all threads of rank {context.rank}:"]
    sys.stderr.flush()
    os.write(errors, ("\n".join(text) + "\n").encode())
    faulthandler.dump_traceback(file=errors, all_threads=True)
    if ends:
        os.write(errors, f"orc: rank {context.rank} ends with status {EXIT_STATUS}: {summary}\n".encode())
    path = report_path(context)
    if path is not None:
        content = {
            "kind": kind,
            "rank": context.rank,
            "restart": context.env.job.restart,
            "summary": summary,
            "ends": ends,
            "at": time.time(),
            "ranks": [
                {"rank": rank, "answer": json.loads(beat.to_json()) if beat else None}
                for rank, beat in sorted(beats.items())
            ],
            "waiting_for": holding_up(beats),
            "stacks": all_stacks(),
            "flight_recorder": newest(flight_record()),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(content))
            temporary.replace(path)
        except OSError as error:
            os.write(errors, f"orc: the stall report could not be written: {error}\n".encode())
    return summary


def report_path(context: RunContext) -> Path | None:
    """Return the path of this rank's report in the node's folder of the attempt; `None` outside of a job."""
    attempt = context.env.job.attempt_dir
    if attempt is None:
        return None
    node = Path(attempt) / f"node-{context.node_rank}"
    return node / f"stall-{context.rank}.json" if node.is_dir() else None
