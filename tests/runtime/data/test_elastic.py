"""An epoch that goes on with another number of processes, or other batches: the rest is cut anew, nothing is lost."""

import copy
from itertools import chain

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext
from orc.runtime.data.plan import PositionError
from orc.runtime.data.prepare import prepare_data_loader, skip_first_batches
from orc.runtime.launch.environment import detect

LENGTH = 203
WORLDS = (4, 3, 2, 4)  # hosts: one is lost, another, and two join


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(LENGTH))


class Remembering(IterableDataset):
    """A stream that can say where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for number in range(begin, LENGTH):
            self.at = number + 1
            yield number
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Grouped(Sampler):
    """A batch sampler of a script's own: batches that only it can make, of different sizes."""

    def __init__(self, batch_size=None):
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(2)

    def __iter__(self):
        order = torch.randperm(LENGTH, generator=self.generator).tolist()
        while order:
            size = self.batch_size or 1 + order[0] % 4
            yield order[:size]
            order = order[size:]


def seeded():
    return torch.Generator().manual_seed(5)


KINDS = {
    "sequential": lambda size: DataLoader(range(LENGTH), size),
    "shuffled": lambda size: DataLoader(range(LENGTH), size, shuffle=True, generator=seeded()),
    "dropping the last": lambda size: DataLoader(range(LENGTH), size, shuffle=True, generator=seeded(), drop_last=True),
    "subset": lambda size: DataLoader(
        range(LENGTH), size, sampler=SubsetRandomSampler(range(LENGTH), generator=seeded())
    ),
    "weighted": lambda size: DataLoader(
        range(LENGTH),
        size,
        sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH, replacement=False, generator=seeded()),
    ),
    "stream": lambda size: DataLoader(Numbers(), size),
    "stream with workers": lambda size: DataLoader(Numbers(), size, num_workers=2),
    "stream with a state": lambda size: DataLoader(Remembering(), size),
    "without batches": lambda size: DataLoader(range(LENGTH), None, shuffle=True, generator=seeded()),
    "own batches": lambda size: DataLoader(range(LENGTH), batch_sampler=Grouped(3)),
    "own batches that vary": lambda size: DataLoader(range(LENGTH), batch_sampler=Grouped()),
    "batches in a list": lambda size: DataLoader(
        range(LENGTH), batch_sampler=list(BatchSampler(SequentialSampler(range(LENGTH)), 3, False))
    ),
}
UNEVEN = {"own batches that vary"}


def prepare(loader, ranks, rank, **options):
    context = RunContext(0, 1, 0, 1, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, context=context, **options)


def gang(make, world, size, state=None, **options):
    """The prepared loaders of all ranks of a run."""
    loaders = []
    for rank in range(world):
        torch.manual_seed(8)  # simulated ranks have no process group, so they share the seed
        loaders.append(prepare(make(size), world, rank, **options))
        if state is not None:
            loaders[-1].load_state_dict(copy.deepcopy(state))
    return loaders


def samples(batches):
    return [int(one) for batch in batches for one in (batch if isinstance(batch, torch.Tensor) else [batch])]


def steps(loaders, count=None):
    """The samples that all ranks see in each of the next *count* steps, and the position after them."""
    seen, state = [], None
    iterators = [iter(loader) for loader in loaders]
    while count is None or len(seen) < count:
        batches = [batch for batch in (next(one, None) for one in iterators) if batch is not None]
        if not batches:
            break
        seen.append(samples(batches))
        state = copy.deepcopy(loaders[0].state_dict())
    return seen, state


def own_samples(loaders, seen):
    """*seen* without the repetitions that fill up the last step."""
    remainder = loaders[0].remainder
    return list(chain.from_iterable(seen[:-1])) + (seen[-1] if remainder < 0 else seen[-1][:remainder])


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_sample_of_an_epoch_is_seen_once_however_often_the_number_of_hosts_changes(kind, even):
    even = even and kind not in UNEVEN
    make, options = KINDS[kind], {"even_batches": even}
    order = list(chain.from_iterable(steps(gang(make, 1, LENGTH))[0]))
    seen, state = [], None
    for world in WORLDS[:-1]:
        taken, state = steps(gang(make, world, 5, state, **options), 3)
        seen += chain.from_iterable(taken)
        assert state["live"]
        assert state["rounds"] % 3 == 0
    last = gang(make, WORLDS[-1], 5, state, **options)
    rest, _ = steps(last)
    seen += own_samples(last, rest)
    if kind == "dropping the last":
        assert seen == order[: len(seen)]
        assert LENGTH - len(seen) < 4 * 5
    elif even:
        assert seen == order
    else:
        assert sorted(seen) == sorted(order)
    # The next epoch is whole again, and cut from its start.
    following, _ = steps(last)
    assert len(set(chain.from_iterable(following))) >= (LENGTH if kind != "dropping the last" else 200)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "subset", "stream"])
