"""The life of a job and of its attempts, as a pure state machine over the ledger's events.

The table `RULES` is the whole truth: which event is allowed in which states, and what it makes of them. The ledger
stores events and keeps the resulting states beside them as a projection; `fold` computes the same from the events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


class JobState(enum.StrEnum):
    """State of a job."""

    QUEUED = "QUEUED"  # known, no attempt in flight: new, or waiting for its next attempt
    PREPARED = "PREPARED"  # an attempt is durable; nothing was sent yet
    SUBMITTING = "SUBMITTING"  # an attempt is being sent, or was sent by a process that died meanwhile
    PENDING = "PENDING"  # the backend has it, it does not run yet
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True when the job will not change any more."""
        return self in TERMINAL_JOB


class AttemptState(enum.StrEnum):
    """State of one attempt."""

    PREPARED = "PREPARED"
    SUBMITTING = "SUBMITTING"
    AMBIGUOUS = "AMBIGUOUS"  # the submission was cut off: the backend may or may not have it
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    PREEMPTED = "PREEMPTED"  # asked to go by the platform; should run again
    LOST = "LOST"  # was there, is gone, left no exit record
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        """True when the attempt will not change any more."""
        return self in TERMINAL_ATTEMPT


TERMINAL_JOB = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
ACTIVE_JOB = frozenset(JobState) - TERMINAL_JOB
TERMINAL_ATTEMPT = frozenset(
    {
        AttemptState.SUCCEEDED,
        AttemptState.FAILED,
        AttemptState.PREEMPTED,
        AttemptState.LOST,
        AttemptState.CANCELLED,
    }
)
_UNSUCCESSFUL = TERMINAL_ATTEMPT - {AttemptState.SUCCEEDED}


class Kind(enum.StrEnum):
    """Kinds of events. The first group concerns an attempt, the second the job as a whole."""

    PREPARED = "prepared"
    PLACED = "placed"  # given other hosts than before, or hosts again
    SUBMITTING = "submitting"
    ACCEPTED = "accepted"  # the backend returned a handle
    AMBIGUOUS = "ambiguous"  # cut off between sending and the handle
    NOT_FOUND = "not_found"  # looked for by its marker, not seen (yet)
    ADOPTED = "adopted"  # found by its marker
    RELEASED = "released"  # certainly not there: may be sent again
    RUNNING = "running"
    REQUEUED = "requeued"  # the backend itself put it back
    STALLED = "stalled"  # the runtime's watchdog has reported a stall
    CANCEL_SENT = "cancel_sent"
    DUPLICATE = "duplicate"  # a second copy was sent; the agents' lease keeps it from running
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    LOST = "lost"
    CANCELLED = "cancelled"

    QUEUED = "queued"
    WAITING = "waiting"  # there is no room on its cluster
    CANCEL_REQUESTED = "cancel_requested"
    POLL_ERROR = "poll_error"  # the backend could not be asked; never a failure of the job
    RETRY = "retry"
    JOB_SUCCEEDED = "job_succeeded"
    JOB_FAILED = "job_failed"
    JOB_CANCELLED = "job_cancelled"


class IllegalTransition(Exception):
    """An event that is not allowed in the present state: the work of a bug or of a stale read of the ledger."""


@dataclass(frozen=True)
class Position:
    """All that decides whether an event is allowed: the job's state and its newest attempt."""

    job: JobState | None = None  # None: the job does not exist yet
    number: int = 0  # of the newest attempt; 0 when there is none
    attempt: AttemptState | None = None


@dataclass(frozen=True)
class Event:
    """Event in a job's history."""

    kind: Kind
    attempt: int | None = None  # the attempt's number, for events of the first group
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """States in which an event is allowed, and those it leads to. A target of `None` leaves the state as it is."""

    job_from: frozenset[JobState | None]
    job_to: JobState | None = None
    attempt_from: frozenset[AttemptState | None] | None = None  # None: the attempt does not matter
    attempt_to: AttemptState | None = None


def _jobs(*states: JobState | None) -> frozenset[JobState | None]:
    return frozenset(states)


def _attempts(*states: AttemptState | None) -> frozenset[AttemptState | None]:
    return frozenset(states)


_J, _A = JobState, AttemptState
_IN_FLIGHT = _jobs(_J.PREPARED, _J.SUBMITTING, _J.PENDING, _J.RUNNING)
_AT_BACKEND = _jobs(_J.PENDING, _J.RUNNING)
_SEEN = _attempts(_A.PENDING, _A.RUNNING)

