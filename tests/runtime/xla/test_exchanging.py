"""Collectives, random numbers and saving through torch_xla."""

from __future__ import annotations

import pytest
import torch


def exchange():
    import torch
    import torch_xla

    from orc.runtime import Accelerator, broadcast

    accelerator = Accelerator()
    rank = accelerator.process_index
    torch_xla.CALLS.clear()
    gathered = accelerator.gather({"a": torch.full((1, 2), float(rank)), "b": [torch.tensor(rank), torch.empty(0, 3)]})
    calls = list(torch_xla.CALLS)
    mine = torch.full((2,), float(rank + 1))
    return {
        "gathered": gathered,
        "calls": calls,
        "flags": accelerator.gather(torch.tensor([rank == 1])),
        "sum": accelerator.reduce((mine, torch.tensor([True])), "sum"),
        "mean": accelerator.reduce(mine, "mean"),
        "scaled": accelerator.reduce(mine, "sum", scale=0.5),
        "untouched": mine,
        "broadcast": broadcast([torch.full((2,), float(rank)), torch.tensor(rank)], from_process=1),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=7),
        "triggered": (accelerator.set_trigger() if rank else None, accelerator.check_trigger())[1],
    }


def test_collectives_go_through_xla_with_the_results_of_any_other_device(xla_ranks):
    found = xla_ranks(2, exchange)
    for one in found:
        assert one["gathered"]["a"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert one["gathered"]["b"][0].tolist() == [0, 1]
        assert one["gathered"]["b"][1].shape == (0, 3)
        assert one["flags"].tolist() == [False, True]
        assert one["flags"].dtype is torch.bool
        assert one["sum"][0].tolist() == [3.0, 3.0]
        assert one["sum"][1].tolist() == [2]
        assert one["mean"].tolist() == [1.5, 1.5]
        assert one["scaled"].tolist() == [1.5, 1.5]
        assert [part.tolist() for part in one["broadcast"]] == [[1.0, 1.0], 1]
        assert one["triggered"] is True
    assert [one["untouched"].tolist() for one in found] == [[1.0, 1.0], [2.0, 2.0]]
    assert [one["padded"].tolist() for one in found] == [[1.0, 7.0], [1.0, 1.0]]


def test_a_collective_is_a_step_of_its_own(xla_ranks):
    (calls, _) = [one["calls"] for one in xla_ranks(2, exchange)]
    assert calls == [("sync",), ("all_gather", (1, 2)), ("all_gather", (1,)), ("sync",)]


def test_generators_are_seeded_and_aligned(xla_ranks):
    def seeds():
        from orc.runtime import Accelerator, set_seed, synchronize_rng_state

        accelerator = Accelerator()
        set_seed(5, device_specific=True)
        before = accelerator.ctx.compute.rng_state()
        synchronize_rng_state("xla")
        return before, accelerator.ctx.compute.rng_state()

    assert xla_ranks(2, seeds) == [(5, 5), (6, 5)]


def saved(directory):
    import os

    import torch
    import torch_xla
    from torch import nn

    from orc.runtime import Accelerator, save

    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.ctx.compute.set_rng_state(11 + accelerator.process_index)
    torch_xla.CALLS.clear()
    path = os.path.join(directory, f"rank-{accelerator.process_index}")
    accelerator.save(model.state_dict(), f"{path}.bin")
    save([model.weight], f"{path}.list")
    once = list(torch_xla.CALLS)
    accelerator.save_state(os.path.join(directory, "state"))
    accelerator.save_model(model, os.path.join(directory, f"model-{accelerator.process_index}"))
    want = model.weight.tolist()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.ctx.compute.set_rng_state(0)
    accelerator.load_state(os.path.join(directory, "state"))
    return once, want, model.weight.tolist(), accelerator.ctx.compute.rng_state()


def test_what_is_saved_is_brought_up_to_date_on_all_processes_and_written_by_one(xla_ranks, tmp_path):
    found = xla_ranks(2, saved, str(tmp_path))
    assert [once for once, *_ in found] == [[("sync",)] * 2] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model-0", "rank-0.bin", "rank-0.list", "state"]
    weight = torch.load(tmp_path / "rank-0.list")[0]
    assert weight.device.type == "cpu"
    for _, want, got, _ in found:
        assert got == want == weight.tolist()
    assert [state for *_, state in found] == [11, 12]


def test_random_numbers_saved_without_torch_xla_cannot_be_continued_with_it(xla_ranks, run_ranks, tmp_path):
    def work(directory, load):
        from orc.runtime import Accelerator

        accelerator = Accelerator()
        if load:
            accelerator.load_state(directory)
        else:
            accelerator.save_state(directory)

    run_ranks(1, work, str(tmp_path / "state"), False)
    with pytest.raises(AssertionError, match="it was saved without torch_xla"):
        xla_ranks(1, work, str(tmp_path / "state"), True)
