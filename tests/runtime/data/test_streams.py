"""Streams with workers, streams that share themselves out, streams that know where they are."""

import ast
import copy
import gc
from collections import Counter
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from orc.runtime import (
    Accelerator,
    DataLoaderConfiguration,
    IterableDatasetShard,
    prepare_data_loader,
    skip_first_batches,
)
from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.launch.environment import detect


@pytest.fixture(autouse=True)
def no_workers_left():
    """Workers that stay end here, and not when the next test's workers clear away what they have inherited."""
    yield
    gc.collect()


class Numbers(IterableDataset):
    """0, 1, 2, ... in every worker alike."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class ByWorker(Numbers):
    """Each worker has its part, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        return iter(range(first, self.count, step))


class Assigned(Numbers):
    """Gets its part from `assign`."""

    first = 0

    def __iter__(self):
        return iter(range(self.first, self.count, 1 if get_worker_info() is None else 2))


def assign(worker_id):
    get_worker_info().dataset.first = worker_id


class Stateful(Numbers):
    """Continues where its state says; counts what it has read."""

    def __init__(self, count):
        super().__init__(count)
        self.at, self.reads = 0, 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for i in range(begin, self.count):
            self.at = i + 1
            self.reads += 1
            yield i
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Sharded(IterableDataset):
    """Like Hugging Face's streaming datasets: files, ``shard``, and workers that share the files out."""

    def __init__(self, files):
        self.files = files
        self.opened = []

    @property
    def num_shards(self):
        return len(self.files)

    def shard(self, num_shards, index, contiguous=True):
        each, more = divmod(len(self.files), num_shards)
        begin = each * index + min(index, more)
        return Sharded(self.files[begin : begin + each + (index < more)])

    def __iter__(self):
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        for file in self.files[first::step]:
            self.opened.append(file)
            yield from file


def prepare(loader, ranks=1, rank=0, **options):
    context = RunContext(0, 1, 0, 1, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())
    return prepare_data_loader(
        loader, num_processes=ranks, process_index=rank, context=context, dispatch_batches=False, **options
    )


