"""gather_for_metrics gives every sample once: any data, any nesting, any number of ranks, any order of loaders."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from orc.runtime import Accelerator, DataLoaderConfiguration
from orc.runtime.testing import run_threads


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Windows(BatchSampler):
    """A batch sampler of one's own."""


def rows(batch):
    return {"n": batch, "nested": [(batch * 2, {"row": torch.stack([batch, batch + 1], dim=1)})]}


KINDS = {
    "map": ({}, lambda n: DataLoader(range(n), batch_size=4)),
    "split": ({"split_batches": True}, lambda n: DataLoader(range(n), batch_size=12)),
    "own batch sampler": (
        {},
        lambda n: DataLoader(range(n), batch_sampler=Windows(SequentialSampler(range(n)), 4, False)),
    ),
    "dispatched map": ({"dispatch_batches": True}, lambda n: DataLoader(range(n), batch_size=4)),
    "dispatched stream": ({}, lambda n: DataLoader(Stream(n), batch_size=4)),
    "dispatched and split": ({"split_batches": True}, lambda n: DataLoader(Stream(n), batch_size=12)),
    "stream": ({"dispatch_batches": False}, lambda n: DataLoader(Stream(n), batch_size=4)),
    "stream split": (
        {"dispatch_batches": False, "split_batches": True},
        lambda n: DataLoader(Stream(n), batch_size=12),
    ),
}


class Batched(IterableDataset):
    """Yields batches that are made already."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("kind", ["map", "stream", "dispatched stream"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_of_ready_made_batches_arrive_once(kind, world):
    def body():
        config = DataLoaderConfiguration(dispatch_batches=kind == "dispatched stream")
        accelerator = Accelerator(dataloader_config=config)
        for count in (1, 2, 3, 4, 5):
            batches = list(torch.arange(3 * count).view(count, 3))
            loader = accelerator.prepare(DataLoader(batches if kind == "map" else Batched(batches), batch_size=None))
            seen = [row for batch in loader for row in accelerator.gather_for_metrics({"rows": batch})["rows"].tolist()]
            assert seen == list(range(3 * count))

    run_threads(world, body)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_arrives_once_and_in_order(kind, world):
    options, make = KINDS[kind]

    def body():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        for count in (1, 2, 5, 11, 12, 13, 24, 29):
            loader = accelerator.prepare(make(count))
            seen, doubled, pairs, objects = [], [], [], []
            for batch in loader:
                everything = accelerator.gather_for_metrics(rows(batch))
                seen += everything["n"].tolist()
                doubled += everything["nested"][0][0].tolist()
                pairs += everything["nested"][0][1]["row"].tolist()
                objects += accelerator.gather_for_metrics([str(i) for i in batch.tolist()], use_gather_object=True)
            assert seen == list(range(count)), (kind, count)
            assert doubled == [2 * i for i in range(count)]
            assert pairs == [[i, i + 1] for i in range(count)]
            assert objects == [str(i) for i in range(count)]

    run_threads(world, body)


def fail_in(loader):
    for _ in loader:
        raise ArithmeticError


def test_loaders_inside_each_other_and_left_early_do_not_confuse_the_count():
    def body():
        accelerator = Accelerator()
        train, short, stream = (
            accelerator.prepare(DataLoader(range(10), batch_size=4)),
            accelerator.prepare(DataLoader(range(9), batch_size=5)),
            accelerator.prepare(DataLoader(Stream(7), batch_size=2)),
        )
        training = []
        for batch in train:
            for _ in stream:
                break
            found = [accelerator.gather_for_metrics(b).tolist() for b in short]
            assert found == [list(range(9))]
            found = [accelerator.gather_for_metrics(b).tolist() for b in stream]
            assert [i for part in found for i in part] == list(range(7))
            with pytest.raises(ArithmeticError):
                fail_in(short)
            training += accelerator.gather_for_metrics(batch).tolist()
        assert training == list(range(10))
        assert accelerator.gradient_state.active_dataloader is None
        assert not accelerator.gradient_state.in_dataloader

    run_threads(2, body)


def test_tensors_sent_as_objects_are_cut_too():
    def body():
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(range(9), batch_size=5))
        for batch in loader:
            ragged = batch.unsqueeze(1).expand(-1, 1 + accelerator.process_index)
            tensors = accelerator.gather_for_metrics(ragged, use_gather_object=True)
            columns = accelerator.gather_for_metrics({"n": batch.tolist(), "what": "x"}, use_gather_object=True)
        return [tuple(one.shape) for one in tensors], [one["n"] for one in columns]

    assert run_threads(2, body) == [([(5, 1), (4, 2)], [[0, 1, 2, 3, 4], [5, 6, 7, 8]])] * 2
