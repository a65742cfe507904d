"""Observations of an attempt, made from the records of its agents. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orc.launchers.attempts.records import Cause
from orc.launchers.backends.base import Observation, Phase

if TYPE_CHECKING:
    from orc.launchers.attempts.reader import AttemptRecords
    from orc.launchers.attempts.records import AttemptExit


def observe(records: AttemptRecords, *, alive: bool, lost: str = "its agents are gone") -> Observation:
    """Return the state of an attempt whose agents are *alive*, or can certainly write no record any more.

    Args:
        records: What the agents have written so far.
        alive: True while one of them runs, or is about to.
        lost: The reason for people, where they have ended without saying how.
    """
    common = facts_of(records)
    if alive and not records.complete:
        if not records.leases:
            return Observation(Phase.PENDING, reason="starting", **common)
        waiting = next((state for state in records.states if state in ("setup", "waiting")), "")
        return Observation(Phase.RUNNING, reason=waiting, **common)
    verdict = records.verdict
    if verdict is None or (verdict.succeeded and not records.complete) or verdict.cause is Cause.NODE_FAILURE:
        reason = verdict.reason if verdict and verdict.reason else lost
        return Observation(Phase.LOST, Cause.NODE_FAILURE, reason, verdict, ended_at=records.last_sign, **common)
    return ended(verdict, common)


def facts_of(records: AttemptRecords) -> dict[str, Any]:
    """Return the fields of an observation that do not depend on how the attempt goes."""
    return {
        "hosts": records.hosts,
        "started_at": records.started_at,
        "progress": records.progress,
        "restarts": records.restart,
    }


def ended(verdict: AttemptExit, common: dict[str, Any]) -> Observation:
    """Return the observation of an attempt that has ended as *verdict* describes."""
    found: dict[str, Any] = {"exit": verdict, "ended_at": verdict.ended_at, **common}
    if verdict.succeeded:
        return Observation(Phase.SUCCEEDED, reason=verdict.reason, **found)
    phase = Phase.CANCELLED if verdict.cause is Cause.CANCELLED else Phase.FAILED
    return Observation(phase, verdict.cause, verdict.reason, **found)


def with_cancellation(seen: Observation, records: AttemptRecords) -> Observation:
    """Return *seen*; what was lost after it was to end has been cancelled."""
    if records.cancel is None or seen.phase is not Phase.LOST:
        return seen
    return replace(seen, phase=Phase.CANCELLED, cause=Cause.CANCELLED, reason="cancelled")


def with_word(seen: Observation, told: Sequence[tuple[Cause, str, str]]) -> Observation:
    """Return *seen*, with what a platform has *told* of parts where agents left no word: cause, reason, host.

    With the first part that fails the others are told to end, and record a preemption: that is not the cause.
    """
    followed = seen.cause is Cause.PREEMPTED and seen.exit is not None and not seen.exit.complete
    if not told or not (followed or seen.phase is Phase.LOST):
        return seen
    cause, reason, host = next((each for each in told if each[0] is not Cause.PREEMPTED), told[0])
    lost = cause is Cause.NODE_FAILURE
    phase = Phase.LOST if lost else Phase.FAILED
    return replace(seen, phase=phase, cause=cause, reason=reason, failed_hosts=(host,) if lost else ())
