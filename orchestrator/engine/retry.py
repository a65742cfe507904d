"""Retry policy: the decision about another attempt after one that failed. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# A preempted attempt did nothing wrong, so it does not use up `max_attempts`; a job that never gets anywhere must
# still come to an end.
MAX_PREEMPTIONS = 100
# The time limit was reached and all ranks had saved for the next attempt (`retry_cause`): as innocent as a preemption.
HANDED_OVER = "handed_over"
# A rank was told that its checkpoint does not fit the job (`orc.runtime.checkpoint.errors`): the next would be, too.
REFUSED = "refused"
REFUSED_EXIT = 78
SAVED_EXIT = 75  # what a rank exits with that has saved and wants to run again
MAX_BACKOFF_S = 600.0
JITTER = 0.25  # of a backoff, by which it may be shorter: many jobs that one fault ended do not all come back at once


@dataclass(frozen=True)
class RetryPolicy:
    """The job file's ``retry:`` section."""

    max_attempts: int
    on: Collection[str]  # causes
    backoff_s: float

    def after(self, action: str, cause: str) -> RetryPolicy:
        """Return the policy for an attempt that has ended for *cause* and has logged a line with a rule."""
        cause = "timeout" if cause == HANDED_OVER else cause
        if action == "fail":
            return replace(self, on=tuple(each for each in self.on if each != cause))
        if action in ("retry", "exclude_node"):
            return replace(self, on=(*self.on, cause))
        return self


@dataclass(frozen=True)
class Retry:
    """Run it again, *delay_s* seconds from now."""

    delay_s: float
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Do not run it again."""

    reason: str  # empty when there is nothing to add to the attempt's own reason


def decide(policy: RetryPolicy, causes: Sequence[str]) -> Retry | GiveUp:
    """Decide about another attempt after those that ended for *causes* (oldest first, the last one included).

    Preemptions, and time limits that all ranks had saved for, are retried after the plain backoff; other causes after
    a backoff that doubles with each counted attempt up to `MAX_BACKOFF_S`.
    """
    cause = causes[-1]
    if cause == REFUSED:
        return GiveUp("another attempt would end the same way")
    innocent = {name: sum(c == name for c in causes) for name in ("preempted", HANDED_OVER)}
    counted = len(causes) - sum(innocent.values())
    if ("timeout" if cause == HANDED_OVER else cause) not in policy.on:
        return GiveUp("")
    if cause in innocent:
        what = "preempted" if cause == "preempted" else "saved at the time limit"
        if innocent[cause] > MAX_PREEMPTIONS:
            return GiveUp(f"{what} {innocent[cause]} times")
        return Retry(min(policy.backoff_s, MAX_BACKOFF_S), f"{what} ({innocent[cause]})")
    if counted >= policy.max_attempts:
        return GiveUp(f"attempt {counted} of {policy.max_attempts}" if policy.max_attempts > 1 else "")
    # The exponent is bounded so that a long history cannot overflow a float.
    delay = min(policy.backoff_s * 2.0 ** min(counted - 1, 32), MAX_BACKOFF_S)
    return Retry(delay, f"{cause}: attempt {counted} of {policy.max_attempts}")


def with_jitter(delay_s: float, attempt: str) -> float:
    """Return a backoff of *delay_s* for the attempt after *attempt* (a marker): up to a quarter less."""
    return delay_s * (1.0 - JITTER * (zlib.crc32(attempt.encode()) % 1000) / 1000)


def retry_cause(cause: str, ranks: Mapping[Any, Mapping[str, Any]]) -> str:
    """Return the cause that `decide` counts for an attempt whose *ranks* have these exit records."""
    codes = [record.get("exit_code") for record in ranks.values()]
    if cause == "crash" and REFUSED_EXIT in codes:
        return REFUSED
    saved = SAVED_EXIT in codes and all(code in (0, SAVED_EXIT) for code in codes)
    return HANDED_OVER if cause == "timeout" and saved else cause
