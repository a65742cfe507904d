"""How an order of samples is cut into batches over ranks, against the cut made by walking through it."""

import itertools

import pytest

from orc.runtime.data.plan import IndexPlan


def walked(length, rows, world, drop, even, start=0):
    """The batches of every rank in every round, from lists alone; an empty one where a rank gets nothing."""
    left = list(range(length))[start:]
    rounds = [left[i : i + rows * world] for i in range(0, len(left), rows * world)]
    if rounds and len(rounds[-1]) < rows * world:
        if drop:
            rounds.pop()
        elif even and world > 1:
            rounds[-1] += itertools.islice(itertools.cycle(range(length)), rows * world - len(rounds[-1]))
    return [[taken[rank * rows : (rank + 1) * rows] for rank in range(world)] for taken in rounds]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_a_plan_says_what_a_walk_through_the_order_finds(world, drop, even):
    for length, rows, start in itertools.product((0, 1, 2, 3, 7, 8, 12, 13), (1, 2, 3), (0, 1, 4)):
        if start > length:
            continue
        plan = IndexPlan(length, rows, world, False, drop, even, start)
        rounds = walked(length, rows, world, drop, even, start)
        whole, left_over = divmod(length - start, rows * world)

        assert plan.full_rounds == whole
        assert plan.rounds == len(rounds)
        assert plan.remainder == (0 if drop else left_over)
        assert plan.fills_up is (even and not drop and world > 1 and left_over > 0)
        for rank in range(world):
            assert plan.batches(rank) == len([taken for taken in rounds if taken[rank]])
            last = rounds[-1][rank] if len(rounds) > whole else []
            assert [i for begin, end in plan.last_ranges(rank) for i in range(begin, end)] == last
            assert all(begin < end for begin, end in plan.last_ranges(rank))
        for count in range(len(rounds) + 2):
            assert plan.offset(count) == (start + count * rows * world if count < len(rounds) else length)


def test_a_plan_of_one_process_takes_the_order_as_it_is():
    plan = IndexPlan(5, 2)
    assert (plan.world_size, plan.split_batches, plan.drop_last, plan.even_batches, plan.start) == (
        1,
        False,
        False,
        True,
        0,
    )
    assert (plan.rows, plan.global_batch, plan.rounds) == (2, 2, 3)
    assert plan.last_ranges(0) == [(4, 5)]


@pytest.mark.parametrize(("split", "rows", "together"), [(False, 6, 18), (True, 2, 6)])
def test_split_batches_takes_the_size_as_that_of_all_ranks_together(split, rows, together):
    plan = IndexPlan(20, 6, 3, split_batches=split)
    assert (plan.rows, plan.global_batch) == (rows, together)


def test_the_rest_of_a_plan_is_cut_from_where_it_stopped():
    plan = IndexPlan(10, 2, 2, drop_last=True, even_batches=False)
    assert plan.rest(3) == IndexPlan(10, 2, 2, drop_last=True, even_batches=False, start=3)
    assert plan.rest(3).rest(4).start == 4
    assert plan.rest(10).rounds == 0
    assert plan.rest(99) == plan.rest(10)
    assert plan.start == 0


@pytest.mark.parametrize(("length", "size", "world"), [(3, 0, 1), (3, 1, 0), (-1, 1, 1), (3, -1, 1), (3, 1, -1)])
def test_a_plan_that_cannot_be_is_refused_and_shown(length, size, world):
    with pytest.raises(ValueError, match="no such plan") as refused:
        IndexPlan(length, size, world)
    assert str(refused.value) == (
        f"no such plan: IndexPlan(length={length}, batch_size={size}, world_size={world}, split_batches=False, "
        "drop_last=False, even_batches=True, start=0)"
    )


def test_a_batch_that_has_no_equal_parts_is_refused():
    with pytest.raises(ValueError, match="split") as refused:
        IndexPlan(20, 8, 3, split_batches=True)
    assert str(refused.value) == (
        "split_batches cuts each batch into 3 equal parts: batch_size 8 is not a multiple of 3"
    )
    assert IndexPlan(20, 8, 3).rows == 8
