"""Collectives that begin before the ranks have met: on the CPU, as if it were a GPU."""

from types import SimpleNamespace

import pytest
import torch

from orc.runtime import PartialState, gather, pad_across_processes, reduce
from orc.runtime.collectives import ahead, broadcast, verify
from orc.runtime.core.context import current_context
from orc.runtime.core.errors import DistributedOperationException


def begin_early():
    """Let collectives of this rank begin early; returns what counts the meetings of all ranks."""
    meetings = []
    exchange = verify.exchange

    def counted(*arguments):
        meetings.append(arguments[1])
        return exchange(*arguments)

    verify.exchange = counted
    ahead.begins_early = lambda ctx: True
    return meetings, PartialState().process_index


def late_error():
    """What this rank is told of an earlier call that it had begun, once the others have told theirs."""
    history = ahead.history_of(current_context())
    while not all(told.arrived for told in history._told):
        pass
    with pytest.raises(DistributedOperationException) as caught:
        history.look_back()
    return str(caught.value)


def test_calls_that_repeat_begin_without_a_meeting(run_ranks):
    def body():
        meetings, rank = begin_early()
        found = []
        for step in range(6):
            found.append(gather({"a": torch.full((2,), float(10 * step + rank))})["a"].tolist())
            found.append(reduce(torch.tensor([step + rank]), "sum").tolist())
        return len(meetings), found

    wanted = [[[10.0 * step] * 2 + [10.0 * step + 1] * 2, [2 * step + 1]] for step in range(6)]
    for meetings, found in run_ranks(2, body):
        assert found == [one for pair in wanted for one in pair]
        assert meetings == 5, "each of the two has followed the other twice"


def test_a_default_device_of_the_script_changes_nothing(run_ranks):
    def body():
        _, rank = begin_early()
        value = torch.full((2,), float(rank))
        for _ in range(3):
            gather(value)
        with torch.device("meta"):
            found = gather(value).tolist()
        (told,) = ahead.history_of(current_context())._told
        assert set(told.marks()) == {told.call.mark}
        return found

    assert run_ranks(2, body) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_a_short_last_batch_of_all_ranks_is_met_for_and_right(run_ranks):
    def body():
        meetings, rank = begin_early()
        for _ in range(4):
            gather(torch.ones(4))
        before = len(meetings)
        short = gather(torch.full((1, 3), float(rank)))
        full = gather(torch.full((4,), float(rank)))
        pads = pad_across_processes(torch.ones(rank + 1)).shape[0]
        sent = broadcast(torch.full((2,), float(rank)))
        return before, len(meetings) - before, short.tolist(), full.sum().item(), pads, sent.tolist()

    assert run_ranks(2, body) == [(3, 4, [[0.0] * 3, [1.0] * 3], 4.0, 2, [0.0] * 2)] * 2


@pytest.mark.parametrize("other", ["shape", "dtype", "structure", "reduce", "pad_across_processes", "broadcast"])
def test_a_rank_that_brings_something_else_raises_and_hangs_nobody(run_ranks, other):
    def body():
        _, rank = begin_early()
        for _ in range(4):
            gather(torch.ones(4))
        calls = {
            "shape": lambda: gather(torch.ones(5)),
            "dtype": lambda: gather(torch.ones(4, dtype=torch.int64)),
            "structure": lambda: gather([torch.ones(4)]),
            "reduce": lambda: reduce(torch.ones(4)),
            "pad_across_processes": lambda: pad_across_processes(torch.ones(4)),
            "broadcast": lambda: broadcast(torch.ones(4)),
        }
        if rank == 1:
            with pytest.raises(DistributedOperationException) as caught:
                calls[other]()
            return str(caught.value)
        return gather(torch.ones(4)).tolist(), late_error()

    (got, late), told = run_ranks(2, body, timeout=20)
    assert got == [1.0] * 4 + [0.0] * 4
    named = {"shape": "`orc.runtime.gather` of [5]", "dtype": "`orc.runtime.gather` of [4]"}
    named |= {"structure": named["dtype"], "reduce": "`orc.runtime.reduce` of [4]"}
    assert (
        f"  - Process 0: `orc.runtime.gather` of [4]\n  - Process 1: {named.get(other, f'`orc.runtime.{other}`')}"
        in told
    )
    assert "  - Process 1: another one, which its own error names\nThis was an earlier call" in late


def test_ranks_that_all_bring_something_else_all_raise(run_ranks):
    def body():
        _, rank = begin_early()
        for _ in range(4):
            reduce(torch.ones(4))
        with pytest.raises(DistributedOperationException) as caught:
            reduce(torch.ones(5 + rank))
        return str(caught.value).splitlines()[-3:]

    for rank, lines in enumerate(run_ranks(3, body, timeout=20)):
        own, others = f"`orc.runtime.reduce` of [{5 + rank}]", "another one, which its own error names"
        assert lines == [f"  - Process {one}: {own if one == rank else others}" for one in range(3)]


def call(mark, size=4):
    return ahead.Call("gather", ((torch.Size((size,)), torch.uint8, torch.device("cpu")),), mark, lambda leaves: None)


def history(ranks=2):
    return ahead.History(SimpleNamespace(world_size=ranks))


def test_what_followed_twice_is_expected_and_nothing_after_something_new():
    past, said = history(), []
    for mark in (1, 2, 1, 2, 1, 2, 3, 1, 2):
        expected = past.expected()
        said.append(expected and expected.mark)
        past.note(mark, call(mark))
    assert said == [None, None, None, None, None, 2, 1, None, 2]
    assert past.expected() is None, "3 was the last that followed"


def test_what_is_large_or_not_to_be_begun_is_never_expected():
    past = history()
    for _ in range(5):
        past.note(1, call(1, ahead.LARGEST_BYTES // 2 + 1))
        assert past.expected() is None
        past.note(2, None)
        assert past.expected() is None


def test_a_history_forgets_rather_than_grows():
    past = history()
    for mark in range(10_000):
        past.note(mark, call(mark))
    assert len(past._followers) <= 256
    assert len(past._calls) <= 257


def test_a_cpu_a_simulated_run_and_debug_mode_meet_first(monkeypatch):
    cuda = {
        "device": torch.device("cuda", 0),
        "debug": False,
        "compute": SimpleNamespace(collectives=None),
        "group": object(),
        "hosts_meet": True,
    }
    assert ahead.begins_early(SimpleNamespace(**cuda))
    others = (
        {"device": torch.device("cpu")},
        {"debug": True},
        {"compute": SimpleNamespace(collectives=object())},
        {"group": SimpleNamespace(subgroup=None)},
        {"hosts_meet": False},
    )
    for other in others:
        assert not ahead.begins_early(SimpleNamespace(**{**cuda, **other}))
