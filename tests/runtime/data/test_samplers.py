"""Seeds of shuffles, sizes of batches, and the shares of a batch sampler, against lists made by hand."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from orc.runtime.data.samplers import BatchSamplerShard, SeedableRandomSampler, fixed_batch_size


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def epoch_of(seed, length=9):
    return torch.randperm(length, generator=seeded(seed)).tolist()


class Batches:
    """A batch sampler of a script's own."""

    def __init__(self, given, **attributes):
        self.given = given
        self.__dict__.update(attributes)

    def __iter__(self):
        return iter(self.given)


class Counted(Batches):
    def __len__(self):
        return len(self.given)


class Epochs:
    """Something that wants to know the epoch."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_every_finished_pass_goes_on_to_the_next_epoch():
    sampler = SeedableRandomSampler(range(9), data_seed=20)
    assert [sampler.epoch, sampler.initial_seed] == [0, 20]
    assert [list(sampler) for _ in range(3)] == [epoch_of(20), epoch_of(21), epoch_of(22)]
    assert sampler.epoch == 3
    sampler.set_epoch(1)
    assert list(sampler) == epoch_of(21)


def test_a_pass_that_is_left_stays_in_its_epoch():
    sampler = SeedableRandomSampler(range(9), data_seed=20)
    assert list(itertools.islice(sampler, 4)) == epoch_of(20)[:4]
    assert list(sampler) == epoch_of(20)


def test_the_seed_of_a_sampler_is_the_given_one_or_that_of_torch():
    torch.manual_seed(11)
    generator = seeded(5)
    assert SeedableRandomSampler(range(3)).initial_seed == 11
    assert SeedableRandomSampler(range(3), generator=generator).initial_seed == 11, "as documented"
    assert SeedableRandomSampler(range(3), generator=generator, data_seed=0).initial_seed == 0
    assert SeedableRandomSampler(range(3), generator=generator).generator is generator


def test_a_sampler_draws_from_its_own_generator():
    before = torch.get_rng_state()
    sampler = SeedableRandomSampler(range(9), data_seed=20)
    list(sampler)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_takes_the_options_of_torch():
    sampler = SeedableRandomSampler(range(2), True, num_samples=40, data_seed=1)
    assert (sampler.replacement, sampler.num_samples, len(list(sampler))) == (True, 40, 40)


@pytest.mark.parametrize(
    ("batches", "size"),
    [
        ([], None),
        ([[]], None),
        ([[1, 2, 3]], 3),
        ([[1, 2], [3, 4]], 2),
        ([[1, 2], [3, 4], [5]], 2),
        (((1, 2), (3,)), 2),
        ([[1], [2, 3]], None),
        ([[1, 2], []], None),
        ([[1, 2], [3], [4]], None),
        ([[1], [2, 3], [4]], None),
        (Batches([[1, 2]]), None),
        (Batches([[1, 2]], batch_size=7), 7),
    ],
)
def test_the_size_of_batches_is_known_where_only_the_last_is_shorter(batches, size):
    assert fixed_batch_size(batches) == size


def test_a_shard_of_one_process_has_all_batches_in_one_size():
    shard = BatchSamplerShard(BatchSampler(range(5), 2, False))
    assert list(shard) == [[0, 1], [2, 3], [4, 0]]
    assert (shard.num_processes, shard.process_index, shard.batch_size) == (1, 0, 2)
    assert (shard.split_batches, shard.even_batches, shard.drop_last) == (False, True, False)


def test_a_shard_tells_what_it_knows_of_the_sampler():
    order = SequentialSampler(range(5))
    shard = BatchSamplerShard(BatchSampler(order, 2, True))
    assert shard.sampler is order
    assert (shard.drop_last, shard.total_length, shard.tail) == (True, 2, None)
    bare = BatchSamplerShard(Batches([]), even_batches=False)
    assert (bare.sampler, bare.drop_last, bare.total_length, bare.batch_size) == (None, False, None, None)
    assert BatchSamplerShard([[1], [2]]).total_length == 2


def test_batches_without_a_size_are_not_cut_with_even_batches():
    with pytest.raises(ValueError, match="even_batches") as refused:
        BatchSamplerShard(Batches([]), 2, 0, split_batches=True)
    assert str(refused.value) == (
        "split_batches cuts each batch into 2 equal parts, and Batches has no batch_size, so its batches may vary: "
        "pass even_batches=False for parts that vary as well"
    )
    assert BatchSamplerShard(Batches([]), 2, 0).batch_size is None


def test_batches_without_equal_parts_are_refused():
    with pytest.raises(ValueError, match="split") as refused:
        BatchSamplerShard(Batches([], batch_size=8), 3, 0, True)
    assert str(refused.value) == "split_batches cuts each batch into 3 equal parts: batch_size 8 is not a multiple of 3"
    assert BatchSamplerShard(Batches([], batch_size=8), 3, 0).batch_size == 8
    assert BatchSamplerShard(Batches([]), 3, 0, True, False).batch_size is None


def dealt(given, n, split=False, even=True, drop=False, size=None):
    """The batches of every rank and the samples of the last round where it was filled up, by hand."""
    if not split:
        given = [list(itertools.chain(*given[i : i + n])) for i in range(0, len(given), n)]
    rounds, tail = [list(taken) for taken in given], None
    whole = (size or 0) * (1 if split else n)
    if rounds and len(rounds[-1]) < whole:
        if drop:
            rounds.pop()
        elif even:
            tail = len(rounds[-1])
            rounds[-1] = list(itertools.islice(itertools.chain(rounds[-1], itertools.cycle(rounds[0])), whole))
    shares = []
    for rank in range(n):
        pieces = []
        for taken in rounds:
            rows = (whole or -(-len(taken) // n) * n) // n
            pieces.append(taken[rank * rows : (rank + 1) * rows])
        shares.append([piece for piece in pieces if piece])
    return shares, tail


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop", [False, True])
def test_shares_are_those_dealt_by_hand_from_any_start(n, split, even, drop):
    size = 6 if split else 2
    for length, rank in itertools.product((0, 1, 2, 5, 6, 7, 12, 13, 14, 17), range(n)):
        given = [tuple(range(i, min(i + size, length))) for i in range(0, length, size)]
        shares, tail = dealt(given, n, split, even, drop, size)
        shard = BatchSamplerShard(Counted(given, batch_size=size, drop_last=drop), n, rank, split, even)
        assert list(shard) == shares[rank]
        assert shard.tail == tail
        for start in range(len(given) + 1):
            assert list(shard.batches_from(start)) == shares[rank][start:]
            assert shard.tail == tail
        assert list(shard.batches_from(0, given[:1])) == dealt(given[:1], n, split, even, drop, size)[0][rank]


VARYING = [[0, 1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]


def test_a_round_of_batches_of_any_size_that_misses_some_is_dropped_where_the_last_is():
    shards = [BatchSamplerShard(Batches(VARYING, drop_last=True), 2, rank, even_batches=False) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[VARYING[0], VARYING[2]], [VARYING[1], VARYING[3]]]


@pytest.mark.parametrize("drop", [False, True])
def test_batches_of_any_size_are_split_as_evenly_as_they_can_be(drop):
    shards = [BatchSamplerShard(Batches(VARYING, drop_last=drop), 2, rank, True, False) for rank in range(2)]
    expected = [[0, 1, 2, 3], [7], [8, 9], [11], [13, 14, 15]], [[4, 5, 6], [10], [12], [16, 17]]
    assert [list(shard) for shard in shards] == list(expected)


def test_what_was_filled_up_is_forgotten_when_the_next_pass_begins():
    shard = BatchSamplerShard(BatchSampler(range(5), 2, False), 2, 0)
    list(shard)
    assert shard.tail == 1
    next(iter(shard))
    assert shard.tail is None


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_length_of_a_shard_is_the_number_of_its_batches(n, even, drop, split):
    for length, rank in itertools.product(range(30), range(n)):
        shard = BatchSamplerShard(BatchSampler(range(length), 12 if split else 2, drop), n, rank, split, even)
        assert len(shard) == len(list(shard)), length


def test_of_batches_of_a_scripts_own_all_are_counted():
    """Nobody can tell before whether the last one has a piece for every rank."""
    sampler = Counted([[0, 1, 2, 3], [4]], batch_size=4, sampler=range(5))
    assert [len(BatchSamplerShard(sampler, 4, rank, True, False)) for rank in range(4)] == [2] * 4


def test_the_epoch_is_told_to_what_asks_for_it():
    batches, order = Epochs(), Epochs()
    batches.batch_size, batches.sampler = 2, order
    BatchSamplerShard(batches).set_epoch(6)
    assert (batches.epoch, order.epoch) == (6, 6)
    BatchSamplerShard(BatchSampler(range(4), 2, False)).set_epoch(7)
    sampler = SeedableRandomSampler(range(4), data_seed=0)
    BatchSamplerShard(BatchSampler(sampler, 2, False)).set_epoch(7)
    assert sampler.epoch == 7