def test_another_batch_size_continues_with_the_next_sample(kind, split):
    make = KINDS[kind]
    order = list(chain.from_iterable(steps(gang(make, 1, LENGTH))[0]))
    first, state = steps(gang(make, 2, 8, split_batches=split), 4)
    seen = list(chain.from_iterable(first))
    assert state["offset"] == len(seen) == 4 * (8 if split else 16)
    for size in (6, 10):
        taken, state = steps(gang(make, 2, size, state, split_batches=split), 2)
        seen += chain.from_iterable(taken)
        assert state["offset"] == len(seen)
        assert state["global_batch"] == size * (1 if split else 2)
    assert seen == order[: len(seen)]


def test_a_position_that_needs_no_new_cut_keeps_the_count_of_batches():
    make = KINDS["shuffled"]
    whole, _ = steps(gang(make, 2, 8))
    _, state = steps(gang(make, 2, 8), 4)
    four = gang(make, 4, 4, state)
    assert steps(four)[0] == whole[4:]


def test_batches_that_only_the_script_can_make_are_dealt_out_whole_to_other_ranks():
    make = KINDS["own batches that vary"]
    batches = [samples([batch]) for batch in gang(make, 1, 1)[0]]
    _, state = steps(gang(make, 4, 1, even_batches=False), 3)
    rest, _ = steps(gang(make, 3, 1, state, even_batches=False), 2)
    assert rest == [list(chain.from_iterable(batches[n : n + 3])) for n in (12, 15)]
    _, state = steps(gang(KINDS["own batches"], 2, 1), 3)
    with pytest.raises(PositionError, match="batches of 3, now they have 4, and only Grouped knows"):
        prepare(DataLoader(range(LENGTH), batch_sampler=Grouped(4)), 2, 0).load_state_dict(state)


def test_the_end_of_an_epoch_has_nothing_left_at_any_number_of_ranks():
    make = KINDS["shuffled"]
    loaders = gang(make, 4, 5)
    for _ in zip(*loaders, strict=True):
        state = copy.deepcopy(loaders[0].state_dict())
    three = gang(make, 3, 5, state)
    assert steps(three) == ([], None)
    assert len(steps(three)[0]) == -(-LENGTH // 15)


def test_what_is_counted_follows_the_samples():
    make = KINDS["shuffled"]
    _, state = steps(gang(make, 4, 5), 3)
    loader = gang(make, 3, 5, state)[0]
    seen = []
    for _ in loader:
        seen.append((loader.samples_seen, loader.end_of_dataloader))
    assert seen[0] == (60 + 15, False)
    assert seen[-1][1]
    assert [end for _, end in seen].count(True) == 1
    assert len(loader) == -(-LENGTH // 15), "a length is that of an epoch"


def test_skipping_by_count_after_a_new_cut_is_refused_unless_it_means_the_same_place():
    make = KINDS["shuffled"]
    _, state = steps(gang(make, 4, 5), 3)
    [three, again, *_] = gang(make, 3, 5, state)
    assert samples(skip_first_batches(three, 3)) == samples(gang(make, 3, 5, state)[0])
    with pytest.raises(PositionError, match=r"skip_first_batches\(4\).* 60 samples into the epoch.*leave skip_first"):
        next(iter(skip_first_batches(again, 4)))


def test_data_that_shares_itself_out_is_refused_at_another_number_of_processes():
    class Own(Numbers):
        __orc_sharded__ = True

    _, state = steps(gang(lambda size: DataLoader(Own(), size), 4, 5), 3)
    with pytest.raises(PositionError, match="then to 4 processes, now to 3"):
        gang(lambda size: DataLoader(Own(), size), 3, 5, state)
    gang(lambda size: DataLoader(Own(), size), 4, 5, state)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_stream_that_shares_itself_out_to_workers_is_refused_when_it_is_read():
    class ByWorker(IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            return iter(range(info.id, LENGTH, info.num_workers))

    def make(size):
        return DataLoader(ByWorker(), size, num_workers=2)

    _, state = steps(gang(make, 1, 5), 3)
    with pytest.raises(PositionError, match="shares itself out to the worker processes"):
        next(iter(gang(make, 1, 4, state)[0]))
