"""Every kind of loader in every way of sharing it out, against a reference that is worked out by hand."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from orc.runtime import prepare_data_loader
from orc.runtime.core.context import current_context

pytestmark = pytest.mark.distributed

SIZE = 4
EPOCHS = 2
LENGTHS = (3, 23, 32)  # fewer than a step has, not a multiple, and one of every step


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class ReadyBatches(Rows):
    """For loaders without a batch size: every item is a batch of one row."""

    def __getitem__(self, index):
        return torch.tensor([index])


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


class Varying(Sampler):
    """A batch sampler of a script's own, of batches of 1, 2 and 3 rows."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        rest, size = list(range(self.length)), 0
        while rest:
            size = size % 3 + 1
            yield rest[:size]
            rest = rest[size:]


class Reversed(Varying):
    """A batch sampler of a script's own that says how large its batches are."""

    batch_size = SIZE
    drop_last = False

    def __iter__(self):
        order = list(reversed(range(self.length)))
        return iter([order[at : at + SIZE] for at in range(0, self.length, SIZE)])

    def __len__(self):
        return -(-self.length // SIZE)


def plain(kind, length, drop):
    """The loader of a script; the same on every call."""
    rows, made = Rows(length), torch.Generator().manual_seed(5)
    batched = {"batch_size": SIZE, "drop_last": drop}
    ready = {"batch_size": None}
    return {
        "sequential": lambda: DataLoader(rows, **batched),
        "shuffle": lambda: DataLoader(rows, shuffle=True, **batched),
        "own generator": lambda: DataLoader(rows, shuffle=True, generator=made, **batched),
        "replacement": lambda: DataLoader(
            rows, sampler=RandomSampler(rows, replacement=True, num_samples=length, generator=made), **batched
        ),
        "subset": lambda: DataLoader(rows, sampler=SubsetRandomSampler(range(length), generator=made), **batched),
        "weighted": lambda: DataLoader(
            rows, sampler=WeightedRandomSampler([1.0 + i for i in range(length)], length, generator=made), **batched
        ),
        "batch sampler": lambda: DataLoader(
            rows, batch_sampler=torch.utils.data.BatchSampler(SequentialSampler(rows), SIZE, drop)
        ),
        "own batch sampler": lambda: DataLoader(rows, batch_sampler=Reversed(length)),
        "varying batches": lambda: DataLoader(rows, batch_sampler=Varying(length)),
        "ready batches": lambda: DataLoader(ReadyBatches(length), **ready),
        "ready batches, shuffled": lambda: DataLoader(ReadyBatches(length), shuffle=True, generator=made, **ready),
        "stream": lambda: DataLoader(Stream(rows), **batched),
        "stream of ready batches": lambda: DataLoader(Stream(ReadyBatches(length)), **ready),
    }[kind]()


KINDS = (
    *("sequential", "shuffle", "own generator", "replacement", "subset", "weighted", "batch sampler"),
    *("own batch sampler", "varying batches", "ready batches", "ready batches, shuffled"),
    *("stream", "stream of ready batches"),
)


class Cell(NamedTuple):
    kind: str
    length: int
    dispatch: bool
    split: bool
    even: bool
    drop: bool

    @property
    def size(self):
        return None if self.kind == "varying batches" else 1 if "ready" in self.kind else SIZE

    def sensible(self, world):
        """Without what is refused, each with its own message: tested where it is refused."""
        if self.split and (self.size == 1 or (self.dispatch and self.size is None)):
            return False  # no batches to split, or none of a known size
        if self.kind == "varying batches" and self.even and self.split and world > 1:
            return False
        if not self.even and (self.kind.startswith("stream") or self.dispatch):
            return False  # changes nothing there
        return not (self.drop and (self.size != SIZE or self.kind == "own batch sampler"))


CELLS = [
    Cell(*one) for one in itertools.product(KINDS, LENGTHS, (False, True), (False, True), (False, True), (False, True))
]


def run(cells):
    """What this rank reads in each of *cells*, in each epoch, and what the loader says about the last batch."""
    context, results = current_context(), []
    for cell in cells:
        torch.manual_seed(7 + context.rank)
        loader = prepare_data_loader(
            plain(cell.kind, cell.length, cell.drop),
            dispatch_batches=cell.dispatch,
            split_batches=cell.split,
            even_batches=cell.even,
        )
        epochs = []
        for _ in range(EPOCHS):
            batches, ends = [], []
            for batch in loader:
                batches.append(batch.tolist())
                ends.append(loader.end_of_dataloader)
            epochs.append((batches, ends, loader.remainder))
        results.append(epochs)
    return results


def unprepared(cell, world):
    """The batches of each epoch as the script's own loader has them on one process, drawn from what several share."""
    torch.manual_seed(7)
    loader = plain(cell.kind, cell.length, cell.drop)
    if world > 1 and cell.dispatch:
        loader.generator = None  # rank 0 draws the seeds of workers from torch's own
    elif world > 1 and getattr(loader.sampler, "generator", 0) is None:
        loader.sampler.generator = torch.Generator()
        loader.sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]


