"""In which order ranks read what is drawn at random: that of torch's own samplers, from what rank 0 draws first."""

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from orc.runtime import prepare_data_loader, set_seed
from orc.runtime.core.context import current_context
from orc.runtime.data.samplers import SeedableRandomSampler

pytestmark = pytest.mark.distributed

ROWS, SIZE, SEED = 120, 12, 3


class DrawnStream(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=self.generator).tolist())


class DrawnBatches(Sampler):
    """A batch sampler of a script's own, with a place for a generator."""

    generator, batch_size, drop_last = None, SIZE, False

    def __iter__(self):
        return iter(torch.randperm(ROWS, generator=self.generator).view(-1, SIZE).tolist())

    def __len__(self):
        return ROWS // SIZE


def sampler(kind, generator=None):
    return {
        "shuffle": lambda: RandomSampler(range(ROWS), generator=generator),
        "replacement": lambda: RandomSampler(range(ROWS), replacement=True, generator=generator),
        "more than there are": lambda: RandomSampler(range(ROWS), num_samples=150, generator=generator),
        "subset": lambda: SubsetRandomSampler(range(ROWS), generator=generator),
        "weighted": lambda: WeightedRandomSampler([1.0 + row for row in range(ROWS)], ROWS, generator=generator),
    }[kind]()


def plain(kind):
    if kind == "stream":
        return DataLoader(DrawnStream(), batch_size=SIZE)
    if kind == "batch sampler":
        return DataLoader(range(ROWS), batch_sampler=DrawnBatches())
    return DataLoader(range(ROWS), sampler=sampler(kind), batch_size=SIZE)


class Row(NamedTuple):
    kind: str
    draws: str  # what the epochs are drawn from, see `expected`
    options: dict = {}  # noqa: RUF012
    own_seeds: bool = False  # each rank has another seed


TABLE = [
    *(Row(kind, "seeded once") for kind in ("shuffle", "replacement", "more than there are", "subset", "weighted")),
    Row("shuffle", "seeded once", own_seeds=True),
    Row("shuffle", "seeded once", {"data_seed": 17}),
    Row("shuffle", "seeded once", {"split_batches": True}),
    Row("subset", "seeded once", {"even_batches": False}),
    *(Row(kind, "default", {"dispatch_batches": True}) for kind in ("shuffle", "subset", "weighted", "batch sampler")),
    *(Row(kind, "default", {"use_seedable_sampler": True}) for kind in ("subset", "weighted")),
    Row("subset", "default", {"use_seedable_sampler": True}, own_seeds=True),
    Row("batch sampler", "default"),
    Row("batch sampler", "default", own_seeds=True),
    Row("shuffle", "seedable", {"use_seedable_sampler": True}),
    Row("shuffle", "seedable", {"use_seedable_sampler": True, "data_seed": 17}),
    Row("stream", "epoch", {"dispatch_batches": False}),
]


def expected(row, world, passes):
    """The order of each pass: torch's samplers iterated here, as an unprepared loader would iterate them on rank 0."""
    set_seed(SEED)
    if world == 1:
        kind = plain(row.kind)
        source = kind.dataset if row.kind == "stream" else kind.batch_sampler
        if row.draws == "seedable":
            source = SeedableRandomSampler(range(ROWS), data_seed=row.options.get("data_seed", SEED))
    elif row.draws == "seeded once":
        seed = int(torch.empty((), dtype=torch.int64).random_())
        source = sampler(row.kind, torch.Generator().manual_seed(seed))
    elif row.draws == "seedable":
        source = SeedableRandomSampler(range(ROWS), data_seed=row.options.get("data_seed", SEED))
    elif row.draws == "default":
        source = DrawnBatches() if row.kind == "batch sampler" else sampler(row.kind)
    orders = []
    for epoch in range(passes):
        torch.empty((), dtype=torch.int64).random_()  # an iterator of torch's loader draws a seed for workers first
        if world > 1 and row.draws == "epoch":
            source = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
        orders.append([index for item in source for index in (item if isinstance(item, list) else [item])])
    return orders, torch.rand(2).tolist()


