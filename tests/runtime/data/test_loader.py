"""A prepared loader in one process: order, sizes, epochs, positions, ends."""

import copy
import gc
import weakref
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext
from orc.runtime.data.iterable import IterableDatasetShard
from orc.runtime.data.loader import DataLoaderShard
from orc.runtime.data.plan import PositionError
from orc.runtime.data.prepare import prepare_data_loader, skip_first_batches
from orc.runtime.data.samplers import SeedableRandomSampler
from orc.runtime.launch.environment import detect


def context(rank=0, world=1):
    return RunContext(rank, world, rank, world, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())


def prepare(loader, *, ranks=1, rank=0, **options):
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, context=context(), **options)


def read(loader):
    return [batch.tolist() for batch in loader]


def flat(parts):
    return list(chain.from_iterable(parts))


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def test_observed_sizes_are_the_documented_ones():
    loader = prepare(DataLoader(range(160), batch_size=16), ranks=4)
    assert loader.total_batch_size == 64
    assert loader.total_dataset_length == 160
    split = prepare(DataLoader(range(160), batch_size=16), ranks=4, split_batches=True)
    assert split.total_batch_size == 16
    assert [len(batch) for batch in split] == [4] * 10

    hundred = DataLoader(range(800), batch_size=8)
    assert len(prepare(hundred, ranks=4)) == 25
    assert len(prepare(hundred, ranks=4, split_batches=True)) == 100


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("replacement", [False, True])
def test_one_process_shuffles_exactly_as_an_unprepared_loader_does(own_generator, replacement):
    def three_epochs(change):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(9) if own_generator else None
        sampler = torch.utils.data.RandomSampler(range(37), replacement=replacement, generator=generator)
        loader = change(DataLoader(range(37), batch_size=4, sampler=sampler, generator=generator))
        return [read(loader) for _ in range(3)], torch.rand(2).tolist()

    assert three_epochs(prepare) == three_epochs(lambda loader: loader)


