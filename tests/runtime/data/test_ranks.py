"""Prepared loaders on several ranks."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from orc.runtime import pad_across_processes, prepare_data_loader
from orc.runtime.core.context import current_context

pytestmark = pytest.mark.distributed


class Reading(IterableDataset):
    """A stream that remembers having been read."""

    def __init__(self, count, make=lambda i: i, broken_at=None):
        self.count, self.make, self.broken_at, self.read = count, make, broken_at, []

    def __iter__(self):
        for i in range(self.count):
            if i == self.broken_at:
                raise OSError("disk on fire")
            self.read.append(i)
            yield self.make(i)


def test_ranks_with_different_seeds_share_out_the_same_shuffle(run_ranks):
    def two_epochs(kind):
        context = current_context()
        torch.manual_seed(100 + context.rank)
        options = {
            "plain": {"shuffle": True},
            "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(context.rank)},
            "seedable": {"shuffle": True},
            "weighted": {"sampler": WeightedRandomSampler([1.0] * 24, 24, replacement=False)},
        }[kind]
        loader = prepare_data_loader(
            DataLoader(range(24), batch_size=3, **options),
            rng_types=["generator"],
            use_seedable_sampler=kind == "seedable",
        )
        return [[i for batch in loader for i in batch.tolist()] for _ in range(2)]

    for kind in ("plain", "generator", "seedable", "weighted"):
        first, second = run_ranks(2, two_epochs, kind)
        for mine, other in zip(first, second, strict=True):
            assert not set(mine) & set(other)
            assert set(mine) | set(other) == set(range(24))
        assert first[0] != first[1], kind


def test_rng_types_align_the_named_generators(run_ranks):
    def draw(rng_types):
        context = current_context()
        torch.manual_seed(context.rank)
        loader = prepare_data_loader(DataLoader(range(4)), rng_types=rng_types)
        next(iter(loader))
        return torch.rand(()).item()

    one, two = run_ranks(2, draw, ["torch"])
    assert one == two
    one, two = run_ranks(2, draw, ["generator"])
    assert one != two


def test_an_iterable_dataset_is_read_on_rank_0_only_and_dealt_out_in_order(run_ranks):
    def read(split):
        current_context()
        data = Reading(16)
        loader = prepare_data_loader(DataLoader(data, batch_size=4), split_batches=split)
        seen = [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]
        return type(loader).__name__, data.read, seen, loader.total_batch_size

    zero, one = run_ranks(2, read, False)
    assert zero[0] == one[0] == "DataLoaderDispatcher"
    assert zero[1] == list(range(16))
    assert one[1] == []
    assert zero[2] == [([0, 1, 2, 3], False, -1), ([8, 9, 10, 11], True, -1)]
    assert one[2] == [([4, 5, 6, 7], False, -1), ([12, 13, 14, 15], True, -1)]
    assert zero[3] == 8
    zero, one = run_ranks(2, read, True)
    assert [batch for batch, _, _ in zero[2]] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert [batch for batch, _, _ in one[2]] == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert zero[3] == 4


def test_dispatched_batches_may_hold_anything_and_grow(run_ranks):
    def make(i):
        return {"image": torch.full((i * 300,), float(i)), "name": f"n{i}", "label": i, "extra": {"flags": [True, i]}}

    def read():
        current_context()
        loader = prepare_data_loader(DataLoader(Reading(8, make), batch_size=2, collate_fn=list))
        return [[(len(s["image"]), s["image"].sum().item(), s["name"], s["extra"]) for s in batch] for batch in loader]

    zero, one = run_ranks(2, read)
    expected = [(i * 300, float(i * i * 300), f"n{i}", {"flags": [True, i]}) for i in range(8)]
    assert zero == [expected[0:2], expected[4:6]]
    assert one == [expected[2:4], expected[6:8]]


def test_dispatching_can_be_left_early_resumed_and_repeated(run_ranks):
    def read():
        current_context()
        loader = prepare_data_loader(DataLoader(Reading(12), batch_size=2))
        for _ in loader:
            state = loader.state_dict()
            break
        whole = [batch.tolist() for batch in loader]
        loader.load_state_dict(state)
        return whole, [batch.tolist() for batch in loader]

    zero, one = run_ranks(2, read)
    assert zero == ([[0, 1], [4, 5], [8, 9]], [[4, 5], [8, 9]])
    assert one == ([[2, 3], [6, 7], [10, 11]], [[6, 7], [10, 11]])


def test_a_custom_slicing_function_cuts_dispatched_batches(run_ranks):
    def every_other(batch, part, process_index, num_processes):
        return batch[process_index::num_processes]

    def read():
        current_context()
        loader = prepare_data_loader(DataLoader(Reading(8), batch_size=2), slice_fn_for_dispatch=every_other)
        return [batch.tolist() for batch in loader]

    assert run_ranks(2, read) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_loaders_work_over_a_group_that_the_script_opened_without_a_backend_for_the_cpu(run_ranks):
    def epochs():
        import torch.distributed as dist

        from orc.runtime.launch import process_group

        dist.init_process_group("cuda:gloo")  # as with nccl: nothing carries tensors on the CPU
        process_group._run_store = dist.group.WORLD, (None, b"k" * 32)  # it would be found over the GPUs
        rank = dist.get_rank()
        torch.manual_seed(100 + rank)
        context = process_group.open_context(dict(os.environ))
        options = {"context": context, "put_on_device": False, "rng_types": []}
        seen = []
        for data, dispatch in ((range(8), False), (range(8), True), (Reading(8), True)):
            plain = DataLoader(data, batch_size=2, shuffle=isinstance(data, range))
            loader = prepare_data_loader(plain, dispatch_batches=dispatch, **options)
            seen.append([i for batch in loader for i in batch.tolist()])
        assert context.hosts_meet
        assert pad_across_processes(torch.ones(rank + 1), ctx=context).tolist() == [1.0, float(rank)]
        return seen, context.control_group("a test") is context.control_group("a test") is not context.group

    first, second = run_ranks(2, epochs)
    assert (first[1], second[1]) == (True, True)
    for mine, other in zip(first[0], second[0], strict=True):
        assert sorted(mine + other) == list(range(8))