def rounds(batches, per_round):
    return [batches[at : at + per_round] for at in range(0, len(batches), per_round)]


def filled(rows, source, wanted):
    return (rows + source * wanted)[:wanted]


def by_hand(cell, world, batches):
    """The batches of every rank, and the rows of the last round that are no repetitions (-1: all)."""
    if world == 1:
        return [batches], -1
    ranks, remainder, size = [[] for _ in range(world)], -1, cell.size
    start = [row for batch in batches for row in batch]
    for group in rounds(batches, 1 if cell.split else world):
        rows = [row for batch in group for row in batch]
        missing = len(group) < (1 if cell.split else world)
        full = not missing and size is not None and all(len(batch) == size for batch in group)
        if missing and cell.drop and not (cell.dispatch and cell.kind == "batch sampler"):
            break  # a batch sampler drops by itself, and all that it yields is dispatched
        if cell.dispatch and (not full or cell.split):
            share = -(-len(rows) // world)
            remainder = -1 if share * world == len(rows) else len(rows)
            rows = filled(rows, batches[0] if not missing or len(group) else rows, share * world)
            parts = [rows[r * share : (r + 1) * share] for r in range(world)]
        elif full or size is None:
            share = -(-len(rows) // world)
            remainder = -1
            parts = [rows[r * share : (r + 1) * share] for r in range(world)] if cell.split else group
            if missing and cell.even:
                remainder, parts = len(rows), filled(group, batches[:world], world)
        else:
            share = size // world if cell.split else size
            if cell.even:
                remainder = len(rows)
                rows = filled(rows, start, share * world)
            parts = [rows[r * share : (r + 1) * share] for r in range(world)]
        for rank, part in enumerate(parts):
            if part:
                ranks[rank].append(part)
    return ranks, remainder


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_loader_is_shared_out_as_the_reference_says(run_ranks, world):
    cells = [cell for cell in CELLS if cell.sensible(world)]
    results = run_ranks(world, run, cells, timeout=120)
    wrong = []
    for number, cell in enumerate(cells):
        mine = [result[number] for result in results]
        for epoch, batches in enumerate(unprepared(cell, world)):
            expected, remainder = by_hand(cell, world, batches)
            seen = [rank[epoch][0] for rank in mine]
            ends = [rank[epoch][1] for rank in mine]
            remainders = {rank[epoch][2] for rank in mine if rank[epoch][0]}
            last = [[at == len(own) - 1 for at in range(len(own))] for own in expected]
            if seen != expected or ends != last or not remainders <= {remainder}:
                wrong.append((cell, epoch, seen, expected, ends, remainders, remainder))
    assert not wrong, f"{len(wrong)} of {2 * len(cells)}; the first: {wrong[0]}"