RULES: Mapping[Kind, Rule] = {
    Kind.PREPARED: Rule(_jobs(_J.QUEUED), _J.PREPARED, _attempts(None, *_UNSUCCESSFUL), _A.PREPARED),
    Kind.PLACED: Rule(_jobs(_J.PREPARED), None, _attempts(_A.PREPARED), None),
    Kind.SUBMITTING: Rule(_jobs(_J.PREPARED), _J.SUBMITTING, _attempts(_A.PREPARED), _A.SUBMITTING),
    Kind.ACCEPTED: Rule(_jobs(_J.SUBMITTING), _J.PENDING, _attempts(_A.SUBMITTING, _A.AMBIGUOUS), _A.PENDING),
    Kind.AMBIGUOUS: Rule(_jobs(_J.SUBMITTING), None, _attempts(_A.SUBMITTING), _A.AMBIGUOUS),
    Kind.NOT_FOUND: Rule(_jobs(_J.SUBMITTING), None, _attempts(_A.AMBIGUOUS), None),
    Kind.ADOPTED: Rule(_jobs(_J.SUBMITTING), _J.PENDING, _attempts(_A.AMBIGUOUS), _A.PENDING),
    Kind.RELEASED: Rule(_jobs(_J.SUBMITTING), _J.PREPARED, _attempts(_A.SUBMITTING, _A.AMBIGUOUS), _A.PREPARED),
    Kind.RUNNING: Rule(_jobs(_J.PENDING), _J.RUNNING, _attempts(_A.PENDING), _A.RUNNING),
    Kind.REQUEUED: Rule(_AT_BACKEND, _J.PENDING, _SEEN, _A.PENDING),
    Kind.STALLED: Rule(_AT_BACKEND, None, _SEEN, None),
    Kind.CANCEL_SENT: Rule(_AT_BACKEND, None, _SEEN, None),
    Kind.DUPLICATE: Rule(frozenset(JobState), None, frozenset(AttemptState), None),
    Kind.SUCCEEDED: Rule(_AT_BACKEND, None, _SEEN, _A.SUCCEEDED),
    # Before the backend has it, an attempt fails by being refused.
    Kind.FAILED: Rule(_IN_FLIGHT, None, _attempts(_A.PREPARED, _A.SUBMITTING, *_SEEN), _A.FAILED),
    Kind.PREEMPTED: Rule(_AT_BACKEND, None, _SEEN, _A.PREEMPTED),
    Kind.LOST: Rule(_AT_BACKEND, None, _SEEN, _A.LOST),
    Kind.CANCELLED: Rule(_IN_FLIGHT, None, _attempts(_A.PREPARED, _A.AMBIGUOUS, *_SEEN), _A.CANCELLED),
    Kind.QUEUED: Rule(_jobs(None), _J.QUEUED),
    Kind.WAITING: Rule(_jobs(_J.QUEUED, _J.PREPARED), None, _attempts(None, _A.PREPARED, *_UNSUCCESSFUL)),
    Kind.CANCEL_REQUESTED: Rule(frozenset(ACTIVE_JOB)),
    Kind.POLL_ERROR: Rule(frozenset(ACTIVE_JOB)),
    Kind.RETRY: Rule(_IN_FLIGHT, _J.QUEUED, _attempts(_A.FAILED, _A.PREEMPTED, _A.LOST)),
    Kind.JOB_SUCCEEDED: Rule(_AT_BACKEND, _J.SUCCEEDED, _attempts(_A.SUCCEEDED)),
    Kind.JOB_FAILED: Rule(_IN_FLIGHT | {_J.QUEUED}, _J.FAILED, _attempts(None, *_UNSUCCESSFUL)),
    Kind.JOB_CANCELLED: Rule(frozenset(ACTIVE_JOB), _J.CANCELLED, _attempts(None, *_UNSUCCESSFUL)),
}

# Events that say something about one attempt and therefore carry its number.
ATTEMPT_KINDS = frozenset(list(Kind)[: list(Kind).index(Kind.QUEUED)])


def advance(position: Position, event: Event) -> Position:
    """Return the position after *event*. Raises `IllegalTransition` where the event is not allowed."""
    rule = RULES[event.kind]
    if position.job not in rule.job_from:
        raise IllegalTransition(f"{event.kind} is not allowed while the job is {position.job or 'unknown'}")
    if rule.attempt_from is not None and position.attempt not in rule.attempt_from:
        raise IllegalTransition(f"{event.kind} is not allowed while the attempt is {position.attempt or 'unknown'}")
    number = position.number + 1 if event.kind is Kind.PREPARED else position.number
    if event.attempt != (number if event.kind in ATTEMPT_KINDS else None):
        raise IllegalTransition(f"{event.kind} does not concern attempt {event.attempt} but attempt {number}")
    return replace(
        position,
        job=rule.job_to or position.job,
        number=number,
        attempt=rule.attempt_to or position.attempt,
    )


@dataclass(frozen=True)
class History:
    """States that follow from a sequence of events."""

    job: JobState | None
    attempts: Mapping[int, AttemptState]  # by number


def fold(events: Iterable[Event]) -> History:
    """Return the states that *events* (in order) lead to. Raises `IllegalTransition` for a history that cannot be."""
    position = Position()
    attempts: dict[int, AttemptState] = {}
    for event in events:
        position = advance(position, event)
        if position.attempt is not None:
            attempts[position.number] = position.attempt
    return History(position.job, attempts)
