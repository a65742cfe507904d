"""Verdict on an attempt on SSH hosts, from its merged records and the hosts that could be reached. Pure.

A host that does not answer says nothing: its agent may well be alive, with others watching it. Only when all
that can be asked have ended, and the silent ones must have noticed and ended themselves, is the attempt over.
An agent that is there and gives no sign is stopped, with the guard that would end it (SIGSTOP, a freezer of cgroups):
what the others have ended goes no further there.

Each host has its own agent's records and copies of some of the others', so one that can be reached speaks for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orc.launchers.agent.records import checked
from orc.launchers.attempts.reader import AttemptRecords
from orc.launchers.attempts.records import is_exit
from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.verdict import ended, facts_of

if TYPE_CHECKING:
    from orc.launchers.attempts.records import AttemptExit

# An agent that has lost its peers gives its ranks at most this long to end.
FAILURE_GRACE_S = 5.0
# On top of that: killing, a slow machine, and the pace at which agents look around.
MARGIN_S = 10.0
# An agent whose peers never come gives up after this long.
STARTUP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class NodeStatus:
    """Status of one node of an attempt."""

    host: str  # by its name in the cluster
    reached: bool
    present: bool = False  # the attempt's directory is there (where it was reached)
    started: bool = False  # it has a lease: on its host, or as others were told
    alive: bool = False  # its agent runs (where it was reached)
    ended: bool = False  # it has an exit record: on its host, or as others were told
    left_behind: bool = False  # the others went on without it
    silence_s: float | None = None  # since its agent's last sign; where it was not reached, since others heard of it
    silent_why: str = ""  # why it was not reached


def fence_s(node: NodeStatus, peer_timeout_s: float) -> float:
    """Return how long after the last contact an unreachable node has certainly ended, in seconds."""
    return (peer_timeout_s if node.started else STARTUP_TIMEOUT_S) + FAILURE_GRACE_S + MARGIN_S


def judge(
    records: AttemptRecords, nodes: Sequence[NodeStatus], *, peer_timeout_s: float, refused: str = ""
) -> Observation:
    """Return the observation of one attempt, whose *records* are the newest of what all hosts that answered have.

    *refused* is why an agent that is missing could not be started just now.
    """
    hosts = tuple(node.host for node in nodes)
    common: dict[str, Any] = {**facts_of(records), "hosts": hosts}
    away = [node for node in nodes if not node.reached]
    # An agent that has written its record only stays for the others' sake.
    running = [node for node in nodes if node.alive and not node.ended]
    stopped = [node for node in running if (node.silence_s or 0.0) > fence_s(node, peer_timeout_s)]
    if len(stopped) < len(running) or (stopped and not any(node.ended for node in nodes)):
        return _going_on(records, nodes, common, refused, stopped)
    if len(away) == len(nodes):
        return Observation(Phase.UNKNOWN, reason=f"no answer from {_listed(away)}: {away[0].silent_why}", hosts=hosts)
    open_ = [node for node in away if not node.ended]
    for node in open_:
        left = fence_s(node, peer_timeout_s) - (node.silence_s or 0.0)
        if left > 0:
            reason = f"no answer from {node.host}; what runs there ends by itself within {left:.0f} s"
            return Observation(Phase.UNKNOWN, reason=reason, hosts=hosts)
    return _over(records, nodes, common)


def _going_on(
    records: AttemptRecords,
    nodes: Sequence[NodeStatus],
    common: dict[str, Any],
    refused: str,
    stopped: Sequence[NodeStatus],
) -> Observation:
    away = [node.host for node in nodes if not node.reached and not node.ended]
    missing = [node.host for node in nodes if node.reached and not node.started]
    reason = next((state for state in records.states if state in ("setup", "waiting")), "")
    if missing:
        reason = f"starting on {', '.join(missing)}" + (f": {refused}" if refused else "")
    elif away:
        reason = "; ".join(filter(None, [reason, f"no answer from {', '.join(away)}"]))
    reason = "; ".join(filter(None, [reason, *map(_stopped, stopped)]))
    phase = Phase.PENDING if missing and not records.heartbeats else Phase.RUNNING
    return Observation(phase, reason=reason, **common)


def _over(records: AttemptRecords, nodes: Sequence[NodeStatus], common: dict[str, Any]) -> Observation:
    verdict = records.verdict
    lost = [node for node in nodes if not node.ended and not node.left_behind]
    behind = [node for node in nodes if node.left_behind]
    if verdict is not None and behind:  # it ended on the others, and it is still to be said whom they have lost
        said = f"it had gone on without {_listed(behind)}"
        verdict = replace(verdict, reason="; ".join(filter(None, [verdict.reason, said])))
    if verdict is not None and not lost and verdict.cause is not Cause.NODE_FAILURE:
        return ended(verdict, common)
    if verdict is not None and verdict.cause in (Cause.CANCELLED, Cause.LAUNCH, Cause.TIMEOUT, Cause.PREEMPTED):
        return ended(verdict, common)  # it was over before the others went silent, or it did not matter any more
    failed_hosts = _failed_hosts(verdict, nodes, lost)
    # The ranks that lose a peer crash before anybody notices that its node is gone.
    reason = _why(failed_hosts, nodes, verdict)
    exit_ = replace(verdict, succeeded=False, cause=Cause.NODE_FAILURE, reason=reason) if verdict else None
    return Observation(
        Phase.LOST,
        Cause.NODE_FAILURE,
        reason,
        exit_,
        ended_at=(verdict.ended_at if verdict else None) or records.last_sign,
        failed_hosts=tuple(node.host for node in failed_hosts),
        **common,
    )


def _failed_hosts(
    verdict: AttemptExit | None, nodes: Sequence[NodeStatus], lost: Sequence[NodeStatus]
) -> list[NodeStatus]:
    """Return the nodes that went away, as far as can be known: those without a record, else those that others lost."""
    if lost:
        away = [node for node in lost if not node.reached]
        return away or list(lost)
    named = verdict.lost_nodes if verdict else ()
    return [node for number, node in enumerate(nodes) if number in named]


def _why(failed_hosts: Sequence[NodeStatus], nodes: Sequence[NodeStatus], verdict: AttemptExit | None) -> str:
    said = verdict.reason if verdict else ""
    parts = []
    for node in failed_hosts:
        if node.ended:
            continue  # the record of the one that missed it says more
        if not node.reached:
            parts.append(f"no answer from {node.host}" + (f" ({node.silent_why})" if node.silent_why else ""))
        elif not node.present:
            parts.append(f"the attempt's directory on {node.host} was removed")
        elif not node.started:
            parts.append(f"{node.host} was never started")
        elif node.alive:
            parts.append(_stopped(node))
        else:
            parts.append(f"the agent on {node.host} was killed or the host restarted")
    return "; ".join(filter(None, [*parts, said])) or "no host knows the attempt any more"


def _stopped(node: NodeStatus) -> str:
    return f"the agent on {node.host} is there and gives no sign: it is stopped"


def _listed(nodes: Sequence[NodeStatus]) -> str:
    return ", ".join(node.host for node in nodes)


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
