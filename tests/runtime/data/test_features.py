"""What a `DataLoader` can do, a prepared one can: options, attributes, sizes, errors; and what an epoch costs."""

import functools
import multiprocessing
import time
import tracemalloc

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from orc.runtime import (
    BatchSamplerShard,
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)
from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext
from orc.runtime.launch.environment import detect


def context():
    return RunContext(0, 1, 0, 1, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())


def prepare(loader, ranks=1, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, context=context(), **options)


def read(loader):
    return [batch.tolist() for batch in loader]


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(30)


class Counting(Dataset):
    """Sees the epochs it is told."""

    def __init__(self, length):
        self.length, self.epochs = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def note(log, worker_id):
    log.put(worker_id)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_all_options_of_the_loader_are_kept():
    started = multiprocessing.get_context("fork").SimpleQueue()
    generator = torch.Generator().manual_seed(1)
    plain = DataLoader(
        range(12),
        batch_size=2,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=20,
        worker_init_fn=functools.partial(note, started),
        multiprocessing_context="fork",
        generator=generator,
        in_order=False,
        pin_memory=True,
        collate_fn=sum,
    )
    loader = prepare(plain, 2, 1)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader, DataLoaderAdapter)
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "pin_memory", "in_order"):
        assert getattr(loader, name) == getattr(plain, name), name
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert (loader.dataset, loader.generator, loader.collate_fn) == (plain.dataset, generator, sum)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (2, False, 3)
    assert loader.batch_sampler.batch_size == 2
    assert sorted(int(total) for total in loader) == [2 + 3, 6 + 7, 10 + 11]
    assert sorted([started.get(), started.get()]) == [0, 1]


def test_a_worker_that_is_too_slow_is_an_error_and_leaves_nothing():
    loader = prepare(DataLoader(Slow(), batch_size=1, num_workers=1, timeout=1))
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        read(loader)
    assert loader.gradient.active == []


def test_the_dataset_and_the_sampler_hear_of_epochs():
    data = Counting(4)
    loader = prepare(DataLoader(data, batch_size=2, shuffle=True), use_seedable_sampler=True, data_seed=3)
    read(loader), read(loader)
    loader.set_epoch(7)
    read(loader)
    assert data.epochs[:2] == [0, 1]
    assert data.epochs[-1] == 7
    assert loader.batch_sampler.sampler.epoch == 7


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_lengths_are_what_is_yielded_also_for_tiny_datasets(split, even, drop_last):
    for count in (0, 1, 3, 4, 7, 8, 9, 17):
        for rank in range(2):
            options = {"split_batches": split, "even_batches": even}
            plain = DataLoader(range(count), batch_size=4, drop_last=drop_last)
            loader = prepare(plain, 2, rank, **options)
            shard = BatchSamplerShard(plain.batch_sampler, 2, rank, split, even)
            assert read(loader) == list(shard), "two ways to the same batches"
            assert len(read(loader)) == len(loader)
            if even and not drop_last and count:
                assert {len(batch) for batch in shard} == {2 if split else 4}


def test_both_loaders_can_be_made_by_hand():
    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(7))

    loader = DataLoaderDispatcher(Numbers(), split_batches=False, skip_batches=1, batch_size=3, context=context())
    assert read(loader) == [[3, 4, 5], [6]]
    assert (loader.total_batch_size, loader.end_of_dataloader) == (3, True)
    shuffled = RandomSampler(range(6), generator=torch.Generator().manual_seed(2))
    expected = list(RandomSampler(range(6), generator=torch.Generator().manual_seed(2)))
    shard = DataLoaderShard(range(6), rng_types=["generator"], batch_size=2, sampler=shuffled, context=context())
    assert [sample for batch in read(shard) for sample in batch] == expected
    assert shard.total_dataset_length == 6


def test_skipped_batches_are_missing_from_the_length_too():
    loader = prepare(DataLoader(range(20), batch_size=2))
    assert len(skip_first_batches(loader, 2)) == 8
    assert len(skip_first_batches(loader, 30)) == 0
    assert read(skip_first_batches(loader, 30)) == []
    twice = skip_first_batches(skip_first_batches(loader, 2), 3)
    assert (len(twice), read(twice)[0]) == (5, [10, 11])
    with pytest.raises(ValueError, match="-1 batches"):
        skip_first_batches(loader, -1)


def test_an_epoch_costs_a_rank_one_permutation_and_seeking_builds_no_batch():
    count, ranks = 1_000_000, 64
    loader = prepare(DataLoader(Counting(count), batch_size=32, shuffle=True), ranks, 63)
    rounds = len(loader)
    assert rounds == -(-count // (32 * ranks))
    tracemalloc.start()
    try:
        # 8 MB of int64 live in the permutation, which torch holds; Python objects are those of one batch.
        served = skip_first_batches(loader, rounds - 2)
        assert len(read(served)) == 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000, "no lists of indices but this rank's next batch"


class Buckets:
    """A batch sampler of the script's own."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5], [6, 7]][: self.size])

    def __len__(self):
        return self.size


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_sampler_of_the_scripts_own_stays_in_sight(world):
    loader = prepare(DataLoader(range(8), batch_sampler=Buckets(2)), ranks=world, even_batches=False)
    seen = loader.batch_sampler
    if world > 1:
        assert isinstance(seen, BatchSamplerShard)
        seen = seen.batch_sampler
    assert type(seen) is Buckets
    seen.size = 4
    assert len(loader) == 4 // world
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]][::world]
