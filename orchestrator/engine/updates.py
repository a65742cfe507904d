"""Transitions: the change of a job that follows from an observation, an end or a deadline; the retry policy. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from orc.launchers.backends.base import Cause, Observation, Phase
from orc.launchers.errors import SpecError
from orc.orchestrator.ledger.lifecycle import AttemptState, Event, Kind
from orc.orchestrator.ledger.records import JobRecord, JobUpdate

if TYPE_CHECKING:
    from orc.orchestrator.engine.log_rules import LogMatch


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


ON_REQUEST = "on request"


def deadline_at(deadline: float | str | None, now: float) -> float | None:
    """Return the time that ``deadline:`` of a job submitted *now* means. Raises `SpecError` for one that has passed."""
    if deadline is None:
        return None
    if not isinstance(deadline, str):
        return now + deadline
    at = datetime.fromisoformat(deadline).timestamp()
    if at <= now:
        raise SpecError(f"its deadline, {deadline}, has passed already", hint="set another one: --set deadline=12h")
    return at


def has_passed(job: JobRecord, now: float) -> bool:
    """Return True for a live job whose deadline has passed and that is not cancelled yet."""
    return job.deadline_at is not None and job.deadline_at <= now and job.cancel_requested_at is None


def cancel_reason(job: JobRecord) -> str:
    """Return the reason that *job* is being cancelled."""
    asked, deadline = job.cancel_requested_at, job.deadline_at
    if asked is None or deadline is None or asked < deadline:
        return ON_REQUEST
    return f"its deadline has passed ({datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC)"


def retry_policy(spec: Mapping[str, Any]) -> RetryPolicy:
    """Return the ``retry:`` section of a job's stored specification."""
    retry = spec["retry"]
    return RetryPolicy(int(retry["max_attempts"]), tuple(retry["on"]), float(retry["backoff"]))


def update_from_observation(
    job: JobRecord,
    seen: Observation,
    now: float,
    *,
    policy: RetryPolicy | None = None,
    earlier: Sequence[str] = (),
    logged: LogMatch | None = None,
    loss_window_s: float = 0.0,
) -> JobUpdate:
    """Return the update of *job*, whose newest attempt was *seen* at the backend.

    *policy* and *earlier* (causes of the attempts before this one, oldest first) are needed when the attempt has ended.
    *logged* is the line for which the job has a rule. For *loss_window_s* an attempt that is lost may come back.
    """
    attempt = job.attempt
    if attempt is None:
        raise ValueError(f"{job.id} has no attempt that could be seen")
    if seen.phase is Phase.UNKNOWN:
        return JobUpdate(job_set=_changed(job, reason=seen.reason) if seen.reason else {})
    if seen.phase is Phase.LOST and job.cancel_requested_at is None:
        gone_at = now if attempt.first_negative_at is None else attempt.first_negative_at
        if 0 <= now - gone_at < loss_window_s:
            reason = f"it is gone ({seen.reason}); LOST unless it comes back within {loss_window_s:g} s"
            return JobUpdate(
                job_set=_changed(job, reason=reason), attempt_set=_changed(attempt, first_negative_at=gone_at)
            )
    if seen.phase.ended:
        if policy is None:
            raise ValueError("the end of an attempt needs the retry policy")
        return _of_end(job, seen, now, policy, earlier, logged)
    attempt_set = _changed(
        attempt,
        reason=seen.reason,
        hosts=seen.hosts or attempt.hosts,
        progress=dict(seen.progress) if seen.progress else attempt.progress,
        restarts=max(seen.restarts, attempt.restarts),
        started_at=_in_order(attempt.submitted_at, seen.started_at) or attempt.started_at,
        first_negative_at=None,
    )
    job_set = _changed(job, reason=seen.reason, poll_error_at=None)
    events = _moves(attempt.state, attempt.restarts, attempt.number, seen)
    if (stall := seen.progress.get("stall")) and stall != attempt.progress.get("stall"):
        events = (*events, Event(Kind.STALLED, attempt.number, {"reason": stall}))
    return JobUpdate(events, job_set, attempt_set)


def _moves(state: AttemptState, restarts: int, number: int, seen: Observation) -> tuple[Event, ...]:
    """Return the events between *state* and a phase that has not ended."""
    events: list[Event] = []
    went_back = seen.restarts > restarts or (state is AttemptState.RUNNING and seen.phase is Phase.PENDING)
    if went_back:
        events.append(Event(Kind.REQUEUED, number, {"restarts": seen.restarts, "reason": seen.reason}))
    if seen.phase is Phase.RUNNING and (went_back or state is AttemptState.PENDING):
        events.append(Event(Kind.RUNNING, number, {"hosts": list(seen.hosts)}))
    return tuple(events)


