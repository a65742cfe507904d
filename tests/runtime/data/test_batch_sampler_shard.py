"""Batches of any batch sampler, dealt out to ranks."""

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from orc.runtime.data.samplers import BatchSamplerShard


def batches(length, size, drop_last=False):
    return BatchSampler(SequentialSampler(range(length)), size, drop_last)


def shards(sampler, n=2, **options):
    return [list(BatchSamplerShard(sampler, n, rank, **options)) for rank in range(n)]


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
