"""Reading what agents wrote: typed views of their JSON records, their merge into one verdict, pieces of logs.

The format is docs/explanation/attempt-directory.md. Everything here is pure; backends fetch the bytes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


class Cause(enum.StrEnum):
    """Cause of an attempt's end without success; the vocabulary of ``retry.on`` plus what is never retried."""

    CRASH = "crash"  # a rank exited non-zero or by a signal, or setup failed
    NODE_FAILURE = "node_failure"  # a node or its agent went away
    PREEMPTED = "preempted"  # asked to go, saved or not, should run again
    TIMEOUT = "timeout"  # time limit reached
    CANCELLED = "cancelled"  # by a person
    LAUNCH = "launch"  # could not be started at all (rejected options, missing interpreter)


_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_LONGEST_EXCEPTION = 200  # characters: a reason is a line of a list, and the message of a notification


@dataclass(frozen=True)
class RankFailure:
    """The first failure of an attempt: which rank, how it ended, and the end of its output."""

    rank: int | None
    node: int
    host: str
    exit_code: int | None = None
    signal: str | None = None  # "SIGKILL"
    at: float = 0.0
    log_tail: str = ""
    stall: str = ""  # what the runtime's watchdog said before

    @property
    def summary(self) -> str:
        """Return one line: ``rank 1 on node-a exited with 42``."""
        who = f"rank {self.rank}" if self.rank is not None else f"node {self.node}"
        how = f"was killed by {self.signal}" if self.signal else f"exited with {self.exit_code}"
        return f"{who} on {self.host} {how}" + (f"; {self.stall}" if self.stall else "")

    @property
    def exception(self) -> str:
        """Return the exception of the last traceback in the output: its last line, or the first of a long message."""
        _, traceback, after = self.log_tail.rpartition(_TRACEBACK)
        if not traceback:
            return ""
        # Frames are indented; a message may have lines of its own, and the script's output may follow.
        said = next((line for line in after.splitlines() if _EXCEPTION.fullmatch(line)), "")
        return said if len(said) <= _LONGEST_EXCEPTION else said[: _LONGEST_EXCEPTION - 1] + "…"

    @property
    def reason(self) -> str:
        """Return the exception, where there is one, and the summary: ``ValueError: x (rank 1 on a exited with 1)``.

        The exception comes first, because lists cut what does not fit at its end.
        """
        return f"{self.exception} ({self.summary})" if self.exception else self.summary

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankFailure:
        """From ``first_failure`` of an exit record; unknown keys are ignored."""
        return cls(
            data.get("rank"),
            int(data.get("node", 0)),
            str(data.get("host", "")),
            data.get("exit_code"),
            data.get("signal"),
            float(data.get("at") or 0.0),
            str(data.get("log_tail") or ""),
            str(data.get("stall") or ""),
        )


