"""Batches of indices for a pass that begins anywhere, on every rank, against lists cut by hand."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from orc.runtime.data.index_batches import CustomBatches, PassSampler, PlanBatches
from orc.runtime.data.order import Order, ShuffledOrder
from orc.runtime.data.plan import IndexPlan, PositionError
from orc.runtime.data.position import Cut, Pass
from orc.runtime.data.samplers import BatchSamplerShard


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def alone(tensor):
    """What ranks agree on where there is one."""
    return tensor


def position(**changes):
    return {
        "epoch": 0,
        "live": True,
        "rounds": 3,
        "offset": 24,
        "global_batch": 8,
        "length": 50,
        "key": None,
        "generator": None,
    } | changes


def plan_batches(plan, rank=0, order=None, **options):
    return PlanBatches(plan, order or Order(plan.length), rank, alone, **options)


def custom_batches(batch_sampler, world=1, rank=0, split=False, even=True):
    return CustomBatches(BatchSamplerShard(batch_sampler, world, rank, split, even), alone, world)


class Given:
    """A batch sampler of a script's own."""

    def __init__(self, batches, **attributes):
        self.batches = batches
        self.__dict__.update(attributes)

    def __iter__(self):
        return iter(self.batches)


class GivenWithLength(Given):
    def __len__(self):
        return len(self.batches)


class Passes(PassSampler):
    """Yields the pass that it serves."""

    sampler = None

    def serve(self, current):
        yield current


def test_the_pass_that_begins_is_served_once_by_the_iterator_that_is_used():
    sampler, current = Passes(alone), Pass(epoch=3)
    assert sampler.share is alone
    assert list(sampler) == [Pass()]
    sampler.begin(current)
    iter(sampler)  # a loader with workers makes one that it does not use
    assert next(iter(sampler)) is current
    assert list(sampler) == [Pass()]


# Plans


def rounds_by_hand(order, taken, rows, world, drop, even):
    """The rounds of what is left of *order*; the last one filled up, dropped or short."""
    left = order[taken:]
    rounds = [left[i : i + rows * world] for i in range(0, len(left), rows * world)]
    if rounds and len(rounds[-1]) < rows * world:
        if drop:
            rounds.pop()
        elif even and world > 1:
            rounds[-1] += itertools.islice(itertools.cycle(order), rows * world - len(rounds[-1]))
    return rounds


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_a_pass_over_a_plan_begins_anywhere(shuffle, world, drop, even):
    for length, rows, cut in itertools.product(
        (1, 2, 7, 12, 13), (1, 2, 3), (Cut(), Cut(2, 5), Cut(1, 12), Cut(rounds=3))
    ):
        if cut.samples > length:
            continue
        order = ShuffledOrder(RandomSampler(range(length))) if shuffle else Order(length)
        key = {"kind": "shuffled", "seed": 4} if shuffle else {"kind": "sequential"}
        whole = list(RandomSampler(range(length), generator=seeded(4))) if shuffle else list(range(length))
        rounds = rounds_by_hand(whole, cut.samples, rows, world, drop, even)
        left_over = (length - cut.samples) % (rows * world)
        for rank in range(world):
            sampler = plan_batches(IndexPlan(length, rows, world, False, drop, even), rank, order)
            mine = [b for b in (taken[rank * rows : (rank + 1) * rows] for taken in rounds) if b]
            assert sampler.batches(Pass(cut=cut)) == cut.rounds + len(mine)
            assert sampler.tail(Pass(cut=cut)) == (left_over if even and not drop and world > 1 and left_over else -1)
            for skipped in range(len(mine) + 2):
                current = Pass(done=cut.rounds + skipped, key=key, cut=cut)
                assert list(sampler.serve(current)) == mine[skipped:]

                state = {}
                sampler.note(state, current)
                taken = cut.samples + skipped * rows * world
                offset = taken if skipped < len(mine) else length
                assert state == {"offset": offset, "global_batch": rows * world, "length": length}


