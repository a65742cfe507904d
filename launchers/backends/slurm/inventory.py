"""Parsers of sinfo's partitions and of squeue's expected starts. Pure."""

from __future__ import annotations

import re

from orc.launchers.backends.base import PartitionReport, QueuedJob
from orc.launchers.backends.slurm.queue_rows import JobRow, duration
from orc.launchers.backends.slurm.verdict import waiting_reason

# P: partition, a: availability, D: nodes, A: nodes allocated/idle, C: cores allocated/idle/other/total, l: time limit,
# G: generic resources. A line for each sort of node.
SINFO_FORMAT = "%P|%a|%D|%A|%C|%l|%G"
# i: job id, j: name, T: state, P: partition, D: nodes, S: start (expected, where it has not started), r: reason.
START_FORMAT = "%i|%j|%T|%P|%D|%S|%r"

_FIRST = re.compile(r"(\d+(?:_\d+)?)(?:\+0)?")  # of the components of a heterogeneous job the first


def parse_sinfo(text: str) -> list[PartitionReport]:
    """Return the partitions in ``sinfo --noheader --format=SINFO_FORMAT``, in order; other lines are left out."""
    found: dict[str, PartitionReport] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 7:
            continue
        name, state, nodes, use, cores, limit, gres = fields
        plain = name.removesuffix("*")
        before = found.get(plain)
        _, idle_cores, _, all_cores = (_number(part) for part in [*cores.split("/"), "", "", "", ""][:4])
        kinds = dict(zip(before.gres, before.gres_nodes, strict=True)) if before else {}
        if gres not in ("", "(null)"):
            kinds[gres] = kinds.get(gres, 0) + _number(nodes)
        found[plain] = PartitionReport(
            name=plain,
            default=name.endswith("*"),
            state=state,
            nodes=_number(nodes) + (before.nodes if before else 0),
            idle_nodes=_number(use.partition("/")[2]) + (before.idle_nodes if before else 0),
            cpus=all_cores + (before.cpus if before else 0),
            idle_cpus=idle_cores + (before.idle_cpus if before else 0),
            limit_s=duration(limit),
            gres=tuple(kinds),
            gres_nodes=tuple(kinds.values()),
        )
    return list(found.values())


def parse_expected(text: str) -> list[QueuedJob]:
    """Return the jobs in ``squeue --noheader --format=START_FORMAT``; lines of another shape are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 6)]
        if len(fields) != 7 or not (match := _FIRST.fullmatch(fields[0])):
            continue
        _, name, state, partition, nodes, start, reason = fields
        job_id = match[1]
        row = JobRow(job_id, name, state, reason="" if reason == "None" else reason)
        found.append(
            QueuedJob(
                marker=name,
                native_id=job_id,
                state=state,
                partition=partition,
                nodes=_number(nodes),
                reason=waiting_reason(row) if row.waiting else "",
                starts_at=float(start) if start.isdigit() and start != "0" else None,
            )
        )
    return found


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
