"""Parsers of squeue's, sacct's and sinfo's output. Pure.

The output is asked for field by field with ``|`` between them (JSON differs between Slurm versions), times as seconds
since the epoch (``SLURM_TIME_FORMAT=%s``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from orc.launchers.backends.reports import PartitionReport

# i: job id (12, 12_3 of an array, 12+1 of a heterogeneous job), j: name, T: state, V: submitted, S: start, e: end,
# l: time limit, N: nodes, P: partition, D: number of nodes, r: reason (last: free text).
SQUEUE_FORMAT = "%i|%j|%T|%V|%S|%e|%l|%N|%P|%D|%r"
SACCT_FORMAT = "JobID,JobName,State,Submit,Start,End,Timelimit,NodeList,ExitCode"
SACCT_FORMAT_NEWER = f"{SACCT_FORMAT},FailedNode"  # 22.05 and older have no such field, and say nothing at all then

# P: partition, a: availability, D: nodes, A: nodes allocated/idle, C: cores allocated/idle/other/total, l: time limit,
# G: generic resources, c: cores of each node. With ``--exact``, a line for each sort of node.
SINFO_FORMAT = "%P|%a|%D|%A|%C|%l|%G|%c"

_JOB_ID = re.compile(r"\d+(?:_\d+|\+\d+)?")
_WAITING_ELEMENTS = re.compile(r"(?P<job>\d+)_\[(?P<ranges>[0-9,-]+)(?:%\d+)?\]")

WAITING = frozenset({
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
    "LAUNCH_FAILED", "RECONFIG_FAIL", "POWER_UP_NODE", "EXPEDITING",
})  # fmt: skip
ENDED = frozenset({
    "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
    "REVOKED",
})  # fmt: skip


@dataclass(frozen=True)
class JobRow:
    """Job, or element of an array, in squeue (now) or sacct (last known)."""

    job_id: str  # "12", or "12_3"; the components of a heterogeneous job are one row, by the number of the first
    name: str
    state: str  # the first word: "CANCELLED by 0" is "CANCELLED"
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None  # of a running job the time at which its limit ends
    limit_s: float | None = None
    nodes: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None  # sacct only
    signal: int | None = None
    failed_node: str = ""
    by: str = ""  # who cancelled, as a user id
    starts_at: float | None = None  # squeue only: when it is expected to start, while it waits
    partition: str = ""  # squeue only
    wanted: int = 0  # squeue only: number of nodes

    @property
    def waiting(self) -> bool:
        """True while in the queue and not started (again)."""
        return self.state in WAITING

    @property
    def ended(self) -> bool:
        """True when Slurm will do nothing more for it."""
        return self.state in ENDED

    @property
    def refused(self) -> bool:
        """True after a rejection by `sbatch` (BadConstraints): the row stays for minutes and never has a node."""
        return self.state == "FAILED" and not self.nodes


def parse_squeue(text: str) -> list[JobRow]:
    """Return the rows of ``squeue --noheader --format=SQUEUE_FORMAT``; lines of another shape are left out."""
    rows = []
    for job_id, name, state, submitted, start, end, limit, nodes, partition, count, reason in _lines(text, 11):
        times = (_epoch(submitted), None if state in WAITING else _epoch(start), _epoch(end), duration(limit))
        row = JobRow(job_id, name, state, *times, expand_nodes(nodes), "" if reason == "None" else reason)
        expected = _epoch(start) if state in WAITING else None
        rows.append(replace(row, starts_at=expected, partition=partition, wanted=number(count)))
    return _joined(rows)


def parse_sacct(text: str) -> list[JobRow]:
    """Return the rows of ``sacct --parsable2 --noheader --allocations --format=SACCT_FORMAT`` (or the newer one)."""
    rows = []
    for job_id, name, state, submitted, start, end, limit, nodes, code in _lines(text, 9):
        code, _, failed = code.partition("|")
        word, _, rest = state.partition(" ")
        exit_code, _, number = code.partition(":")
        times = (_epoch(submitted), _epoch(start), _epoch(end), duration(limit))
        row = JobRow(job_id, name, word.rstrip("+"), *times, () if nodes == "None assigned" else expand_nodes(nodes))
        row = replace(
            row,
            exit_code=int(exit_code) if exit_code.isdigit() else None,
            signal=int(number) if number.isdigit() and number != "0" else None,
            failed_node="" if failed in ("None assigned", "Unknown") else failed,
            by=rest.removeprefix("by "),
        )
        rows.append(row)
    return _joined(rows)


def job_number(job_id: str) -> tuple[int, int]:
    """Return the sort key of a job id: older ones come first."""
    job, _, element = job_id.partition("_")
    return int(job), int(element or 0)


# How the components of a heterogeneous job may have ended, the one that explains the others' end first.
_WORST = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "TIMEOUT", "DEADLINE", "FAILED", "CANCELLED")


def _joined(rows: list[JobRow]) -> list[JobRow]:
    """Return the components of heterogeneous jobs (12+0, 12+1) as one row each, under the number of the first."""
    components: dict[tuple[str, str, float | None], list[JobRow]] = {}
    whole = []
    for row in rows:
        job, plus, _ = row.job_id.partition("+")
        if plus:  # one number twice: the components of the run before a requeue, in accounting
            components.setdefault((job, row.name, row.submitted_at), []).append(row)
        else:
            whole.append(row)
    return whole + [_one(job, parts) for (job, _, _), parts in components.items()]


def _one(job: str, parts: list[JobRow]) -> JobRow:
    parts = sorted(parts, key=lambda row: int(row.job_id.partition("+")[2]))
    leader = parts[0]
    if all(row.ended for row in parts):
        state = next((s for s in _WORST if any(row.state == s for row in parts)), leader.state)
    else:
        state = "COMPLETING" if leader.ended else leader.state
    return replace(
        leader,
        job_id=job,
        state=state,
        nodes=tuple(node for row in parts for node in row.nodes),
        wanted=sum(row.wanted for row in parts),
        failed_node=next((row.failed_node for row in parts if row.failed_node), ""),
        by=next((row.by for row in parts if row.by), ""),
    )


def parse_sinfo(text: str) -> list[PartitionReport]:
    """Return the partitions in ``sinfo --noheader --exact --format=SINFO_FORMAT``, in order, without other lines."""
    found: dict[str, PartitionReport] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 8:
            continue
        name, state, nodes, use, cores, limit, gres, cpus = fields
        plain = name.removesuffix("*")
        before = found.get(plain) or PartitionReport(plain, name.endswith("*"), state, 0, 0, 0, 0, duration(limit))
        _, idle_cores, _, all_cores = (number(part) for part in [*cores.split("/"), "", "", "", ""][:4])
        kinds = dict(zip(before.gres, before.gres_nodes, strict=True))
        if gres not in ("", "(null)"):
            kinds[gres] = kinds.get(gres, 0) + number(nodes)
        found[plain] = replace(
            before,
            nodes=before.nodes + number(nodes),
            idle_nodes=before.idle_nodes + number(use.partition("/")[2]),
            cpus=before.cpus + all_cores,
            idle_cpus=before.idle_cpus + idle_cores,
            gres=tuple(kinds),
            gres_nodes=tuple(kinds.values()),
            most_cpus=max(before.most_cpus, number(cpus)),
        )
    return list(found.values())


def number(text: str) -> int:
    """Return the whole number that *text* is; 0 for any other text."""
    return int(text) if text.isdigit() else 0


def _lines(text: str, count: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        fields = line.split("|", count - 1)
        if len(fields) != count:
            continue
        fields = [field.strip() for field in fields]
        if _JOB_ID.fullmatch(fields[0]):
            yield fields
        elif match := _WAITING_ELEMENTS.fullmatch(fields[0]):  # accounting keeps those that never started together
            for element in expand_nodes(f"{match['job']}_[{match['ranges']}]"):
                yield [element, *fields[1:]]


def _epoch(text: str) -> float | None:
    return float(text) if text.isdigit() and text != "0" else None


_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")


def duration(text: str) -> float | None:
    """Return the seconds of ``[days-][hours:]minutes:seconds``; `None` for ``UNLIMITED``, ``Partition_Limit`` etc."""
    match = _LIMIT.fullmatch(text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)


_RANGE = re.compile(r"(?P<before>[^\[]*)\[(?P<ranges>[0-9,-]+)\](?P<after>.*)")


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in ``node[1-2,04],gpu7``; text of another shape stays as it is."""
    return tuple(name for part in re.split(r",(?![^\[]*\])", text) if part for name in _expand(part))


def _expand(part: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if not match:
        return [part]
    names = []
    for piece in match["ranges"].split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += _expand(f"{match['before']}{number:0{len(first)}}{match['after']}")
    return names
