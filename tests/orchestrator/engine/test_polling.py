from __future__ import annotations

import pytest

from orc.orchestrator.ledger.polls import LONGEST_S, SHORTEST_S, next_interval, spread


def test_the_interval_grows_while_nothing_happens_and_is_short_again_when_something_does():
    found = [0.0]
    for _ in range(12):
        found.append(next_interval(found[-1], changed=False))
    assert found[1:4] == [SHORTEST_S, 3.0, 4.5]
    assert found[-1] == LONGEST_S
    assert next_interval(LONGEST_S, changed=True) == SHORTEST_S


def test_a_cluster_that_does_not_answer_is_asked_less_often_sooner():
    assert next_interval(8.0, changed=False, failed=True) > next_interval(8.0, changed=False)
    assert next_interval(50.0, changed=False, failed=True) == LONGEST_S


@pytest.mark.parametrize(("random", "expected"), [(0.0, 54.0), (0.5, 60.0), (1.0, 66.0)])
def test_intervals_of_many_processes_are_spread(random, expected):
    assert spread(60.0, random) == pytest.approx(expected)
