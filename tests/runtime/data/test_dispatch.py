"""Dispatching batches that are awkward: of different shapes and sizes, not picklable, cut in wrong ways."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime import Accelerator, DataLoaderConfiguration, DataLoaderDispatcher
from orc.runtime.data.dispatch import DispatchError
from orc.runtime.testing import run_threads


class Sentences(IterableDataset):
    """Rows of different lengths."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for i in range(self.count):
            yield torch.full((1 + i % 5,), i)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [1, 3, 6, 7, 8, 13, 16, 21])
def test_batches_padded_to_their_own_lengths_are_counted_right(split, count):
    def body():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        loader = accelerator.prepare(DataLoader(Sentences(count), batch_size=4, collate_fn=padded))
        seen, sizes = [], set()
        for batch in loader:
            sizes.add(len(batch))
            even = accelerator.pad_across_processes(batch, dim=1, pad_index=-1)
            seen += accelerator.gather_for_metrics(even)[:, 0].tolist()
            assert all(len(set(row.tolist()) - {-1}) == 1 for row in batch)
        return seen, len(sizes)

    for seen, _ in run_threads(2, body):
        assert seen == list(range(count))


def test_batches_of_any_size_arrive():
    sizes = [3, 1, 4, 1, 5, 9, 2]
    made, at = [], 0
    for size in sizes:
        made.append({"n": torch.arange(at, at + size), "names": [str(i) for i in range(at, at + size)]})
        at += size

    class Made(IterableDataset):
        def __iter__(self):
            return iter(made)

    def body():
        accelerator = Accelerator()
        seen = []
        for batch in accelerator.prepare(DataLoader(Made(), batch_size=None)):
            assert [str(i) for i in batch["n"].tolist()] == list(batch["names"])
            assert len(accelerator.gather_for_metrics(batch["n"])) <= 9 + 5
            seen += accelerator.gather_for_metrics(batch["n"].tolist(), use_gather_object=True)
        return seen

    for seen in run_threads(2, body):
        assert seen == list(range(at))


@pytest.mark.parametrize("place", ["collate", "leaf", "slice"])
def test_whatever_fails_on_rank_0_raises_on_every_rank(place):
    def broken(*args, **kwargs):
        raise ArithmeticError("no such batch")

    collate = {"collate": broken, "leaf": lambda rows: [lambda: None], "slice": padded}[place]
    options = {"slice_fn_for_dispatch": broken} if place == "slice" else {}

    def body():
        from orc.runtime import prepare_data_loader

        accelerator = Accelerator()
        loader = prepare_data_loader(DataLoader(Sentences(8), batch_size=2, collate_fn=collate), **options)
        try:
            for _ in loader:
                pass
        except Exception as error:
            caught = error
        assert not accelerator.gradient_state.in_dataloader
        return caught

    zero, one, two = run_threads(3, body)
    assert not isinstance(zero, DispatchError)
    for other in (one, two):
        assert isinstance(other, DispatchError)
        assert str(other) == f"rank 0 could not read the next batch: {type(zero).__name__}: {zero}"


def test_drop_last_drops_the_incomplete_round_only():
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Sentences(13), batch_size=2, drop_last=True, collate_fn=padded))
        return [batch[:, 0].tolist() for batch in loader]

    assert run_threads(2, body) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_a_process_by_itself_has_a_dispatcher_where_several_have_one():
    accelerator = Accelerator()
    stream = accelerator.prepare(DataLoader(Sentences(3), batch_size=None))
    assert isinstance(stream, DataLoaderDispatcher)
    assert [len(row) for row in stream] == [1, 2, 3]
    assert not isinstance(accelerator.prepare(DataLoader(range(3))), DataLoaderDispatcher)
    chosen = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).prepare(DataLoader(range(3)))
    assert isinstance(chosen, DataLoaderDispatcher)