def read(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("count", [0, 10])
def test_workers_change_nothing_about_a_stream_that_does_not_know_them(workers, count):
    for ranks in (1, 2):
        for rank in range(ranks):
            here = prepare(DataLoader(Numbers(count), batch_size=4), ranks, rank)
            there = prepare(DataLoader(Numbers(count), batch_size=4, num_workers=workers), ranks, rank)
            assert [(b.tolist(), here.remainder) for b in here] == [(b.tolist(), there.remainder) for b in there]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_shares_itself_out_to_workers_is_read_once(ranks):
    seen = Counter()
    loaders = [prepare(DataLoader(ByWorker(26), batch_size=3, num_workers=2), ranks, rank) for rank in range(ranks)]
    for batches in zip(*loaders, strict=True):
        valid = loaders[0].remainder
        row = list(chain.from_iterable(batch.tolist() for batch in batches))
        seen.update(row if valid < 0 else row[:valid])
    assert seen == Counter(range(26))


@pytest.mark.parametrize("dataset", [Numbers, ByWorker])
def test_workers_that_stay_deal_out_every_pass_alike(dataset):
    loader = prepare(DataLoader(dataset(10), batch_size=2, num_workers=2, persistent_workers=True))
    first = read(loader)
    assert sorted(chain.from_iterable(first)) == list(range(10))
    assert read(loader) == first


def test_a_worker_that_only_reads_its_seed_is_dealt_to():
    def seed(worker_id):
        torch.manual_seed(get_worker_info().seed + get_worker_info().id)

    loader = prepare(DataLoader(Numbers(8), batch_size=2, num_workers=2, worker_init_fn=seed))
    assert read(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


class Collate:
    """Writes down what it is called with, from whatever process."""

    def __init__(self, path):
        self.path = path

    def __call__(self, samples):
        with open(self.path, "a") as file:
            file.write(f"{samples}\n")
        return torch.tensor(samples)

    def calls(self):
        """What was collated since the last look."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.path.unlink(missing_ok=True)
        return sorted(ast.literal_eval(line) for line in lines)


@pytest.fixture
def collate(tmp_path):
    return Collate(tmp_path / "collated")


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(
    ("ranks", "split", "size", "drop_last"),
    [(1, False, 3, False), (2, False, 3, True), (2, True, 4, False), (1, False, None, False)],
)
def test_what_is_skipped_of_a_stream_never_reaches_collate(collate, workers, drop_last, ranks, split, size):
    options = {"batch_size": size} if size is None else {"batch_size": size, "drop_last": drop_last}
    plain = DataLoader(Numbers(25), num_workers=workers, collate_fn=collate, **options)
    loader = prepare(plain, ranks, ranks - 1, split_batches=split)
    whole = [(batch.tolist(), loader.remainder, loader.end_of_dataloader) for batch in loader]
    collate.calls()
    for count in (3, len(whole) - 1, 99):
        skipped = skip_first_batches(loader, count)
        assert [(b.tolist(), skipped.remainder, skipped.end_of_dataloader) for b in skipped] == whole[count:]
        assert collate.calls() == sorted(batch for batch, *_ in whole[count:])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_resumed_stream_leaves_out_samples_of_its_first_pass_only(collate, persistent):
    def build():
        options = {"num_workers": 2, "persistent_workers": persistent, "collate_fn": collate}
        return prepare(DataLoader(Numbers(20), batch_size=2, **options), 2, 1)

    loader = build()
    whole = read(loader)
    for count, _ in enumerate(loader, 1):
        if count == 2:
            state = loader.state_dict()
            break
    assert len(read(loader)) == len(whole)
    collate.calls()
    for other in (build(), loader):  # with new workers, and with those that are there
        other.load_state_dict(state)
        assert read(other) == whole[2:]
        assert collate.calls() == whole[2:]
        assert read(other) == whole
        assert collate.calls() == whole


def test_a_stream_and_what_is_left_of_it_are_read_side_by_side():
    loader = prepare(DataLoader(Numbers(16), batch_size=2, num_workers=2, persistent_workers=True))
    rest = skip_first_batches(loader, 3)
    for _ in range(2):
        pairs = zip(rest, loader, strict=False)
        assert [(a.tolist(), b.tolist()) for a, b in pairs] == [([i + 6, i + 7], [i, i + 1]) for i in range(0, 10, 2)]
    assert len(read(rest)) == 5


@pytest.mark.parametrize(
    ("dataset", "begin", "persistent"), [(ByWorker, None, False), (ByWorker, None, True), (Assigned, assign, True)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_skipping_counts_the_batches_of_a_stream_that_shares_itself_out(ranks, dataset, begin, persistent):
    options = {"num_workers": 2, "worker_init_fn": begin, "persistent_workers": persistent}
    loader = prepare(DataLoader(dataset(26), batch_size=3, **options), ranks, ranks - 1)
    whole = read(loader)
    views = {count: skip_first_batches(loader, count) for count in (1, 3, 99)}
    for count, skipped in views.items():
        assert [read(skipped), read(skipped)] == [whole[count:]] * 2


def test_one_worker_of_a_stream_that_shares_itself_out_skips_before_collate(collate):
    loader = prepare(DataLoader(ByWorker(10), batch_size=2, num_workers=1, collate_fn=collate))
    assert read(skip_first_batches(loader, 3)) == [[6, 7], [8, 9]] == collate.calls()


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [0, 2])
def test_dispatching_skips_before_collate(run_ranks, collate, workers):
    def body():
        plain = DataLoader(Numbers(20), batch_size=2, num_workers=workers, collate_fn=collate)
        return read(skip_first_batches(Accelerator().prepare(plain), 3))

    assert run_ranks(2, body) == [[[12, 13], [16, 17]], [[14, 15], [18, 19]]]
    assert collate.calls() == [[12, 13], [14, 15], [16, 17], [18, 19]]


def test_worker_init_fn_may_give_out_the_parts():
    loader = prepare(DataLoader(Assigned(12), batch_size=2, num_workers=2, worker_init_fn=assign))
    assert sorted(chain.from_iterable(read(loader))) == list(range(12))


def test_the_datasets_own_attributes_are_found_on_the_prepared_loader():
    loader = prepare(DataLoader(Numbers(12), batch_size=2), 2)
    assert loader.dataset.count == 12
    assert copy.deepcopy(loader.dataset).count == 12
    with pytest.raises(AttributeError):
        _ = loader.dataset.missing


def test_an_iterable_shard_in_a_plain_loader_is_read_once():
    shard = IterableDatasetShard(Numbers(16), 4, num_processes=2, process_index=1)
    assert read(DataLoader(shard, batch_size=4, num_workers=2)) == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_a_stream_that_yields_one_ranks_samples_is_left_alone(run_ranks):
    class Own(Numbers):
        __orc_sharded__ = True

        def __iter__(self):
            context = current_context()
            return iter(range(context.rank, self.count, context.world_size))

    def body():
        loader = Accelerator().prepare(DataLoader(Own(8), batch_size=2))
        return read(loader), loader.total_batch_size

    assert run_ranks(2, body) == [([[0, 2], [4, 6]], 4), ([[1, 3], [5, 7]], 4)]


def test_a_distributed_sampler_is_not_shared_out_again(run_ranks):
    def body():
        accelerator = Accelerator()
        sampler = DistributedSampler(range(16), shuffle=True, seed=3)
        loader = accelerator.prepare(DataLoader(range(16), batch_size=2, sampler=sampler))
        passes = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            passes.append(list(chain.from_iterable(read(loader))))
        return passes, len(loader), loader.total_batch_size

    (zero, *sizes), (one, *_) = run_ranks(2, body)
    assert sizes == [4, 4]
    for mine, other in zip(zero, one, strict=True):
        assert sorted(mine + other) == list(range(16))
    assert zero[0] != zero[1], "the epoch reaches the sampler"


def test_splitting_batches_of_data_that_is_shared_out_is_refused():
    sampler = DistributedSampler(range(16), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="divide its batch_size"):
        prepare(DataLoader(range(16), batch_size=2, sampler=sampler), 2, split_batches=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_that_knows_where_it_is_continues_without_reading_again(ranks):
    loader = prepare(DataLoader(Stateful(20), batch_size=2), ranks, ranks - 1)
    whole = read(loader)
    for count, _ in enumerate(loader, 1):
        if count == 3:
            state = copy.deepcopy(loader.state_dict())
            break
    data = Stateful(20)
    other = prepare(DataLoader(data, batch_size=2), ranks, ranks - 1)
    other.load_state_dict(state)
    assert read(other) == whole[3:]
    assert data.reads == 20 - 3 * 2 * ranks
    assert read(other) == whole


def test_a_dispatched_stream_that_knows_where_it_is_continues_at_another_world_size(run_ranks, tmp_path):
    def body(batch_size, save):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        data = Stateful(32)
        loader = accelerator.prepare(DataLoader(data, batch_size=batch_size))
        seen = []
        if not save:
            accelerator.load_state(str(tmp_path / "state"))
        for count, batch in enumerate(loader, 1):
            seen.append(batch.tolist())
            if save and count == 2:
                accelerator.save_state(str(tmp_path / "state"))
                break
        return seen, data.reads

    zero, one = run_ranks(2, body, 4, True)
    assert zero[0] + one[0] == [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]
    results = run_ranks(4, body, 2, False)
    rounds = zip(*[seen for seen, _ in results], strict=True)
    assert [list(chain.from_iterable(parts)) for parts in rounds] == [list(range(16, 24)), list(range(24, 32))]
    assert [reads for _, reads in results] == [16, 0, 0, 0]


FILES = [list(range(10 * i, 10 * i + 2 + i)) for i in range(8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_opens_only_its_shards_where_parts_may_differ(workers):
    seen = []
    for rank in range(4):
        loader = prepare(DataLoader(Sharded(FILES), batch_size=2, num_workers=workers), 4, rank, even_batches=False)
        mine = list(chain.from_iterable(read(loader)))
        assert sorted(mine) == FILES[2 * rank] + FILES[2 * rank + 1]
        assert loader.total_batch_size == 8
        if not workers:
            assert loader.dataset.dataset.opened == FILES[2 * rank : 2 * rank + 2]
        seen += mine
    assert sorted(seen) == sorted(chain.from_iterable(FILES))


@pytest.mark.parametrize(
    ("files", "options"), [(FILES, {}), (FILES[:7], {"even_batches": False}), (FILES, {"split_batches": True})]
)
def test_shards_that_cannot_be_dealt_out_are_read_by_all_and_ranks_stay_in_step(files, options):
    batches, total = [], sum(map(len, files))
    for rank in range(4):
        loader = prepare(DataLoader(Sharded(files), batch_size=4), 4, rank, **options)
        batches.append(read(loader))
        assert loader.dataset.dataset.opened == files
    assert len({len(some) for some in batches}) == 1
    rounds = list(chain.from_iterable(chain.from_iterable(zip(*batches, strict=True))))
    assert rounds[:total] == list(chain.from_iterable(files))


def test_what_was_split_by_node_is_not_split_again():
    class Split(Numbers):
        _distributed = type("DistributedConfig", (), {"rank": 1, "world_size": 2})()

    class Whole(Numbers):
        _distributed = None

    for options in ({}, {"even_batches": False}):
        context = RunContext(1, 2, 1, 2, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())
        loader = prepare_data_loader(DataLoader(Split(5), batch_size=2), context=context, **options)
        assert read(loader) == [[0, 1], [2, 3], [4]]
    assert read(prepare(DataLoader(Whole(8), batch_size=2), 2, 1)) == [[2, 3], [6, 7]]