@dataclass(frozen=True)
class AttemptExit:
    """Exit of a whole attempt, merged from the exit records of its nodes."""

    succeeded: bool
    cause: Cause | None
    reason: str
    exit_status: int
    first_failure: RankFailure | None = None
    started_at: float | None = None
    ended_at: float | None = None
    hosts: tuple[str, ...] = ()
    complete: bool = True  # every node has written its record
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    lost_nodes: tuple[int, ...] = ()  # that went away, where other nodes could tell

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form for the ledger."""
        data = asdict(self)
        data["cause"] = self.cause.value if self.cause else None
        data["hosts"], data["lost_nodes"] = list(self.hosts), list(self.lost_nodes)
        data["ranks"] = {str(rank): dict(record) for rank, record in self.ranks.items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttemptExit:
        """Inverse of `to_dict`."""
        failure = data.get("first_failure")
        return cls(
            succeeded=bool(data["succeeded"]),
            cause=Cause(data["cause"]) if data.get("cause") else None,
            reason=str(data.get("reason", "")),
            exit_status=int(data["exit_status"]),
            first_failure=RankFailure.from_dict(failure) if failure else None,
            started_at=data.get("started_at"),
            ended_at=data.get("ended_at"),
            hosts=tuple(data.get("hosts", ())),
            complete=bool(data.get("complete", True)),
            ranks={int(rank): record for rank, record in data.get("ranks", {}).items()},
            lost_nodes=tuple(data.get("lost_nodes", ())),
        )


# Which outcome speaks for the attempt when nodes disagree: what a person did, then what the platform did, then what
# the program did. A crash that follows from a preemption notice is a consequence, not the cause.
_PRECEDENCE = ("cancelled", "preempted", "timeout", "launch", "crash", "node_failure", "peer")


def is_exit(record: Mapping[str, Any]) -> bool:
    """Return whether *record* can be judged by: it says which node ended, and how."""
    return record.get("node", -1) >= 0 and record.get("outcome") in (*_PRECEDENCE, "succeeded")


def _outcome(record: Mapping[str, Any]) -> str:
    outcome = str(record["outcome"])
    # A node that was stopped because a peer fell silent is the only witness of the node failure.
    return "node_failure" if outcome == "peer" and record.get("peer_lost") else outcome


def merge(records: Sequence[Mapping[str, Any]], nnodes: int) -> AttemptExit | None:
    """Return the verdict over the exit records of one incarnation (same restart) of an attempt; `None` without records.

    Incomplete sets are judged by what is there: a success needs every node, a failure only one.
    """
    if not records:
        return None
    without = {int(node) for r in records for node in r.get("lost_nodes", ())}  # an elastic gang went on without them
    records = [r for r in records if int(r["node"]) not in without]
    ordered = sorted(records, key=lambda r: (float(r.get("ended_at") or 0.0), int(r["node"])))
    outcomes = [_outcome(r) for r in ordered]
    complete = len({int(r["node"]) for r in records} | without) >= nnodes
    ranks = {int(k): v for r in ordered for k, v in (r.get("ranks") or {}).items()}
    started = min((float(r["started_at"]) for r in ordered if r.get("started_at")), default=None)
    ended = max((float(r["ended_at"]) for r in ordered if r.get("ended_at")), default=None)
    hosts = tuple(str(r.get("host", "")) for r in sorted(records, key=lambda r: int(r["node"])))
    lost = tuple(sorted({int(r["lost_node"]) for r in records if r.get("lost_node") is not None}))
    if all(o == "succeeded" for o in outcomes):
        return AttemptExit(True, None, "", 0, None, started, ended, hosts, complete, ranks)
    speaker = next(o for o in _PRECEDENCE if o in outcomes)
    cause = Cause.NODE_FAILURE if speaker in ("node_failure", "peer") else Cause(speaker)
    own = [r for r, o in zip(ordered, outcomes, strict=True) if o == speaker]
    failures = [RankFailure.from_dict(r["first_failure"]) for r in own if r.get("first_failure")]
    first = min(failures, key=lambda f: f.at, default=None)
    reason = first.reason if first and cause is Cause.CRASH else str(own[0].get("reason") or speaker)
    if cause in (Cause.CRASH, Cause.TIMEOUT, Cause.NODE_FAILURE):
        reason += "".join(f"; {r.get('host', '')}: {r['gpu_errors']}" for r in ordered if r.get("gpu_errors"))
    status = next(
        (
            int(r.get("exit_status") or 1)
            for r in own
            if r.get("first_failure") and first and r["first_failure"].get("at") == first.at
        ),
        int(own[0].get("exit_status") or 1),
    )
    return AttemptExit(False, cause, reason, status, first, started, ended, hosts, complete, ranks, lost)


@dataclass(frozen=True)
class LogSelector:
    """Selector of one log of an attempt: a rank's, that of a node's agent and launcher, or of what starts agents."""

    rank: int | None = None
    node: int | None = None
    launcher: bool = False

    def __post_init__(self) -> None:
        if (self.rank is not None) + (self.node is not None) + self.launcher != 1:
            raise ValueError("a log selector names a rank, a node or the launcher")


@dataclass(frozen=True)
class LogChunk:
    """A piece of one log. ``offset`` is the byte position of ``data[0]``; the next read starts at `end`."""

    selector: LogSelector
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Return where the next chunk starts, in bytes."""
        return self.offset + len(self.data)
