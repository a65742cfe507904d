"""The divisor of a window by itself: the unit until its last batch, the sum over the processes, what is refused."""

from types import SimpleNamespace

import pytest
import torch

from orc.runtime.core.prepared import Prepared
from orc.runtime.engine.native import NativeEngine
from orc.runtime.train import normalize
from orc.runtime.train.normalize import LossNormalizer


def a_context(world_size=1, num_steps=3, sync_each_batch=False, device_in_group=True):
    asked = []
    ctx = SimpleNamespace(
        gradient=SimpleNamespace(sync_gradients=False, num_steps=num_steps, sync_each_batch=sync_each_batch),
        world_size=world_size,
        compute=SimpleNamespace(device_in_group=device_in_group),
        control_device=torch.device("cpu"),
        device=torch.device("cpu"),
        require_group=lambda what: asked.append(what) or "the group",
        asked=asked,
    )
    ctx.topology = SimpleNamespace(loss_size=world_size, loss_group="the group")
    return ctx


def weights(*gradients):
    found = []
    for gradient in gradients:
        found.append(torch.zeros(()) if gradient is None else torch.zeros(len(gradient)))
        found[-1].grad = None if gradient is None else torch.tensor(gradient)
    return found


@pytest.fixture
def reduced(monkeypatch):
    """What was given to all-reduce; each other process adds the next of *others*."""
    found = SimpleNamespace(calls=[], others=[])

    def all_reduce(number, group):
        found.calls.append((number.clone(), group))
        number += found.others.pop(0)

    monkeypatch.setattr(normalize.dist, "all_reduce", all_reduce)
    return found


def test_a_window_of_one_batch_is_divided_by_its_count():
    ctx = a_context()
    ctx.gradient.sync_gradients = True
    (weight,) = weights([8.0])
    normalizer = LossNormalizer(ctx, lambda: [weight])
    assert normalizer.scale(torch.tensor(6.0), 4).item() == 1.5
    assert normalizer.scale(torch.tensor(6.0), 3).item() == 2.0, "the next window counts from nothing"
    assert normalizer.open is False
    assert weight.grad.tolist() == [8.0], "what is there is none of this window"
    assert ctx.asked == []


@pytest.mark.parametrize("tensor", [False, True])
def test_gradients_are_kept_in_a_power_of_two_until_the_count_of_the_window_is_known(tensor):
    ctx = a_context()
    kept, without = weights([16.0, 32.0], None)
    normalizer = LossNormalizer(ctx, lambda: [kept, without])

    def scale(loss, count):
        return normalizer.scale(torch.tensor(loss), torch.tensor(count) if tensor else count).item()

    assert normalizer.open is False
    assert scale(48.0, 5) == 48.0 / 16, "5 * 3 = 15, and 16 is the power of two above"
    assert normalizer.open is True
    assert scale(48.0, 100) == 48.0 / 16, "one unit for the whole window"
    assert kept.grad.tolist() == [16.0, 32.0]
    ctx.gradient.sync_gradients = True
    assert scale(48.0, 23) == 48.0 / 128
    assert kept.grad.tolist() == [2.0, 4.0], "from the unit 16 to the count 5 + 100 + 23"
    assert without.grad is None
    assert normalizer.open is False
    ctx.gradient.sync_gradients = False
    assert scale(64.0, 1) == 64.0 / 4, "the next window has a unit of its own"
    ctx.gradient.sync_gradients = True
    assert scale(64.0, 31) == 64.0 / 32
    assert kept.grad.tolist() == [0.25, 0.5]


def test_a_window_that_is_forgotten_counts_no_more():
    ctx = a_context()
    (weight,) = weights([4.0])
    normalizer = LossNormalizer(ctx, lambda: [weight])
    normalizer.scale(torch.tensor(1.0), 50)
    normalizer.reset()
    assert normalizer.open is False
    ctx.gradient.sync_gradients = True
    assert normalizer.scale(torch.tensor(6.0), 2).item() == 3.0
    assert weight.grad.tolist() == [4.0]