def _of_end(
    job: JobRecord,
    seen: Observation,
    now: float,
    policy: RetryPolicy,
    earlier: Sequence[str],
    logged: LogMatch | None,
) -> JobUpdate:
    submitted_at = job.attempt.submitted_at if job.attempt else None
    started_at = _in_order(submitted_at, seen.started_at)
    ended_at = _in_order(started_at or submitted_at, seen.ended_at) or now
    attempt_set: dict[str, Any] = {
        "reason": seen.reason,
        "ended_at": ended_at,
        "exit": seen.exit.to_dict() if seen.exit else None,
        "restarts": seen.restarts,
    }
    if seen.hosts:
        attempt_set["hosts"] = list(seen.hosts)
    if started_at is not None:
        attempt_set["started_at"] = started_at
    if seen.progress:
        attempt_set["progress"] = dict(seen.progress)
    if seen.phase is Phase.SUCCEEDED:
        events = (Event(Kind.SUCCEEDED, job.number), Event(Kind.JOB_SUCCEEDED))
        return JobUpdate(events, _over(seen.reason, ended_at), attempt_set)
    kind, cause = _end_of_attempt(seen)
    counts_as = retry_cause(str(cause), seen.exit.ranks if seen.exit else {})
    reason = seen.reason
    if logged is not None:
        reason = "; ".join(filter(None, [seen.reason, logged.reason]))
        attempt_set["reason"] = reason
        policy = policy.after(logged.action, counts_as)
    follow_up = update_after_end(job, cause, reason, now, ended_at, policy, earlier, counts_as=counts_as)
    blamed = blamed_hosts(job, seen) if cause is Cause.NODE_FAILURE else ()
    if logged is not None and logged.action == "exclude_node":
        blamed = tuple(dict.fromkeys([*blamed, *logged.hosts]))
    data = {"cause": str(cause), "reason": reason}
    ended = Event(kind, job.number, {**data, "failed_hosts": list(blamed)} if blamed else data)
    return JobUpdate((ended, *follow_up.events), follow_up.job_set, {**attempt_set, "cause": str(cause)}, blamed)


def blamed_hosts(job: JobRecord, seen: Observation) -> tuple[str, ...]:
    """Hosts to blame for a node failure: those that the backend names, and those of the nodes that others missed."""
    handle = job.attempt.handle if job.attempt else None
    hosts = (handle or {}).get("hosts", ())
    lost = seen.exit.lost_nodes if seen.exit else ()
    return tuple(dict.fromkeys([*seen.failed_hosts, *(hosts[node] for node in lost if node < len(hosts))]))


def _end_of_attempt(seen: Observation) -> tuple[Kind, Cause]:
    if seen.phase is Phase.LOST:
        return Kind.LOST, Cause.NODE_FAILURE
    if seen.phase is Phase.CANCELLED or seen.cause is Cause.CANCELLED:
        return Kind.CANCELLED, Cause.CANCELLED
    if seen.cause is Cause.PREEMPTED:
        return Kind.PREEMPTED, Cause.PREEMPTED
    return Kind.FAILED, seen.cause or Cause.CRASH


def update_after_end(
    job: JobRecord,
    cause: Cause,
    reason: str,
    now: float,
    ended_at: float,
    policy: RetryPolicy,
    earlier: Sequence[str],
    *,
    counts_as: str = "",
) -> JobUpdate:
    """Return the update of a job whose newest attempt has ended for *cause*: cancelled, another attempt, or failed.

    *counts_as* is what the retry policy takes for the cause, where that is something else (`retry_cause`).
    """
    if cause is Cause.CANCELLED or job.cancel_requested_at is not None:
        why = reason if job.cancel_requested_at is None or cause is not Cause.CANCELLED else cancel_reason(job)
        return JobUpdate((Event(Kind.JOB_CANCELLED, None, {"reason": why}),), _over(why, ended_at))
    decision = decide(policy, [*earlier, counts_as or str(cause)])
    if isinstance(decision, GiveUp):
        why = f"{reason} ({decision.reason})" if decision.reason else reason
        return JobUpdate((Event(Kind.JOB_FAILED, None, {"cause": str(cause), "reason": why}),), _over(why, ended_at))
    at = now + with_jitter(decision.delay_s, job.attempt.marker if job.attempt else job.id)
    retry = Event(Kind.RETRY, None, {"cause": str(cause), "reason": decision.reason, "at": at})
    why = f"waiting to run again after {reason}" if reason else f"waiting to run again after {cause}"
    return JobUpdate((retry,), {"reason": why, "next_attempt_at": at, "poll_error_at": None})


def update_for_rejection(job: JobRecord, reason: str, now: float) -> JobUpdate:
    """Return the update of a job whose newest attempt, or next one, was rejected: it has failed for good."""
    data = {"cause": str(Cause.LAUNCH), "reason": reason}
    over = Event(Kind.JOB_FAILED, None, data)
    if job.attempt is None or job.attempt.state.terminal:
        return JobUpdate((over,), _over(reason, now))
    return JobUpdate((Event(Kind.FAILED, job.number, data), over), _over(reason, now), {**data, "ended_at": now})


def update_for_early_cancel(job: JobRecord, now: float) -> JobUpdate:
    """Return the update of a job that was cancelled before its backend had anything of it."""
    again = job.attempt is not None and job.attempt.state.terminal
    why = f"cancelled before it was submitted{' again' if again else ''}"
    if (passed := cancel_reason(job)) != ON_REQUEST:
        why = f"{passed}; {why}"
    over = Event(Kind.JOB_CANCELLED, None, {"reason": why})
    if job.attempt is None or job.attempt.state.terminal:
        return JobUpdate((over,), _over(why, now))
    cause = str(Cause.CANCELLED)
    cancelled = Event(Kind.CANCELLED, job.number, {"cause": cause, "reason": why})
    return JobUpdate((cancelled, over), _over(why, now), {"cause": cause, "reason": why, "ended_at": now})


def _over(reason: str, ended_at: float) -> dict[str, Any]:
    return {"reason": reason, "ended_at": ended_at, "next_attempt_at": None, "poll_error_at": None}


def _in_order(earlier: float | None, later: float | None) -> float | None:
    """*later*, but not before *earlier*: the clocks of two machines are never quite the same."""
    return later if earlier is None or later is None else max(earlier, later)


def _changed(record: Any, **values: Any) -> dict[str, Any]:
    """Return the *values* that differ from what *record* has."""
    return {name: value for name, value in values.items() if getattr(record, name) != value}