def test_a_plan_sampler_describes_its_batches():
    marker = object()
    sampler = plan_batches(IndexPlan(13, 6, 3, split_batches=True, drop_last=True), 1, sampler=marker)
    assert sampler.sampler is marker
    assert (sampler.batch_size, sampler.drop_last, len(sampler), sampler.single) == (2, True, 2, False)
    assert plan_batches(IndexPlan(13, 6)).sampler is None
    assert plan_batches(IndexPlan(13, 6)).drop_last is False


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_batching_bare_indices_are_served(shuffle):
    order = ShuffledOrder(RandomSampler(range(5))) if shuffle else Order(5)
    key = {"kind": "shuffled", "seed": 4} if shuffle else {"kind": "sequential"}
    first, second, third, fourth, fifth = list(RandomSampler(range(5), generator=seeded(4))) if shuffle else range(5)
    samplers = [plan_batches(IndexPlan(5, 1, 2), rank, order, single=True) for rank in range(2)]
    assert [list(sampler.serve(Pass(key=key))) for sampler in samplers] == [
        [first, third, fifth],
        [second, fourth, first],
    ]
    assert samplers[0].batch_size is None
    assert samplers[0].single is True


def test_a_new_pass_draws_its_order_when_the_first_batch_is_asked_for():
    drawn = []

    class Noting(Order):
        def draw(self, epoch, share):
            drawn.append((epoch, share))
            return super().draw(epoch, share)

    sampler = plan_batches(IndexPlan(4, 2), order=Noting(4))
    current = Pass(epoch=6)
    sampler.begin(current)
    iterator = iter(sampler)
    assert (drawn, current.key) == ([], None)
    assert list(iterator) == [[0, 1], [2, 3]]
    assert (drawn, current.key) == ([(6, alone)], {"kind": "sequential"})
    list(sampler.serve(current))
    assert len(drawn) == 1


def test_a_plan_goes_on_from_a_position_with_any_number_of_samples_per_round():
    sampler = plan_batches(IndexPlan(50, 8))
    assert sampler.restore(position(), 8) == Cut()
    assert sampler.restore(position(key={"kind": "sequential"}), 5) == Cut(3, 24)


def test_a_plan_refuses_the_position_of_another_dataset():
    sampler = plan_batches(IndexPlan(51, 8))
    with pytest.raises(PositionError, match="dataset") as refused:
        sampler.restore(position(), 8)
    assert str(refused.value) == (
        "saved in the middle of an epoch of 50 samples, this loader's epoch has 51: the dataset changed"
    )


def test_a_plan_refuses_the_position_of_another_order():
    with pytest.raises(PositionError, match="saved from a seeded order of samples, this loader's is sequential"):
        plan_batches(IndexPlan(50, 8)).restore(position(key={"kind": "seeded"}), 8)


# Batch samplers of a script's own


def given(length, size):
    return [list(range(i, min(i + size, length))) for i in range(0, length, size)]


def test_a_batch_sampler_of_a_script_is_described_by_its_shard():
    batches = Given(given(13, 6), batch_size=6, drop_last=True)
    whole, split = custom_batches(batches, 2), custom_batches(batches, 2, split=True)
    assert (whole.sampler, whole.batch_size, whole.drop_last, whole.world_size) == (batches, 6, True, 2)
    assert (split.sampler, split.batch_size, split.drop_last, split.world_size) == (batches, 3, True, 2)
    assert isinstance(split.batch_size, int)
    assert whole.share is alone
    varying = custom_batches(Given([]), 2, split=True, even=False)
    assert (varying.batch_size, varying.drop_last) == (None, False)


def test_the_sampler_under_a_batch_sampler_is_the_one_seen():
    order = SequentialSampler(range(4))
    assert custom_batches(BatchSampler(order, 2, False)).sampler is order


