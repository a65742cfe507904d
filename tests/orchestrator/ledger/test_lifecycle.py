from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.orchestrator.ledger.lifecycle import (
    ATTEMPT_KINDS,
    RULES,
    AttemptState,
    Event,
    IllegalTransition,
    JobState,
    Kind,
    Position,
    advance,
    fold,
)

HAPPY = (
    Event(Kind.QUEUED),
    Event(Kind.PREPARED, 1),
    Event(Kind.SUBMITTING, 1),
    Event(Kind.ACCEPTED, 1),
    Event(Kind.RUNNING, 1),
    Event(Kind.SUCCEEDED, 1),
    Event(Kind.JOB_SUCCEEDED),
)


def test_the_plain_life_of_a_job():
    states = [fold(HAPPY[:n]).job for n in range(1, 8)]
    assert states == ["QUEUED", "PREPARED", "SUBMITTING", "PENDING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert fold(HAPPY).attempts == {1: AttemptState.SUCCEEDED}


def test_a_cut_off_submission_is_adopted():
    history = fold([*HAPPY[:3], Event(Kind.AMBIGUOUS, 1), Event(Kind.NOT_FOUND, 1), Event(Kind.ADOPTED, 1)])
    assert (history.job, history.attempts) == (JobState.PENDING, {1: AttemptState.PENDING})


def test_a_cut_off_submission_that_left_nothing_is_sent_again_under_the_same_number():
    history = fold([*HAPPY[:3], Event(Kind.AMBIGUOUS, 1), Event(Kind.RELEASED, 1), *HAPPY[2:]])
    assert (history.job, history.attempts) == (JobState.SUCCEEDED, {1: AttemptState.SUCCEEDED})


@pytest.mark.parametrize("end", [Kind.PREEMPTED, Kind.LOST, Kind.FAILED])
def test_a_retry_brings_a_second_attempt(end):
    history = fold([*HAPPY[:5], Event(end, 1), Event(Kind.RETRY), Event(Kind.PREPARED, 2)])
    assert (history.job, history.attempts) == (JobState.PREPARED, {1: end.name, 2: "PREPARED"})


@pytest.mark.parametrize("end", [Kind.SUCCEEDED, Kind.CANCELLED])
def test_what_succeeded_or_was_cancelled_is_not_run_again(end):
    with pytest.raises(IllegalTransition):
        fold([*HAPPY[:5], Event(end, 1), Event(Kind.RETRY)])


def test_an_event_names_the_newest_attempt_or_none():
    for wrong in (Event(Kind.RUNNING, 2), Event(Kind.RUNNING, None), Event(Kind.CANCEL_REQUESTED, 1)):
        with pytest.raises(IllegalTransition, match="does not concern"):
            fold([*HAPPY[:4], wrong])


def test_every_kind_of_event_has_a_rule():
    assert set(RULES) == set(Kind)


def test_a_job_fails_for_no_event_that_only_reports_trouble_in_asking():
    for kind in (Kind.POLL_ERROR, Kind.NOT_FOUND, Kind.AMBIGUOUS, Kind.DUPLICATE):
        assert RULES[kind].job_to is None
        assert RULES[kind].attempt_to in (None, AttemptState.AMBIGUOUS)


positions = st.builds(
    Position,
    st.sampled_from([None, *JobState]),
    st.integers(0, 3),
    st.sampled_from([None, *AttemptState]),
)


@given(positions, st.sampled_from(Kind))
def test_nothing_changes_the_state_of_what_has_ended(position, kind):
    number = position.number + (kind is Kind.PREPARED) if kind in ATTEMPT_KINDS else None
    try:
        after = advance(position, Event(kind, number))
    except IllegalTransition:
        return
    if position.job is not None and position.job.terminal:
        assert after.job is position.job
    if position.attempt is not None and position.attempt.terminal and kind is not Kind.PREPARED:
        assert after.attempt is position.attempt


@given(positions, st.sampled_from(Kind))
def test_the_number_of_attempts_grows_by_one_and_only_when_one_is_prepared(position, kind):
    number = position.number + (kind is Kind.PREPARED) if kind in ATTEMPT_KINDS else None
    try:
        after = advance(position, Event(kind, number))
    except IllegalTransition:
        return
    assert after.number == position.number + (kind is Kind.PREPARED)


@pytest.mark.parametrize(
    ("history", "event", "message"),
    [
        ((), Event(Kind.CANCEL_REQUESTED), "cancel_requested is not allowed while the job is unknown"),
        (HAPPY, Event(Kind.RUNNING, 1), "running is not allowed while the job is SUCCEEDED"),
        (HAPPY[:1], Event(Kind.SUBMITTING, 1), "submitting is not allowed while the job is QUEUED"),
        (HAPPY[:5], Event(Kind.JOB_SUCCEEDED), "job_succeeded is not allowed while the attempt is RUNNING"),
        (HAPPY[:1], Event(Kind.RETRY), "retry is not allowed while the job is QUEUED"),
    ],
)
def test_a_refused_event_says_which_and_in_which_state(history, event, message):
    with pytest.raises(IllegalTransition) as refused:
        fold([*history, event])
    assert str(refused.value) == message


def test_an_event_of_an_attempt_needs_an_attempt():
    with pytest.raises(IllegalTransition) as refused:
        advance(Position(JobState.PENDING, 0, None), Event(Kind.RUNNING, 0))
    assert str(refused.value) == "running is not allowed while the attempt is unknown"
