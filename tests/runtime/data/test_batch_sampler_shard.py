"""Batches of any batch sampler, dealt out to ranks."""

import itertools

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from orc.runtime.data.plan import IndexPlan
from orc.runtime.data.samplers import BatchSamplerShard


def batches(length, size, drop_last=False):
    return BatchSampler(SequentialSampler(range(length)), size, drop_last)


def shards(sampler, n=2, **options):
    return [list(BatchSamplerShard(sampler, n, rank, **options)) for rank in range(n)]


def test_whole_batches_go_to_ranks_in_turn():
    assert shards(batches(8, 4)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_split_batches_cuts_every_batch_into_pieces():
    assert shards(batches(8, 4), split_batches=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_an_uneven_end_is_filled_up_from_the_start():
    assert shards(batches(10, 4)) == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


def test_an_uneven_end_is_dropped_with_drop_last():
    assert shards(batches(10, 4, drop_last=True)) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_an_uneven_end_stays_uneven_without_even_batches():
    assert shards(batches(10, 4), even_batches=False) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]]


def test_fewer_samples_than_ranks_are_repeated_until_all_have_a_batch():
    assert shards(batches(2, 2), n=3) == [[[0, 1]], [[0, 1]], [[0, 1]]]


class OwnBatches:
    """A batch sampler of a script's own; *said* are the attributes by which it describes itself."""

    def __init__(self, *batches, **said):
        self.batches = batches
        vars(self).update(said)

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


VARYING = ([0], [1, 2], [3, 4, 5])


@pytest.mark.parametrize(
    ("sampler", "even", "expected"),
    [
        (list(VARYING), True, [[[0], [3, 4, 5]], [[1, 2], [0]]]),
        (OwnBatches(*VARYING), True, [[[0], [3, 4, 5]], [[1, 2], [0]]]),
        (OwnBatches(*VARYING), False, [[[0], [3, 4, 5]], [[1, 2]]]),
        (OwnBatches(*VARYING, drop_last=True), True, [[[0]], [[1, 2]]]),
        (OwnBatches([0, 1], [2, 3], [4, 5]), True, [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]),
        (OwnBatches(*VARYING, batch_size=3), True, [[[0], [3, 4, 5]], [[1, 2], [0, 1, 2]]]),
        (OwnBatches(*VARYING, batch_size=3), False, [[[0], [3, 4, 5]], [[1, 2]]]),
        (OwnBatches(*VARYING, [6, 7], batch_size=3), True, [[[0], [3, 4, 5]], [[1, 2], [6, 7, 0]]]),
        (OwnBatches(*VARYING, [6, 7], batch_size=3), False, [[[0], [3, 4, 5]], [[1, 2], [6, 7]]]),
        (OwnBatches(*VARYING, batch_size=2), True, [[[0], [3, 4, 5]], [[1, 2], [0]]]),
    ],
)
def test_even_batches_decides_whether_all_ranks_get_equally_many_batches_that_vary(sampler, even, expected):
    made = [BatchSamplerShard(sampler, 2, rank, even_batches=even) for rank in range(2)]
    assert [list(shard) for shard in made] == expected
    assert [len(shard) for shard in made] == [len(part) for part in expected]
    assert [list(shard.batches_from(1)) for shard in made] == [part[1:] for part in expected]


@pytest.mark.parametrize("sampler", [OwnBatches(*VARYING), OwnBatches(*VARYING, batch_size=2)])
def test_batches_that_vary_are_cut_only_without_even_batches(sampler):
    with pytest.raises(ValueError, match="even_batches=False"):
        shards(sampler, split_batches=True)
    assert shards(sampler, split_batches=True, even_batches=False) == [[[0], [1], [3, 4]], [[2], [5]]]


def test_batches_that_cannot_be_split_evenly_are_refused():
    with pytest.raises(ValueError, match="batch_size 5 is not a multiple of 2"):
        BatchSamplerShard(batches(10, 5), 2, 0, split_batches=True)


@pytest.mark.parametrize("length", range(1, 10))
def test_a_rank_without_a_piece_of_the_last_batch_counts_one_batch_less(length):
    made = [BatchSamplerShard(batches(length, 4), 4, rank, split_batches=True, even_batches=False) for rank in range(4)]
    assert [len(shard) for shard in made] == [len(list(shard)) for shard in made]


CASES = list(
    itertools.product((1, 2, 5, 8, 9, 16, 23), (1, 2, 4), (2, 3, 4), (False, True), (False, True), (False, True))
)


@pytest.mark.parametrize(("length", "size", "world", "split", "drop", "even"), CASES)
def test_the_index_plan_cuts_exactly_as_the_shard_does(length, size, world, split, drop, even):
    if split:
        size *= world
    plan = IndexPlan(length, size, world, split, drop, even)
    for rank in range(world):
        shard = BatchSamplerShard(batches(length, size, drop), world, rank, split, even)
        expected = list(shard)
        assert list(cut(plan, rank)) == expected
        assert plan.batches(rank) == len(expected)
        assert list(shard.batches_from(1)) == expected[1:]
        if not split or even:
            assert len(shard) == len(expected)
    if not drop:
        assert {i for rank in range(world) for batch in cut(plan, rank) for i in batch} == set(range(length))


def cut(plan, rank):
    for number in range(plan.full_rounds):
        begin = number * plan.global_batch + rank * plan.rows
        yield list(range(begin, begin + plan.rows))
    if last := [i for begin, end in plan.last_ranges(rank) for i in range(begin, end)]:
        yield last
