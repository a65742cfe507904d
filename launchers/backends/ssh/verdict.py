"""Verdict on an attempt on SSH hosts, from its merged records and the hosts that could be reached. Pure.

A host that does not answer says nothing: its agent may well be alive, with others watching it. Only when all
that can be asked have ended, and the silent ones must have noticed and ended themselves, is the attempt over.
An agent that is there and gives no sign is stopped, with the guard that would end it (SIGSTOP, a freezer of cgroups):
what the others have ended goes no further there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.backends.verdict import ended, facts_of

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
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
    verdict = records.verdict()
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
