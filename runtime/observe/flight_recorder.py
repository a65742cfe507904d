"""The collectives that this process has issued, as torch's flight recorder has them, and which rank is behind in them.

Under NCCL a call returns before its collective has run, so a rank that waits for others sits wherever the script next
waits for its device. What each rank has *issued* tells the waiting ranks from the one that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENTRIES = 100  # of the newest, in a report


@dataclass(frozen=True)
class LastCollective:
    """Last collective that a rank has issued in one process group.

    Attributes:
        number: how many it is; all ranks of the group count alike.
        operation: what it is: ``all_reduce``.
        done: it has ended, and every one before it.
    """

    number: int
    operation: str
    done: bool


def flight_record() -> dict[str, Any] | None:
    """Return what the flight recorder has of this process; `None` where it has nothing. Callable from any thread."""
    try:
        import torch._C._distributed_c10d as c10d
    except ImportError:  # a torch without torch.distributed
        return None
    found: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # of NCCL; of gloo, which records apart
        dump = getattr(c10d, name, None)
        if dump is not None:
            found.append(json.loads(dump()))
    entries = [entry for record in found for entry in record.get("entries") or ()]
    if not entries:
        return None
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    groups = {name: group for record in found for name, group in (record.get("pg_config") or {}).items()}
    return {"version": found[0].get("version"), "pg_config": groups, "entries": entries}


def newest(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return *record* with its `ENTRIES` newest entries, for a report."""
    return None if record is None else {**record, "entries": record["entries"][-ENTRIES:]}


def last_collectives(record: Mapping[str, Any] | None) -> dict[str, LastCollective]:
    """Return the last collective of each process group in *record*, by backend, and the group's name and members."""
    collectives: dict[str, LastCollective] = {}
    config = (record or {}).get("pg_config") or {}
    for entry in (record or {}).get("entries") or ():
        if entry.get("is_p2p"):
            continue  # only the two ranks of a pair count those
        name = str((entry.get("process_group") or [""])[0])
        backend, _, operation = str(entry.get("profiling_name", "")).partition(":")
        group = f"{backend} group {name} {(config.get(name) or {}).get('ranks', '')}".rstrip()
        before = collectives.get(group)
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        number = int(entry.get("collective_seq_id", 0))
        if before is None or number >= before.number:
            collectives[group] = LastCollective(number, operation, done and (before is None or before.done))
    return collectives


def behind(issued: Mapping[int, Mapping[str, LastCollective]]) -> dict[int, tuple[str, int, int]]:
    """Return the ranks that have issued fewer collectives of a group than others of it have.

    A rank that waits in one group has not got to the collectives of its other groups either: it counts only where no
    other rank does.

    Args:
        issued: by rank, what `last_collectives` gives.

    Returns:
        By rank: the group, how many collectives of it this rank has issued, and how many another one has.
    """
    most: dict[str, int] = {}
    for groups in issued.values():
        for name, last in groups.items():
            most[name] = max(most.get(name, 0), last.number)
    late = {
        rank: next((name, last.number, most[name]) for name, last in groups.items() if last.number < most[name])
        for rank, groups in issued.items()
        if any(last.number < most[name] for name, last in groups.items())
    }
    idle = {rank: how for rank, how in late.items() if all(last.done for last in issued[rank].values())}
    return idle or late
