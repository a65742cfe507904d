"""What several hosts say about one attempt, put together. Pure.

Each host has its own agent's records and copies of some of the others', so one that can be reached speaks for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.backends.ssh.verdict import Node

# Clocks that differ by less are left alone: records then keep the times that the logs show.
CLOCK_SKEW_S = 5.0
_TIMES = ("at", "started_at", "ended_at")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Sight:
    """What one host says about one attempt, or why it says nothing."""

    host: str
    answer: Mapping[str, Any] | None = None  # of `on_host.look_at`
    why: str = ""
    ahead_s: float = 0.0  # by how much its clock is ahead of ours

    @property
    def present(self) -> bool:
        """Whether the attempt's files are there."""
        return self.answer is not None and bool(self.answer["there"])

    @property
    def alive(self) -> bool:
        """Whether its agent of the attempt runs."""
        return self.present and bool((self.answer or {}).get("alive"))

    def record(self, name: str) -> Record | None:
        """One of the files in the attempt's directory there."""
        found: Record | None = (self.answer or {}).get("records", {}).get(name)
        return found

    def age(self, name: str) -> float | None:
        """How long ago it was written there, in seconds."""
        found: float | None = (self.answer or {}).get("ages", {}).get(name)
        return found


def merge_records(directory: str, hosts: Sequence[str], sights: Mapping[str, Sight]) -> AttemptRecords:
    """The newest record of each node: its own host's, else the newest copy. Hosts are named as in the cluster.

    Times are moved to our clock where the writer's is known to be wrong, so that they can be compared.
    """
    by_name: dict[str, dict[int, Record]] = {"lease": {}, "heartbeat": {}, "exit": {}}
    for node, host in enumerate(hosts):
        for name, records in by_name.items():
            if found := _newest(f"node-{node}/{name}.json", sights, host):
                records[node] = _named(found, hosts, _ahead(sights, host))
    stop = _newest("stop-r0.json", sights, hosts[0]) if hosts else None
    if stop is not None:
        writer = int(stop.get("node", -1))
        stop = _named(stop, hosts, _ahead(sights, hosts[writer]) if 0 <= writer < len(hosts) else 0.0)
    exits = by_name["exit"]
    behind = left_behind(exits)
    for node in behind:
        exits.pop(node, None)  # how it ended, cut off from the others, says nothing about them
    config = {"nnodes": len(hosts) - len(behind)}
    cancel = _newest("cancel.json", sights, hosts[0]) if hosts else None
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
    """Nodes that node 0 lost and went on without, as elastic jobs do."""
    return {int(node) for node in exits.get(0, {}).get("lost_nodes") or ()}


def nodes_of(hosts: Sequence[str], sights: Mapping[str, Sight]) -> list[Node]:
    """What is known of each node."""
    found = []
    first = _newest("node-0/exit.json", sights, hosts[0]) if hosts else None
    behind = left_behind({0: first} if first else {})
    told = [sight for sight in sights.values() if sight.present]
    for number, host in enumerate(hosts):
        own = sights.get(host, Sight(host, why="it is not asked"))
        mine = [own] if own.answer is not None else told
        found.append(
            Node(
                host=host,
                reached=own.answer is not None,
                present=own.present,
                started=any(sight.record(f"node-{number}/lease.json") for sight in mine),
                alive=own.alive,
                ended=any(sight.record(f"node-{number}/exit.json") for sight in told),
                left_behind=number in behind,
                silence_s=None if own.answer is not None else _silence(number, told),
                silent_why=own.why,
            )
        )
    return found


def _silence(node: int, told: Sequence[Sight]) -> float | None:
    """How long ago anybody heard of *node*; without a word from it, how long ago the attempt was prepared."""
    for name in (f"node-{node}/heartbeat.json", f"node-{node}/lease.json"):
        ages = [age for sight in told if (age := sight.age(name)) is not None]
        if ages:
            return min(ages)
    return min((float((sight.answer or {})["age"]) for sight in told), default=None)


def _newest(name: str, sights: Mapping[str, Sight], owner: str) -> Record | None:
    """The owner's own record, else the copy that was written last."""
    own = sights.get(owner)
    if own is not None and (found := own.record(name)) is not None:
        return found
    copies = [(sight.age(name) or 0.0, sight.host, sight) for sight in sights.values() if sight.record(name)]
    return min(copies)[2].record(name) if copies else None


def _ahead(sights: Mapping[str, Sight], host: str) -> float:
    sight = sights.get(host)
    ahead = sight.ahead_s if sight is not None and sight.answer is not None else 0.0
    return ahead if abs(ahead) > CLOCK_SKEW_S else 0.0


def _named(record: Record, hosts: Sequence[str], ahead_s: float) -> dict[str, Any]:
    """*record* with times by our clock and the cluster's names of hosts."""
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