def read(table, passes):
    """What this rank reads in each pass, and what torch's generator yields after them."""
    context, results = current_context(), []
    for row in table:
        set_seed(SEED + context.rank * row.own_seeds)
        loader = prepare_data_loader(plain(row.kind), **row.options)
        batches = [[batch.tolist() for batch in loader] for _ in range(passes)]
        results.append((batches, torch.rand(2).tolist()))
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_together_read_the_order_of_torchs_sampler_and_leave_its_generators_where_it_does(run_ranks, world):
    results = run_ranks(world, read, TABLE, 3)
    for number, row in enumerate(TABLE):
        orders, after = expected(row, world, 3)
        ranks = [result[number] for result in results]
        for epoch, order in enumerate(orders):
            mine = [list(batches[epoch]) for batches, _ in ranks]
            dealt = [index for at in range(max(map(len, mine))) for own in mine for index in (own[at:] or [[]])[0]]
            assert dealt[: len(order)] == order, (row, epoch)
        assert ranks[0][1] == after, row
        if not row.own_seeds and row.draws != "default":
            assert [rank[1] for rank in ranks] == [after] * world, row


def left_early(taken):
    set_seed(SEED)
    loader = prepare_data_loader(plain("shuffle"))
    next(batch for number, batch in enumerate(loader, 1) if number == taken)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("world", [1, 2])
def test_the_epoch_after_one_that_was_left_early_is_that_of_torchs_sampler(run_ranks, world):
    set_seed(SEED)
    generator = None
    if world > 1:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    loader = DataLoader(range(ROWS), sampler=sampler("shuffle", generator), batch_size=SIZE)
    next(iter(loader))
    order = [batch.tolist() for batch in loader]
    assert [batch for pair in zip(*run_ranks(world, left_early, 2), strict=True) for batch in pair] == order


def resumed(kind, options, saved_at, own_seeds):
    """What a run reads that is resumed in a new process, and what the run reads that was not interrupted."""
    rank = current_context().rank

    def begin(seed):
        set_seed(seed + rank * own_seeds)
        return prepare_data_loader(plain(kind), **options)

    loader, rest, state, drawn = begin(SEED), [], None, None
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if state is not None:
                rest.append(batch.tolist())
            if (epoch, number) == saved_at:
                state, drawn = loader.state_dict(), torch.get_rng_state()
    loader = begin(SEED + 100)  # the new process has drawn other numbers
    loader.load_state_dict(state)
    torch.set_rng_state(drawn)
    return [batch.tolist() for _ in range(3 - saved_at[0]) for batch in loader], rest


@pytest.mark.parametrize("saved_at", [(0, 0), (1, 2), (1, 4)], ids=["first batch", "middle", "last batch"])
@pytest.mark.parametrize(
    ("kind", "options", "own_seeds"),
    [
        ("shuffle", {}, False),
        ("shuffle", {}, True),
        ("shuffle", {"dispatch_batches": True}, False),
        ("subset", {}, False),
        ("subset", {"use_seedable_sampler": True}, False),
        ("weighted", {"dispatch_batches": True}, False),
        ("batch sampler", {}, True),
        ("stream", {"dispatch_batches": False}, False),
    ],
)
def test_a_resumed_run_reads_what_the_uninterrupted_one_does(run_ranks, kind, options, own_seeds, saved_at):
    for again, rest in run_ranks(2, resumed, kind, options, saved_at, own_seeds):
        assert again == rest


def passes_after(saved):
    loader = prepare_data_loader(plain("shuffle"))
    loader.load_state_dict(saved)
    set_seed(8)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_epochs_go_on_in_their_order_with_another_number_of_processes(run_ranks, first, then):
    """Between epochs, with the random numbers of the one process or the generator of the several."""
    saved = run_ranks(first, one_pass)[0]
    expected_passes = joined(run_ranks(first, passes_after, saved))
    assert joined(run_ranks(then, passes_after, saved)) == expected_passes


def one_pass():
    set_seed(SEED)
    loader = prepare_data_loader(plain("shuffle"))
    for _ in loader:
        pass
    return loader.state_dict()


def joined(ranks):
    """The order of each pass, from what each rank read of it."""
    return [
        [row for step in zip(*(rank[epoch] for rank in ranks), strict=True) for batch in step for row in batch]
        for epoch in range(len(ranks[0]))
    ]
