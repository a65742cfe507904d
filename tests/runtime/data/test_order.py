"""In which order samples come, against torch's own samplers."""

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

from orc.runtime.data import order as orders
from orc.runtime.data.order import Order, SeededOrder, ShuffledOrder, check_key, permutation
from orc.runtime.data.plan import PositionError
from orc.runtime.data.samplers import SeedableRandomSampler


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def alone(tensor):
    """What ranks agree on where there is one."""
    return tensor


SAMPLERS = [
    *[(length, False, None) for length in (1, 2, 9)],
    *[(4, False, count) for count in (1, 3, 4, 5, 8, 11)],
    *[(4, True, count) for count in (1, 4, 31, 32, 33, 64, 70)],
    (7, True, None),
]


@pytest.mark.parametrize(("length", "replacement", "count"), SAMPLERS)
def test_an_order_and_the_generator_after_it_are_those_of_the_sampler(length, replacement, count):
    twin, generator = seeded(3), seeded(3)
    expected = list(RandomSampler(range(length), replacement, count, twin))
    order = ShuffledOrder(RandomSampler(range(length), replacement, count, generator))
    drawn = order.indices(order.draw(0, alone))
    order.finish()
    assert drawn.tolist() == expected
    assert drawn.dtype == "int64"
    assert torch.equal(generator.get_state(), twin.get_state())


def test_an_order_that_is_only_looked_at_is_drawn_once():
    generator, once = seeded(3), seeded(3)
    expected = torch.randperm(9, generator=once)
    assert permutation(RandomSampler(range(9)), generator).tolist() == expected.tolist()
    assert torch.equal(generator.get_state(), once.get_state())


def test_a_sequential_order_needs_nothing():
    order = Order(6)
    key = order.draw(3, alone)
    assert (len(order), key, order.indices(key)) == (6, {"kind": "sequential"}, None)


@pytest.mark.parametrize("make", [ShuffledOrder, SeededOrder])
def test_a_random_order_is_as_long_as_its_sampler(make):
    sampler = SeedableRandomSampler(range(5), num_samples=8, replacement=True, data_seed=1)
    assert len(make(sampler)) == 8


def test_a_shuffle_without_a_generator_draws_its_seed_as_the_sampler_would():
    torch.manual_seed(7)
    expected = list(RandomSampler(range(9)))
    after = torch.get_rng_state()

    torch.manual_seed(7)
    order = ShuffledOrder(RandomSampler(range(9)))
    key = order.draw(0, alone)
    assert torch.equal(torch.get_rng_state(), after)
    assert set(key) == {"kind", "seed"}
    assert (key["kind"], type(key["seed"])) == ("shuffled", int)
    assert order.indices(key).tolist() == order.indices(dict(key)).tolist() == expected


def test_a_shuffle_without_a_generator_takes_the_seed_of_rank_0():
    shared = []

    def share(tensor):
        shared.append(tensor)
        return torch.tensor(42)

    order = ShuffledOrder(RandomSampler(range(9)))
    key = order.draw(5, share)
    assert key == {"kind": "shuffled", "seed": 42}
    assert [(tensor.shape, tensor.dtype) for tensor in shared] == [((), torch.int64)]
    assert order.indices(key).tolist() == list(RandomSampler(range(9), generator=seeded(42)))


def test_a_shuffle_with_a_generator_yields_pass_after_pass_what_the_sampler_would():
    twin = RandomSampler(range(9), generator=seeded(5))
    sampler = RandomSampler(range(9), generator=seeded(5))
    order = ShuffledOrder(sampler)
    for epoch in range(3):
        before = twin.generator.get_state()
        expected = list(twin)
        key = order.draw(epoch, alone)
        assert set(key) == {"kind", "state"}
        assert key["kind"] == "shuffled"
        assert torch.equal(key["state"], before)
        assert order.indices(key).tolist() == expected
        assert order.indices(key).tolist() == expected  # drawn anew, as in another process
        order.finish()
        assert torch.equal(sampler.generator.get_state(), twin.generator.get_state())


def test_a_shuffle_with_a_generator_takes_the_state_of_rank_0():
    shared = []

    def share(tensor):
        shared.append(tensor)
        return seeded(1).get_state()

    sampler = RandomSampler(range(9), generator=seeded(2))
    order = ShuffledOrder(sampler)
    key = order.draw(0, share)
    twin = RandomSampler(range(9), generator=seeded(1))
    assert order.indices(key).tolist() == list(twin)
    order.finish()
    assert torch.equal(sampler.generator.get_state(), twin.generator.get_state())
    assert len(shared) == 1
    assert torch.equal(shared[0], seeded(2).get_state())


def test_the_order_of_an_earlier_pass_is_found_again_while_the_next_is_drawn():
    order = ShuffledOrder(RandomSampler(range(9), generator=seeded(5)))
    earlier = order.draw(0, alone)
    first = order.indices(earlier).tolist()
    order.draw(1, alone)
    assert order.indices(earlier).tolist() == first


def test_an_order_that_was_drawn_is_not_drawn_again_for_its_pass(monkeypatch):
    order = ShuffledOrder(RandomSampler(range(9), generator=seeded(5)))
    key = order.draw(0, alone)
    with monkeypatch.context() as patched:
        patched.setattr(orders, "permutation", None)
        kept = order.indices(key)
    assert kept.tolist() == order.indices(key).tolist()


def test_a_seeded_order_is_that_of_the_sampler_in_every_epoch():
    sampler = SeedableRandomSampler(range(9), data_seed=10)
    order = SeededOrder(sampler)
    for epoch in (0, 1, 4):
        key = order.draw(epoch, alone)
        assert key == {"kind": "seeded", "seed": 10, "epoch": epoch}
        assert type(key["seed"]) is int
        assert order.indices(key).tolist() == torch.randperm(9, generator=seeded(10 + epoch)).tolist()


def test_a_seeded_order_takes_the_seed_of_rank_0():
    shared = []

    def share(tensor):
        shared.append(tensor)
        return torch.tensor(77)

    for seed in (10, np.int32(10)):
        order = SeededOrder(SeedableRandomSampler(range(9), data_seed=seed))
        assert order.draw(2, share) == {"kind": "seeded", "seed": 77, "epoch": 2}
    assert [(tensor.item(), tensor.dtype) for tensor in shared] == [(10, torch.int64)] * 2


@pytest.mark.parametrize(
    ("order", "key", "saved"),
    [
        (Order(3), {"kind": "shuffled", "seed": 1}, "shuffled"),
        (ShuffledOrder(RandomSampler(range(3))), {"kind": "seeded", "seed": 1, "epoch": 0}, "seeded"),
        (SeededOrder(SeedableRandomSampler(range(3))), {}, "None"),
    ],
)
def test_a_key_of_another_kind_of_order_is_refused(order, key, saved):
    check_key(order, {"kind": order.kind})
    with pytest.raises(PositionError, match="saved from") as refused:
        check_key(order, key)
    assert str(refused.value) == (
        f"saved from a {saved} order of samples, this loader's is {order.kind}: give it the same shuffle or sampler "
        "as when the checkpoint was written"
    )
