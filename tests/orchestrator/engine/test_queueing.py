from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend

from orc.launchers.errors import NoRoom, RenderError
from orc.orchestrator.engine.placement import WaitingJob, placement_in_order, room_backoff, taken_slots, waiting_reason
from orc.orchestrator.ledger.records import Reservation


def job(nodes=1, slots=1, hosts=None):
    least, _, most = str(nodes).partition(":")
    options = {"ssh": {"hosts": hosts}} if hosts else {}
    return SimpleNamespace(
        resources=SimpleNamespace(min_nodes=int(least), max_nodes=int(most or least), nproc=slots, options=options)
    )


@pytest.fixture
def four(tmp_path):
    return FakeBackend(tmp_path, hosts={"n1": 2, "n2": 2, "n3": 2, "n4": 2})


def reservation(host, job_id="a-aaaaaa", slots=1):
    return Reservation("lab", host, job_id, 1, 0, slots, 0.0)


def test_a_job_that_can_never_run_is_told_so_even_while_others_wait(four):
    with pytest.raises(RenderError):
        placement_in_order(four, job(5), {}, ahead=[WaitingJob("old", job(4, 2))])


def test_an_older_job_that_waits_keeps_younger_ones_off_its_hosts(four):
    older = WaitingJob("old-aaaaaa", job(4, 2))
    with pytest.raises(NoRoom, match="old-aaaaaa is older and waits for the same hosts"):
        placement_in_order(four, job(1), {"n1": 1}, ahead=[older])


def test_a_younger_job_passes_on_hosts_that_the_older_one_cannot_use(four):
    older = WaitingJob("old", job(2, 2, hosts=["n1", "n2"]))
    assert placement_in_order(four, job(1), {"n1": 1}, ahead=[older]).hosts == ("n3",)


def test_an_older_job_that_somebody_is_placing_gets_its_hosts_first(four):
    older = WaitingJob("old", job(2, 2), in_hand=True)
    assert placement_in_order(four, job(1), {}, ahead=[older]).hosts == ("n3",)


def test_an_older_job_that_fits_and_that_nobody_sends_stops_nobody(four):
    assert placement_in_order(four, job(1), {}, ahead=[WaitingJob("old", job(4, 2))]).hosts == ("n1",)


def test_a_third_job_waits_behind_the_second_as_well(four):
    first, second = (
        WaitingJob("first", job(2, 2, hosts=["n1", "n2"])),
        WaitingJob("second", job(2, 2, hosts=["n2", "n3"])),
    )
    assert placement_in_order(four, job(1), {"n1": 2}, ahead=[first, second]).hosts == ("n4",)
    with pytest.raises(NoRoom):
        placement_in_order(four, job(1, hosts=["n3"]), {"n1": 2}, ahead=[first, second])


def test_a_job_that_does_not_fit_anyway_says_what_is_missing_and_not_who_is_older(four):
    with pytest.raises(NoRoom, match="2 hosts with 2 free slots"):
        placement_in_order(
            four, job(2, 2), dict.fromkeys(("n1", "n2", "n3"), 1), ahead=[WaitingJob("old", job(1, 2, hosts=["n1"]))]
        )


def test_slots_of_one_host_add_up_but_for_the_jobs_own():
    held = [reservation("n1"), reservation("n1", "b-bbbbbb", 2), reservation("n2", "me-cccccc")]
    assert taken_slots(held, besides="me-cccccc") == {"n1": 3}


def test_the_reason_names_those_who_hold_the_hosts():
    held = [reservation("n1"), reservation("n2", "b-bbbbbb"), reservation("n9", "far-dddddd")]
    text = waiting_reason(NoRoom("1 host is needed"), ["n1", "n2"], held, besides="b-bbbbbb")
    assert text == "waiting for room: 1 host is needed (held by a-aaaaaa)"
    assert waiting_reason(NoRoom("waiting for 1 host"), [], held) == "waiting for 1 host"
    many = [reservation("n1", f"j{i}") for i in range(7)]
    assert waiting_reason(NoRoom("waiting"), ["n1"], many).endswith("(held by j0, j1, j2, j3, j4 and 2 more)")


def test_the_time_between_tries_grows_with_the_wait_and_is_bounded():
    found = [room_backoff(waited, "a-aaaaaa") for waited in (0, 8, 40, 10_000)]
    assert found == [found[0], found[0], found[0] * 5, found[0] * 30]
    many = [room_backoff(8, f"job-{n}") for n in range(100)]
    assert 1.5 <= min(many) < 1.6 < 2.4 < max(many) <= 2.5


def test_hosts_that_failed_a_job_are_left_out_whoever_waits(four):
    assert placement_in_order(four, job(1), {}, avoid=["n1"]).hosts == ("n2",)
    older = WaitingJob("old", job(2, 2, hosts=["n1", "n2"]))
    assert placement_in_order(four, job(1), {"n1": 1}, ahead=[older], avoid=["n3"]).hosts == ("n4",)
    # The older job would fit but for the host that failed it: it waits, and closes what it could run on.
    failed = WaitingJob("old", job(2, 2, hosts=["n1", "n2", "n3"]), ("n1",))
    assert placement_in_order(four, job(1), {"n2": 1}, ahead=[failed]).hosts == ("n4",)
    waits = WaitingJob("old", job(1, 2, hosts=["n3"]))
    with pytest.raises(NoRoom, match="1 hosts with 1 free slots"):
        placement_in_order(four, job(1, hosts=["n1", "n2"]), {"n2": 2, "n3": 1}, ahead=[waits], avoid=["n1"])


def test_an_older_job_that_can_never_run_does_not_hide_those_behind_it(four):
    never, waits = WaitingJob("never", job(5)), WaitingJob("waits", job(2, 2, hosts=["n1", "n2"]))
    assert placement_in_order(four, job(1), {"n1": 1}, ahead=[never, waits]).hosts == ("n3",)


def test_as_many_holders_as_are_shown_are_all():
    several = [reservation("n1", f"j{i}") for i in range(5)]
    assert waiting_reason(NoRoom("waiting"), ["n1"], several) == "waiting (held by j0, j1, j2, j3, j4)"