def test_with_several_processes_the_shard_stands_for_the_given_batch_sampler():
    batches = GivenWithLength(given(6, 2), batch_size=2)
    several, one = custom_batches(batches, 2), custom_batches(batches)
    assert several.given is several.shard
    assert one.given is batches
    assert (len(several), len(one)) == (2, 3)


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        (Given([], sampler=Given([], generator=seeded(1)), generator=seeded(2)), 1),
        (Given([], sampler=Given([]), generator=seeded(2)), 2),
        (Given([], sampler=Given([], generator="mine"), generator=seeded(2)), 2),
        (Given([], generator=seeded(2)), 2),
        (Given([], sampler=Given([])), None),
    ],
)
def test_the_generator_is_that_of_the_sampler_or_else_of_the_batch_sampler(batches, found):
    holder = custom_batches(batches, even=False).holder
    assert (holder and holder.generator.initial_seed()) == found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_a_pass_over_given_batches_begins_after_any_of_them(world, split):
    for rank in range(world):
        batches = given(40, 6)  # the last one has 4
        sampler = custom_batches(GivenWithLength(batches, batch_size=6), world, rank, split)
        per_round = 1 if split else world
        for cut in (Cut(), Cut(1, 6 * per_round, per_round), Cut(2, 0, 3)):
            left = batches[cut.batches :]
            mine = list(BatchSamplerShard(Given(left, batch_size=6), world, rank, split)) if world > 1 else left
            for skipped in range(len(mine) + 1):
                current = Pass(done=cut.rounds + skipped, cut=cut)
                assert list(sampler.serve(current)) == mine[skipped:]
                assert current.key == {"kind": "custom", "state": None}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_consecutive_samples_of_a_sampler_are_cut_at_any_sample(drop, world):
    sampler = custom_batches(BatchSampler(range(10, 30), 4, drop), world, world - 1)
    cut = Cut(rounds=2, samples=5)
    left = given(15, 4)[: 3 if drop else 4]
    expected = [[15 + i for i in batch] for batch in left]
    if world == 2:
        expected = [expected[1], [*expected[3], 15]] if not drop else [expected[1]]
    assert list(sampler.serve(Pass(done=2, cut=cut))) == expected
    assert list(sampler.serve(Pass(done=3, cut=cut))) == expected[1:]


def test_a_custom_subclass_keeps_its_batches_whole():
    class Reversed(BatchSampler):
        def __iter__(self):
            return (batch[::-1] for batch in super().__iter__())

    sampler = custom_batches(Reversed(range(8), 2, False))
    assert list(sampler.serve(Pass(done=1, cut=Cut(1, 4, 2)))) == [[5, 4], [7, 6]]


class Drawn(Given):
    """Batches in an order of its generator."""

    def __init__(self, seed):
        super().__init__(None, batch_size=2, generator=seeded(seed))

    def __iter__(self):
        order = torch.randperm(8, generator=self.generator).tolist()
        return iter([order[i : i + 2] for i in range(0, 8, 2)])


def test_a_pass_is_replayed_from_the_state_of_the_generator_at_its_start():
    first = custom_batches(Drawn(3))
    current = Pass()
    seen = list(first.serve(current))
    assert set(current.key) == {"kind", "state"}
    assert current.key["kind"] == "custom"
    assert torch.equal(current.key["state"], seeded(3).get_state())
    assert list(first.serve(Pass())) != seen

    again = Pass(done=1, key=current.key)
    assert list(custom_batches(Drawn(99)).serve(again)) == seen[1:]
    assert again.key is current.key


def test_a_pass_draws_from_the_generator_of_rank_0():
    shared = []

    def share(state):
        shared.append(state)
        return seeded(3).get_state()

    sampler = CustomBatches(BatchSamplerShard(Drawn(4)), share, 1)
    current = Pass()
    assert list(sampler.serve(current)) == list(Drawn(3))
    assert torch.equal(current.key["state"], seeded(3).get_state())
    assert len(shared) == 1
    assert torch.equal(shared[0], seeded(4).get_state())


def test_a_pass_saved_without_a_generator_draws_on_with_what_there_is():
    sampler = custom_batches(Drawn(3))
    assert list(sampler.serve(Pass(key={"kind": "custom", "state": None}))) == list(Drawn(3))
    plain = custom_batches(Given(given(4, 2), batch_size=2))
    key = {"kind": "custom", "state": seeded(3).get_state()}
    assert list(plain.serve(Pass(key=key))) == [[0, 1], [2, 3]]


def test_the_number_of_batches_is_told_where_it_is_known():
    batches = GivenWithLength(given(10, 4), batch_size=4)
    assert custom_batches(batches).batches(Pass()) == 3
    assert custom_batches(batches).batches(Pass(done=2)) == 3
    assert [custom_batches(batches, 2, rank).batches(Pass()) for rank in range(2)] == [2, 2]
    assert [custom_batches(batches, 2, rank, even=False).batches(Pass()) for rank in range(2)] == [2, 1]
    assert custom_batches(batches, 2, split=True).batches(Pass()) == 3


