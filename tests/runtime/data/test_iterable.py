"""Streams of samples, dealt out to ranks."""

import pytest
from torch.utils.data import IterableDataset

from orc.runtime.data.iterable import IterableDatasetShard


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))

    def __len__(self):
        return self.count


def shards(count, n=2, **options):
    return [list(IterableDatasetShard(Numbers(count), num_processes=n, process_index=r, **options)) for r in range(n)]


def test_every_rank_takes_a_batch_of_each_round():
    assert shards(8, batch_size=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_split_batches_takes_a_piece_of_each_batch():
    assert shards(8, batch_size=4, split_batches=True) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_the_last_round_is_filled_up_from_the_first():
    assert shards(10, batch_size=4) == [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]
    assert shards(3, batch_size=4) == [[0, 1, 2, 0], [1, 2, 0, 1]]


def test_the_last_round_is_dropped_with_drop_last():
    assert shards(10, batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 40])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_the_length_is_what_is_yielded(count, drop_last, split):
    for rank in range(2):
        shard = IterableDatasetShard(Numbers(count), 4, drop_last, 2, rank, split)
        assert len(list(shard)) == len(shard)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("count", [3, 8, 10, 16])
def test_a_later_start_gives_the_rest_of_the_rounds(start, count):
    shard = IterableDatasetShard(Numbers(count), 2, False, 2, 1)
    assert list(shard.rounds(start)) == list(shard.rounds(0))[start:]
