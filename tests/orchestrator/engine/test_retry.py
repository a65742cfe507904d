from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orc.orchestrator.engine.updates import (
    HANDED_OVER,
    MAX_BACKOFF_S,
    MAX_PREEMPTIONS,
    REFUSED,
    GiveUp,
    Retry,
    RetryPolicy,
    decide,
    retry_cause,
    with_jitter,
)

ALL = ("crash", "node_failure", "preempted", "timeout")


def test_a_cause_that_is_not_listed_ends_the_job():
    assert decide(RetryPolicy(3, ("node_failure",), 10.0), ["crash"]) == GiveUp("")


def test_the_backoff_doubles_up_to_its_bound():
    policy = RetryPolicy(100, ALL, 10.0)
    delays = [decide(policy, ["crash"] * n).delay_s for n in range(1, 10)]
    assert delays == [10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_jobs_that_one_fault_ended_do_not_all_come_back_at_once_and_none_comes_late():
    delays = [with_jitter(100.0, f"orc-job{n}-a1") for n in range(200)]
    assert 75 < min(delays) < 77
    assert 98 < max(delays) <= 100
    assert len(set(delays)) > 100
    assert with_jitter(100.0, "orc-job7-a1") == delays[7]


def test_the_last_allowed_attempt_is_the_last():
    policy = RetryPolicy(3, ALL, 1.0)
    assert isinstance(decide(policy, ["crash"] * 2), Retry)
    assert decide(policy, ["crash"] * 3) == GiveUp("attempt 3 of 3")


def test_preemptions_do_not_use_up_attempts_and_wait_the_plain_backoff():
    policy = RetryPolicy(2, ALL, 10.0)
    assert decide(policy, ["preempted"] * 7) == Retry(10.0, "preempted (7)")
    assert isinstance(decide(policy, ["preempted"] * 7 + ["crash"]), Retry)
    assert isinstance(decide(policy, ["crash"] + ["preempted"] * 7 + ["crash"]), GiveUp)


def test_a_job_that_is_always_preempted_comes_to_an_end():
    policy = RetryPolicy(1, ALL, 0.0)
    assert isinstance(decide(policy, ["preempted"] * MAX_PREEMPTIONS), Retry)
    assert decide(policy, ["preempted"] * (MAX_PREEMPTIONS + 1)) == GiveUp("preempted 101 times")


def test_time_limits_that_all_had_saved_for_do_not_use_up_attempts():
    policy = RetryPolicy(2, ("timeout",), 10.0)
    assert decide(policy, [HANDED_OVER] * 5) == Retry(10.0, "saved at the time limit (5)")
    assert isinstance(decide(policy, [HANDED_OVER] * 5 + ["timeout"]), Retry)
    assert decide(policy, ["timeout", HANDED_OVER, "timeout"]) == GiveUp("attempt 2 of 2")
    assert decide(RetryPolicy(2, ("preempted",), 10.0), [HANDED_OVER]) == GiveUp("")
    assert decide(policy, [HANDED_OVER] * (MAX_PREEMPTIONS + 1)) == GiveUp("saved at the time limit 101 times")


@pytest.mark.parametrize(
    ("cause", "codes", "counts_as"),
    [
        ("timeout", [75, 75], HANDED_OVER),
        ("timeout", [0, 75], HANDED_OVER),
        ("timeout", [75, 143], "timeout"),
        ("timeout", [75, None], "timeout"),
        ("timeout", [0, 0], "timeout"),
        ("timeout", [], "timeout"),
        ("crash", [75, 75], "crash"),
        ("crash", [78, None], REFUSED),
        ("node_failure", [78, None], "node_failure"),
    ],
)
def test_what_a_cause_counts_as_is_told_by_the_exit_statuses_of_the_ranks(cause, codes, counts_as):
    assert retry_cause(cause, {rank: {"exit_code": code} for rank, code in enumerate(codes)}) == counts_as


def test_what_was_refused_for_good_is_not_tried_again():
    policy = RetryPolicy(5, ALL, 1.0)
    assert decide(policy, ["node_failure", REFUSED]) == GiveUp("another attempt would end the same way")


@pytest.mark.parametrize("cause", ["launch", "cancelled"])
def test_what_no_policy_can_list_is_never_retried(cause):
    assert isinstance(decide(RetryPolicy(1000, ALL, 0.0), [cause]), GiveUp)


@given(
    st.integers(1, 1000),
    st.floats(0, 1e9),
    st.lists(st.sampled_from([*ALL, HANDED_OVER, "launch"]), min_size=1, max_size=2000),
)
def test_every_history_has_a_finite_answer(max_attempts, backoff_s, causes):
    decision = decide(RetryPolicy(max_attempts, ALL, backoff_s), causes)
    if isinstance(decision, Retry):
        assert 0 <= decision.delay_s <= MAX_BACKOFF_S
        innocent = ("preempted", HANDED_OVER)
        assert sum(cause not in innocent for cause in causes) < max_attempts or causes[-1] in innocent


def test_a_retry_says_why_and_the_only_attempt_adds_nothing():
    policy = RetryPolicy(3, ALL, 1.0)
    assert decide(policy, ["preempted", "node_failure"]) == Retry(1.0, "node_failure: attempt 1 of 3")
    assert decide(RetryPolicy(1, ALL, 1.0), ["crash"]) == GiveUp("")
