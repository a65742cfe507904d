"""Status of an attempt, merged from the records on several hosts. Pure.

Each host has its own agent's records and copies of some of the others', so one that can be reached speaks for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orc.launchers.agent.records import checked
from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.attempts.records import is_exit
from orc.launchers.backends.ssh.verdict import NodeStatus

# Clocks that differ by less are left alone: records then keep the times that the logs show.
CLOCK_SKEW_S = 5.0
_TIMES = ("at", "started_at", "ended_at")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class HostStatus:
    """Status of one attempt on one host, or the reason why there is none."""

    host: str
    answer: Mapping[str, Any] | None = None  # of `host_program.status_of`
    why: str = ""
    ahead_s: float = 0.0  # by how much its clock is ahead of ours

    @property
    def present(self) -> bool:
        """True when the attempt's files are there."""
        return self.answer is not None and bool(self.answer["there"])

    @property
    def alive(self) -> bool:
        """True while its agent of the attempt runs."""
        return self.present and bool((self.answer or {}).get("alive"))

    @property
    def silence_s(self) -> float | None:
        """Seconds since its agent, which is there, gave its last sign."""
        found: float | None = (self.answer or {}).get("silence")
        return found if self.alive else None

    @property
    def lease(self) -> Record | None:
        """Lease of this host's own agent of the attempt; `None` where that has not been there."""
        return self.record(f"node-{(self.answer or {}).get('node')}/lease.json") if self.present else None

    def record(self, name: str) -> Record | None:
        """Return one of the records in the attempt's directory there."""
        found = (self.answer or {}).get("records", {}).get(name)
        return checked(found) if isinstance(found, dict) else None

    def age(self, name: str) -> float | None:
        """Return how long ago a record was written there, in seconds."""
        found: float | None = (self.answer or {}).get("ages", {}).get(name)
        return found


def merge_records(directory: str, hosts: Sequence[str], statuses: Mapping[str, HostStatus]) -> AttemptRecords:
    """Return the newest record of each node: its own host's, else the newest copy. Hosts are named as in the cluster.

    Times are moved to our clock where the writer's is known to be wrong, so that they can be compared.
    """
    by_name: dict[str, dict[int, Record]] = {"lease": {}, "heartbeat": {}, "exit": {}}
    for node, host in enumerate(hosts):
        for name, records in by_name.items():
            found = _newest(f"node-{node}/{name}.json", statuses, host)
            if found and (name != "exit" or is_exit(found)):
                records[node] = _named(found, hosts, _ahead(statuses, host))
    stop = _newest("stop-r0.json", statuses, hosts[0]) if hosts else None
    if stop is not None:
        writer = int(stop.get("node", -1))
        stop = _named(stop, hosts, _ahead(statuses, hosts[writer]) if 0 <= writer < len(hosts) else 0.0)
    exits = by_name["exit"]
    behind = left_behind(exits)
    for node in behind:
        exits.pop(node, None)  # how it ended, cut off from the others, says nothing about them
    config = {"nnodes": len(hosts) - len(behind)}
    cancel = _newest("cancel.json", statuses, hosts[0]) if hosts else None
    return AttemptRecords(
        directory=directory,
        config=config,
        cancel=cancel,
        leases=by_name["lease"],
        heartbeats=by_name["heartbeat"],
        exits=exits,
        stop=stop,
    )


def left_behind(exits: Mapping[int, Record]) -> set[int]:
    """Return the nodes that node 0 lost and went on without, as elastic jobs do."""
    return {int(node) for node in exits.get(0, {}).get("lost_nodes") or ()}


def nodes_of(hosts: Sequence[str], statuses: Mapping[str, HostStatus]) -> list[NodeStatus]:
    """Return the status of each node."""
    found = []
    first = _newest("node-0/exit.json", statuses, hosts[0]) if hosts else None
    behind = left_behind({0: first} if first else {})
    present = [status for status in statuses.values() if status.present]
    for number, host in enumerate(hosts):
        own = statuses.get(host, HostStatus(host, why="it is not asked"))
        mine = [own] if own.answer is not None else present
        found.append(
            NodeStatus(
                host=host,
                reached=own.answer is not None,
                present=own.present,
                started=any(status.record(f"node-{number}/lease.json") for status in mine),
                alive=own.alive,
                ended=any(status.record(f"node-{number}/exit.json") for status in present),
                left_behind=number in behind,
                silence_s=own.silence_s if own.answer is not None else _silence(number, present),
                silent_why=own.why,
            )
        )
    return found


def _silence(node: int, present: Sequence[HostStatus]) -> float | None:
    """Return the age of the newest sign of *node*; without one, the time since the attempt was prepared."""
    for name in (f"node-{node}/heartbeat.json", f"node-{node}/lease.json"):
        ages = [age for status in present if (age := status.age(name)) is not None]
        if ages:
            return min(ages)
    return min((float((status.answer or {})["age"]) for status in present), default=None)


def _newest(name: str, statuses: Mapping[str, HostStatus], owner: str) -> Record | None:
    """Return the owner's own record, else the copy that was written last."""
    own = statuses.get(owner)
    if own is not None and (found := own.record(name)) is not None:
        return found
    copies = [(status.age(name) or 0.0, status.host, status) for status in statuses.values() if status.record(name)]
    return min(copies)[2].record(name) if copies else None


def _ahead(statuses: Mapping[str, HostStatus], host: str) -> float:
    status = statuses.get(host)
    ahead = status.ahead_s if status is not None and status.answer is not None else 0.0
    return ahead if abs(ahead) > CLOCK_SKEW_S else 0.0


def _named(record: Record, hosts: Sequence[str], ahead_s: float) -> dict[str, Any]:
    """Return *record* with times by our clock and the cluster's names of hosts."""
    node = record.get("node")
    changed: dict[str, Any] = dict(record)
    for key in _TIMES:
        if isinstance(changed.get(key), (int, float)):
            changed[key] -= ahead_s
    if isinstance(node, int) and 0 <= node < len(hosts) and "host" in changed:
        changed["host"] = hosts[node]
    if isinstance(changed.get("first_failure"), Mapping):
        changed["first_failure"] = _named(changed["first_failure"], hosts, ahead_s)
    if isinstance(changed.get("ranks"), Mapping):
        changed["ranks"] = {rank: _named(end, hosts, ahead_s) for rank, end in changed["ranks"].items()}
    return changed
