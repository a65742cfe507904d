"""The fixture that all multi-rank tests stand on."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed
RANKS_IMPORT = ("wave",)


def test_ranks_form_a_process_group_and_return_their_results(run_ranks):
    factor = 10

    def add():
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        return factor * int(total), dist.get_rank(), os.environ["LOCAL_WORLD_SIZE"]

    assert run_ranks(2, add) == [(30, 0, "2"), (30, 1, "2")]


def test_ranks_find_imported_what_their_module_asks_for(run_ranks):
    def loaded():
        return "wave" in sys.modules, os.getppid()

    (first, server), (second, same) = run_ranks(2, loaded)
    assert first
    assert second
    assert server == same == run_ranks(1, loaded)[0][1], "one process imports it for all"


def test_an_exception_is_raised_with_the_traceback_of_its_rank(run_ranks):
    def fail_on_one():
        if os.environ["RANK"] == "1":
            print("about to fail")
            raise ValueError("broken here")

    with pytest.raises(AssertionError, match=r"(?s)rank 1.*fail_on_one.*ValueError: broken here.*about to fail"):
        run_ranks(2, fail_on_one)


def test_a_hanging_rank_is_killed_and_its_stack_is_shown(run_ranks):
    def hang_on_zero():
        if os.environ["RANK"] == "0":
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 0.*no result.*hang_on_zero"):
        run_ranks(2, hang_on_zero, timeout=5)
    assert time.monotonic() - started < 50


def test_a_child_that_outlives_the_answer_of_its_rank_does_not_hold_it_up_and_goes_with_it(run_ranks):
    def leave_a_child():
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return pid

    started = time.monotonic()
    [child] = run_ranks(1, leave_a_child)
    assert time.monotonic() - started < 50
    while runs(child):
        assert time.monotonic() - started < 100
        time.sleep(0.05)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_can_be_spread_over_simulated_machines(run_ranks):
    def place():
        return os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]

    assert run_ranks(4, place, nodes=2) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