def test_a_count_that_has_a_gradient_gets_none():
    ctx = a_context()
    normalizer = LossNormalizer(ctx, list)
    counts = [torch.tensor(2.0, requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    loss = torch.tensor(10.0, requires_grad=True)
    normalizer.scale(loss, counts[0])
    ctx.gradient.sync_gradients = True
    scaled = normalizer.scale(loss, counts[1])
    scaled.backward()
    assert (scaled.item(), loss.grad.item()) == (2.0, pytest.approx(0.2))
    assert [count.grad for count in counts] == [None, None]


@pytest.mark.parametrize("count", [torch.tensor(2**24 + 1), torch.tensor([3], dtype=torch.int32)])
def test_counts_that_are_tensors_are_summed_without_rounding_and_stay_as_they_are(reduced, count):
    before = count.clone()
    reduced.others = [1.0]
    total = LossNormalizer(a_context(world_size=2), list)._total(count)
    ((given, _),) = reduced.calls
    assert (given.tolist(), given.dtype) == ([float(before.item())], torch.float64)
    assert (total.item(), total.dtype, total.shape) == (before.item() + 1, torch.float32, ())
    assert torch.equal(count, before)
    shared = torch.tensor([7.0], dtype=torch.float64)
    reduced.others = [1.0]
    LossNormalizer(a_context(world_size=2), list)._total(shared)
    assert shared.item() == 7.0, "a count that needs no conversion is copied all the same"


def test_a_number_is_summed_in_double_precision_and_is_a_number_again(reduced):
    reduced.others = [0.5]
    total = LossNormalizer(a_context(world_size=2), list)._total(2.0**24 + 1)
    assert (type(total), total) == (float, 2**24 + 1.5)
    reduced.others = [0.0]
    assert LossNormalizer(a_context(world_size=2), list)._total(0) == 1


@pytest.mark.parametrize(("device_in_group", "summed_on"), [(True, "meta"), (False, "cpu")])
def test_the_sum_of_numbers_stays_on_a_gpu_for_which_no_host_waits(monkeypatch, device_in_group, summed_on):
    def all_reduce(number, group):
        raise Reduced(number.device.type)

    def full(shape, value, **options):
        assert options == {"dtype": torch.float64, "device": torch.device("cuda", 0)}
        return torch.empty(shape, dtype=torch.float64, device="meta")

    monkeypatch.setattr(normalize.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(normalize.torch, "full", full)
    ctx = a_context(world_size=2, device_in_group=device_in_group)
    ctx.device = torch.device("cuda", 0)
    with pytest.raises(Reduced, match=summed_on):
        LossNormalizer(ctx, list)._total(5)


class Reduced(Exception):
    """Ends a test where the counts would be summed."""


@pytest.mark.parametrize(
    ("came_on", "device_in_group", "control", "summed_on"),
    [
        ("cpu", True, "meta", "meta"),  # the group is for an accelerator, and so is the sum
        ("meta", True, "cpu", "meta"),  # what is on the accelerator stays there
        ("cpu", False, "meta", "meta"),
    ],
)
def test_a_count_is_summed_where_the_group_is(monkeypatch, came_on, device_in_group, control, summed_on):
    def all_reduce(number, group):
        raise Reduced(number.device.type)

    monkeypatch.setattr(normalize.dist, "all_reduce", all_reduce)
    ctx = a_context(world_size=2, device_in_group=device_in_group)
    ctx.control_device = torch.device(control)
    with pytest.raises(Reduced, match=f"^{summed_on}$"):
        LossNormalizer(ctx, list)._total(torch.ones(1, device=came_on))


def test_over_torch_xla_a_count_goes_to_the_group_of_the_cpu_and_back(monkeypatch):
    seen, moved = [], []
    to = torch.Tensor.to

    def watched(tensor, *arguments, **options):
        if isinstance(arguments[0], torch.device):
            moved.append((tensor.device.type, arguments[0].type))
            if tensor.device.type == "meta":  # which has no values
                return torch.ones(tensor.shape, device=arguments[0])
        return to(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda tensor, other: None)
    monkeypatch.setattr(torch, "where", lambda condition, one, other: other)
    monkeypatch.setattr(normalize.dist, "all_reduce", lambda number, group: seen.append(number.device.type))
    count = torch.ones(1, device="meta")  # stands for a device whose tensors the group does not take
    total = LossNormalizer(a_context(world_size=2, device_in_group=False), list)._total(count)
    assert (seen, total.device.type) == (["cpu"], "meta")
    assert moved == [("meta", "cpu"), ("cpu", "meta")]


def test_nobody_would_answer_where_processes_have_run_out_of_batches():
    normalizer = LossNormalizer(a_context(), list)
    assert normalizer.uneven is False
    normalizer.uneven = True
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        normalizer.scale(torch.tensor(1.0), 1)
    assert str(caught.value) == (
        "normalize_by cannot be used inside join_uneven_inputs: processes that have run out of batches do not answer; "
        "use loaders with even_batches, or a mean loss"
    )
    assert normalizer.open is False


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (torch.ones(2), "one number, not a tensor of shape [2]"),
        (torch.ones(0), "one number, not a tensor of shape [0]"),
        (-1, "a number of at least 0, not -1"),
        (-0.5, "a number of at least 0, not -0.5"),
        (float("nan"), "a number of at least 0, not nan"),
        (True, "a number of at least 0, not True"),
        ("7", "a number of at least 0, not '7'"),
    ],
)
def test_what_is_no_count_is_named(count, why):
    normalizer = LossNormalizer(a_context(), list)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        normalizer.scale(torch.tensor(1.0), count)
    assert str(caught.value) == f"normalize_by must be {why}"


def test_gradients_of_several_types_are_brought_to_the_divisor_each_in_its_own():
    single, half, other = weights([8.0], [16.0], [24.0])
    half.grad = None
    half.data = half.data.half()
    half.grad = torch.tensor([16.0]).half()
    for factor in (0.5, torch.tensor([0.5], dtype=torch.float64)):
        normalize._multiply([single.grad, half.grad, other.grad], factor)
    assert [(one.grad.item(), one.grad.dtype) for one in (single, half, other)] == [
        (2.0, torch.float32),
        (4.0, torch.float16),
        (6.0, torch.float32),
    ]
    normalize._multiply([], 0.5)
    normalize._multiply([], torch.tensor(0.5))


def test_gradients_that_are_part_of_a_graph_are_scaled_without_one():
    for factor in (2, torch.tensor(2.0)):
        gradient = torch.ones(1, requires_grad=True)
        normalize._multiply([gradient], factor)
        assert (gradient.item(), gradient.grad_fn) == (2.0, None)


# -- backward


def a_loss():
    weight = torch.ones(1, requires_grad=True)
    return weight, (3 * weight).sum()


def test_a_sum_is_divided_by_its_count_alone_and_a_window_does_not_mix():
    ctx = a_context()
    weight, loss = a_loss()
    engine = NativeEngine(ctx, prepared=Prepared(optimizers=[SimpleNamespace(param_groups=[{"params": [weight]}])]))
    engine.backward(loss, normalize_by=5, retain_graph=True)
    assert weight.grad.item() == 3.0 / 16
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
        engine.backward(loss)
    assert str(caught.value) == (
        "backward without normalize_by in a window that began with it: give it for every batch between two optimizer "
        "steps, or for none"
    )
    ctx.gradient.sync_gradients = True
    engine.backward(loss, normalize_by=3)
    assert weight.grad.item() == 2 * 3.0 / 8
    weight, loss = a_loss()
    engine.backward(loss)
    assert weight.grad.item() == 1.0, "the next window may be one of means"