def test_the_number_of_batches_is_unknown_where_the_last_batch_decides_it():
    batches = GivenWithLength(given(10, 4), batch_size=4)
    assert custom_batches(batches, 2, split=True, even=False).batches(Pass()) is None
    assert custom_batches(batches).batches(Pass(done=2, cut=Cut(1, 5))) is None
    assert custom_batches(Given([], batch_size=4)).batches(Pass()) is None
    dropping = GivenWithLength(given(10, 4), batch_size=4, drop_last=True)
    assert custom_batches(dropping, 2).batches(Pass()) is None  # it may yield the short one all the same


def test_the_tail_is_what_the_last_round_had_before_it_was_filled_up():
    batches = GivenWithLength(given(10, 4), batch_size=4)
    sampler = custom_batches(batches, 2)
    assert sampler.tail(Pass()) == -1
    list(sampler.serve(Pass()))
    assert sampler.tail(Pass()) == 2
    alone_in_the_world = custom_batches(batches)
    list(alone_in_the_world.shard)
    assert alone_in_the_world.shard.tail == 2
    assert alone_in_the_world.tail(Pass()) == -1


@pytest.mark.parametrize(
    ("world", "split", "size", "offset", "global_batch", "batches"),
    [
        (1, False, 6, 7 + 3 * 6, 6, 2 + 3),
        (2, False, 6, 7 + 3 * 12, 12, 2 + 6),
        (2, True, 6, 7 + 3 * 6, 6, 2 + 3),
        (2, False, None, 7, 0, 2 + 6),
        (2, True, None, 7, 0, 2 + 3),
    ],
)
def test_a_position_counts_samples_and_batches_from_the_cut_on(world, split, size, offset, global_batch, batches):
    attributes = {} if size is None else {"batch_size": size}
    sampler = custom_batches(Given([], **attributes), world, split=split, even=size is not None)
    state = {}
    sampler.note(state, Pass(done=4, cut=Cut(1, 7, 2)))
    assert state == {"offset": offset, "global_batch": global_batch, "batches": batches, "batch_size": size}


def test_consecutive_samples_go_on_with_any_number_of_samples_per_round():
    sampler = custom_batches(BatchSampler(range(50), 4, False), 2)
    key = {"kind": "custom", "state": None}
    assert sampler.restore(position(key=key), 8) == Cut()
    assert sampler.restore(position(key=key, batch_size=8, batches=3), 5) == Cut(3, 24)
    assert sampler.restore(position(batches=12, batch_size=4), 0) == Cut(3, 24, 12)
    assert sampler.restore(position(global_batch=0, batches=12, batch_size=4), 5) == Cut(3, 24, 12)


@pytest.mark.parametrize(
    ("world", "split", "batches", "cut"),
    [
        (2, False, 6, Cut()),
        (2, False, 3, Cut(3, 24, 3)),
        (2, True, 3, Cut()),
        (2, True, 6, Cut(3, 24, 6)),
        (1, False, 3, Cut()),
        (2, False, None, Cut()),
    ],
)
def test_whole_batches_go_on_where_they_stopped(world, split, batches, cut):
    sampler = custom_batches(Given([], batch_size=4), world, split=split)
    saved = position(batch_size=4) | ({} if batches is None else {"batches": batches})
    assert sampler.restore(saved, 8) == cut
    assert sampler.restore({name: value for name, value in saved.items() if name != "batch_size"}, 8) == cut


def test_batches_of_another_size_go_on_only_at_the_start_of_an_epoch():
    sampler = custom_batches(Given([], batch_size=4), 2)
    assert sampler.restore(position(rounds=0, offset=0, batches=0, batch_size=6), 8) == Cut()
    with pytest.raises(PositionError, match="size") as refused:
        sampler.restore(position(batches=3, batch_size=6), 8)
    assert str(refused.value) == (
        "saved in the middle of an epoch with batches of 6, now they have 4, and only Given knows which samples make a "
        "batch: continue with the former size (the number of processes may change), or resume from a checkpoint taken "
        "at the end of an epoch"
    )


def test_a_position_of_a_known_order_is_refused_by_a_sampler_of_a_scripts_own():
    sampler = custom_batches(Given([], batch_size=4))
    with pytest.raises(PositionError, match="sampler") as refused:
        sampler.restore(position(key={"kind": "seeded"}), 4)
    assert str(refused.value) == (
        "saved from a seeded order of samples, this loader has a sampler of its own: give it the sampler it had when "
        "the checkpoint was written"
    )