def test_seedable_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(42)
    loader = prepare(DataLoader(range(20), batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=7)
    first, second = read(loader), read(loader)
    assert first != second
    torch.manual_seed(1)
    loader.set_epoch(0)
    assert [read(loader), read(loader)] == [first, second]
    plain = SeedableRandomSampler(range(20), data_seed=7)
    assert [list(plain), list(plain)] == [flat(first), flat(second)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_is_known_where_the_last_batch_has_no_piece_for_this_rank(rank):
    class Backwards(Sampler):
        def __len__(self):
            return 9

        def __iter__(self):
            return iter(range(8, -1, -1))

    class Own(BatchSampler):
        pass

    plain = DataLoader(range(9), batch_size=4, sampler=Backwards())
    own = DataLoader(range(9), batch_sampler=Own(Backwards(), 4, drop_last=False))
    for given in (plain, own):
        loader = prepare(given, ranks=2, rank=rank, split_batches=True, even_batches=False)
        assert [loader.end_of_dataloader for _ in loader] == [False, False, True][rank:]
    assert len(prepare(plain, ranks=2, rank=rank, split_batches=True, even_batches=False)) == 3 - rank


def test_a_share_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="process_index 2 is not one of 2 processes, 0 to 1"):
        prepare(DataLoader(range(4)), ranks=2, rank=2)


def test_skip_first_batches_skips_in_its_own_passes_only():
    for plain in (DataLoader(range(10), batch_size=1), DataLoader(Stream(10), batch_size=1)):
        loader = prepare(plain)
        skipped = skip_first_batches(loader, 2)
        assert read(skipped) == [[i] for i in range(2, 10)]
        assert read(loader) == [[i] for i in range(10)]
    unprepared = DataLoader(range(10), batch_size=1)
    skipped = skip_first_batches(unprepared, 2)
    assert len(skipped) == 8
    assert read(skipped) == [[i] for i in range(2, 10)]
    assert read(unprepared) == [[i] for i in range(10)]


def test_skipping_reads_no_sample():
    class Recording(list):
        def __init__(self, items):
            super().__init__(items)
            self.read = []

        def __getitem__(self, index):
            self.read.append(index)
            return super().__getitem__(index)

    data = Recording(range(1000))
    assert read(skip_first_batches(prepare(DataLoader(data, batch_size=10)), 99)) == [list(range(990, 1000))]
    assert data.read == list(range(990, 1000))


def samplers():
    generator = torch.Generator().manual_seed(3)
    weights = [1.0 + i for i in range(23)]
    return {
        "sequential": lambda: DataLoader(range(23), batch_size=2),
        "shuffled": lambda: DataLoader(range(23), batch_size=2, shuffle=True),
        "own generator": lambda: DataLoader(range(23), batch_size=2, shuffle=True, generator=copy.deepcopy(generator)),
        "weighted": lambda: DataLoader(range(23), batch_size=2, sampler=WeightedRandomSampler(weights, 23)),
        "batch sampler": lambda: DataLoader(
            range(23), batch_sampler=list(BatchSampler(SequentialSampler(range(23)), 2, False))
        ),
        "stream": lambda: DataLoader(Stream(23), batch_size=2),
        "workers": lambda: DataLoader(range(23), batch_size=2, shuffle=True, num_workers=1),
    }


@pytest.mark.parametrize("kind", list(samplers()))
@pytest.mark.parametrize("stop", [1, 5, 12])
def test_a_restored_loader_continues_with_the_next_batch_and_the_next_epochs(kind, stop):
    def run(loader, epochs):
        seen = []
        for _ in range(epochs):
            for batch in loader:
                seen.append((batch.tolist(), round(torch.rand(()).item(), 6)))  # as a dropout would
        return seen

    torch.manual_seed(1)
    whole = run(prepare(samplers()[kind]()), 3)

    torch.manual_seed(1)
    loader = prepare(samplers()[kind]())
    seen = run(loader, 1)
    for count, batch in enumerate(loader, 1):
        seen.append((batch.tolist(), round(torch.rand(()).item(), 6)))
        if count == stop:
            state, rng = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
            break

    assert state["live"]
    assert state["epoch"] == 1
    torch.manual_seed(99)
    other = prepare(samplers()[kind]())
    other.load_state_dict(state)
    torch.set_rng_state(rng)
    assert other.epoch == 1
    assert seen + run(other, 2) == whole


def test_a_position_survives_a_weights_only_file(tmp_path):
    loader = prepare(DataLoader(range(8), batch_size=2, shuffle=True, generator=torch.Generator()))
    next(source := iter(loader))
    torch.save(loader.state_dict(), tmp_path / "position")
    other = prepare(DataLoader(range(8), batch_size=2, shuffle=True, generator=torch.Generator()))
    other.load_state_dict(torch.load(tmp_path / "position", weights_only=True))
    assert read(other) == [batch.tolist() for batch in source]


def test_between_passes_the_position_is_the_start_of_the_next_epoch():
    loader = prepare(DataLoader(range(8), batch_size=2))
    read(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["live"], state["offset"]) == (1, False, 0)
    other = prepare(DataLoader(range(8), batch_size=2))
    other.load_state_dict(state)
    assert len(read(other)) == 4


def test_saved_after_the_last_batch_but_inside_the_loop_the_epoch_has_no_batches_left():
    loader = prepare(DataLoader(range(8), batch_size=2))
    for _ in loader:
        state = loader.state_dict()
    other = prepare(DataLoader(range(8), batch_size=2))
    other.load_state_dict(state)
    assert other.epoch == 0
    assert read(other) == []
    assert len(read(other)) == 4


def test_a_changed_dataset_or_order_is_refused_in_the_middle_of_an_epoch():
    loader = prepare(DataLoader(range(8), batch_size=2))
    _source = iter(loader)
    next(_source)
    state = loader.state_dict()
    with pytest.raises(PositionError, match="8 samples, this loader's epoch has 9"):
        prepare(DataLoader(range(9), batch_size=2)).load_state_dict(state)
    with pytest.raises(PositionError, match="sequential order of samples, this loader's is shuffled"):
        prepare(DataLoader(range(8), batch_size=2, shuffle=True)).load_state_dict(state)


def test_skip_first_batches_takes_the_place_of_the_restored_position():
    torch.manual_seed(0)
    loader = prepare(DataLoader(range(20), batch_size=2, shuffle=True))
    epoch = []
    for batch in loader:
        epoch.append(batch.tolist())
        if len(epoch) == 4:
            state = copy.deepcopy(loader.state_dict())
    other = prepare(DataLoader(range(20), batch_size=2, shuffle=True))
    other.load_state_dict(state)
    assert read(skip_first_batches(other, 4)) == epoch[4:]
    assert len(read(other)) == 10
    other.load_state_dict(state)
    assert read(skip_first_batches(other, 0)) == epoch


def test_set_epoch_keeps_the_position_of_that_epoch_only():
    loader = prepare(DataLoader(range(6), batch_size=2))
    source = iter(loader)
    next(source)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert read(loader) == [[2, 3], [4, 5]]
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert len(read(loader)) == 3


def test_a_loop_left_early_leaves_no_state():
    loader = prepare(DataLoader(range(6), batch_size=2))
    for _ in loader:
        break
    assert loader.gradient.active == []
    assert not loader.state_dict()["live"]
    assert len(read(loader)) == 3

    def fail():
        for _ in loader:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert loader.gradient.active == []
    assert len(read(loader)) == 3


def test_a_look_at_one_batch_is_no_epoch_but_a_training_loop_left_early_is():
    loader = prepare(DataLoader(range(6), batch_size=1))
    next(iter(loader))
    assert loader.epoch == 0
    taken = []
    loader.attempts = lambda: len(taken)
    for _ in loader:
        taken.append("a step")
        break
    assert loader.epoch == 1


def test_an_inner_loader_ends_without_disturbing_the_outer():
    outer, inner = prepare(DataLoader(range(4), batch_size=2)), prepare(DataLoader(range(2), batch_size=1))
    inner.gradient = outer.gradient
    ends = []
    for _ in outer:
        for _ in inner:
            pass
        assert outer.gradient.active == [outer]
        assert outer.gradient.current is outer
        ends.append(outer.gradient.end_of_dataloader)
    assert ends == [False, True]


def test_listeners_are_told_between_steps_and_after_the_last():
    loader, told = prepare(DataLoader(range(6), batch_size=2)), []
    loader.events.subscribe("on_batch", lambda one: told.append((one.cursor.live.done, one.end_of_dataloader)))
    for _ in loader:
        assert len(told) == loader.cursor.live.done - 1
    assert told == [(1, False), (2, False), (3, True)]


def test_worker_processes_and_persistent_workers_read_the_same():
    options = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    loader = prepare(DataLoader(range(11), **options), ranks=2, rank=1)
    expected = read(prepare(DataLoader(range(11), batch_size=2), ranks=2, rank=1))
    assert read(loader) == expected
    for _ in loader:
        break
    assert read(loader) == expected
    assert read(skip_first_batches(loader, 1)) == expected[1:]


def test_a_batch_sampler_that_is_given_as_sampler_is_shared_by_batch():
    data = torch.arange(10, 20)  # takes a list of places
    for ranks, shares in {
        1: [[[10, 11], [12, 13], [14, 15], [16]]],
        2: [[[10, 11], [14, 15]], [[12, 13], [16, 10]]],
    }.items():
        batches = BatchSampler(range(7), 2, drop_last=False)
        loaders = [
            prepare(DataLoader(data, batch_size=None, sampler=batches), ranks=ranks, rank=r) for r in range(ranks)
        ]
        assert [read(loader) for loader in loaders] == shares
        assert {loader.total_batch_size for loader in loaders} == {2 * ranks}


def test_a_dispatched_batch_sampler_that_is_given_as_sampler_counts_samples():
    sampler = BatchSampler(range(7), 2, drop_last=False)
    loader = prepare(DataLoader(torch.arange(7), batch_size=None, sampler=sampler), dispatch_batches=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert (loader.total_batch_size, state["offset"], state["global_batch"]) == (2, 2, 2)


def test_custom_collate_and_dictionaries_arrive_as_they_are():
    class Bag(dict):
        pass

    loader = prepare(DataLoader(range(4), batch_size=2, collate_fn=lambda items: Bag(items=items)))
    assert [type(batch) for batch in loader] == [Bag, Bag]


def test_a_loader_shard_can_be_made_directly():
    loader = DataLoaderShard(list(range(10)), torch.device("cpu"), skip_batches=1, batch_size=4, context=context())
    assert read(loader) == [[4, 5, 6, 7], [8, 9]]
    assert isinstance(loader, DataLoader)
    assert loader.total_batch_size == 4


def test_a_prepared_loader_is_not_prepared_again():
    loader = prepare(DataLoader(range(4)))
    assert prepare(loader) is loader


def test_uneven_splits_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="batch_size 5 is not a multiple of 2"):
        prepare(DataLoader(range(10), batch_size=5), ranks=2, split_batches=True)
    with pytest.raises(ValueError, match="batch_size 3 is not a multiple of 2"):
        IterableDatasetShard(range(8), 3, num_processes=2, split_batches=True)
    with pytest.raises(ValueError, match="give the DataLoader a batch_size"):
        prepare(DataLoader(range(10), batch_size=None), ranks=2, split_batches=True)


def test_a_loader_that_is_dropped_goes_at_once_with_its_workers():
    gc.disable()
    try:
        loader = prepare(DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True))
        gradient = loader.gradient
        for batch in loader:
            assert batch.tolist() == [0, 1]
            break
        workers, known = loader._iterator._workers, weakref.ref(loader)
        del loader
        assert known() is None
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()
        assert gradient.current is None
    finally:
        gc.enable()


def test_the_last_batch_of_a_loader_that_is_gone_is_still_known():
    gradient = GradientRecord()

    def last():
        loader = prepare(DataLoader(range(10), batch_size=4), ranks=2)
        loader.gradient = gradient
        for batch in loader:
            if loader.end_of_dataloader:
                return batch.tolist()
        return None

    assert last() == [8, 9, 0, 1]
    gc.collect()
    assert gradient.current is None
    assert gradient.remainder == 2
    gradient.reset()
    assert gradient.remainder == -1
