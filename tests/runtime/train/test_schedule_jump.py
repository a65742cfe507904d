"""Several steps of a schedule at once: the same rates as single steps, at the cost of one call."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from orc.runtime.train.scheduler import jump

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def optimizer(lr=0.1, groups=1):
    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr * (1 + g)} for g in range(groups)]
    made = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    made.step()
    return made


MAKERS = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.95**step),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9 if step % 3 else 1.1),
    "step": lambda o: schedules.StepLR(o, 5, 0.5),
    "multi_step": lambda o: schedules.MultiStepLR(o, [3, 8, 9, 40], 0.3),
    "constant": lambda o: schedules.ConstantLR(o, 0.25, 11),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=21),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.97),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 31, eta_min=0.001),
    "cosine_to_zero": lambda o: schedules.CosineAnnealingLR(o, 13),
    "polynomial": lambda o: schedules.PolynomialLR(o, 45, 2.0),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7, 2),
    "one_cycle": lambda o: schedules.OneCycleLR(o, 1.0, total_steps=50),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 1.0, step_size_up=6, mode="exp_range", gamma=0.99),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=6), schedules.StepLR(o, 7)], [6]
    ),
    "chained": lambda o: schedules.ChainedScheduler([schedules.ExponentialLR(o, 0.9), schedules.ConstantLR(o, 0.5)]),
}


def state(scheduler, opt):
    own = {k: v for k, v in scheduler.state_dict().items() if k in ("last_epoch", "_step_count", "_last_lr")}
    return own, [(group["lr"], group["momentum"]) for group in opt.param_groups]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_jump_equals_single_steps_bit_for_bit(name, count):
    first, second = optimizer(groups=2), optimizer(groups=2)
    single, jumping = MAKERS[name](first), MAKERS[name](second)
    for _ in range(48 // count):
        for _ in range(count):
            single.step()
        jump(jumping, count)
        assert state(jumping, second) == state(single, first)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKERS)
def test_a_long_jump_equals_single_steps_to_rounding(name):
    first, second = optimizer(groups=2), optimizer(groups=2)
    single, jumping = MAKERS[name](first), MAKERS[name](second)
    for _ in range(3):
        for _ in range(16):
            single.step()
        jump(jumping, 16)
        rates = ([g["lr"] for g in o.param_groups] for o in (first, second))
        for one, other in zip(*rates, strict=True):
            assert other == pytest.approx(one, rel=1e-9, abs=1e-12)
        assert single.last_epoch == jumping.last_epoch if hasattr(single, "last_epoch") else True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [3, 16])
def test_schedules_that_share_an_optimizer_multiply(count):
    first, second = optimizer(), optimizer()
    make = (MAKERS["exponential"], MAKERS["step"])
    single, jumping = [m(first) for m in make], [m(second) for m in make]
    for _ in range(2):
        for _ in range(count):
            for one in single:
                one.step()
        for one in jumping:
            jump(one, count)
    assert second.param_groups[0]["lr"] == pytest.approx(first.param_groups[0]["lr"], rel=1e-9)


@pytest.mark.parametrize("name", ["step", "cosine", "exponential", "linear", "polynomial", "lambda"])
def test_a_jump_calls_the_scheduler_once_whatever_its_length(name, monkeypatch):
    opt = optimizer()
    scheduler = MAKERS[name](opt)
    scheduler.step()
    calls = []
    kind = type(scheduler)
    original = kind.get_lr
    monkeypatch.setattr(schedules.LRScheduler, "step", counted(schedules.LRScheduler.step, calls))
    if name != "lambda":
        monkeypatch.setattr(kind, "get_lr", counted(original, calls))
    jump(scheduler, 64)
    assert len(calls) == (1 if name == "lambda" else 2), "one step, which computes one rate"
    assert scheduler.last_epoch == 65


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("sequential", "chained", "restarts")])
def test_a_short_jump_calls_step_once_too(name, count, monkeypatch):
    scheduler, calls = MAKERS[name](optimizer()), []
    scheduler.step()
    monkeypatch.setattr(schedules.LRScheduler, "step", counted(schedules.LRScheduler.step, calls))
    jump(scheduler, count)
    assert len(calls) == 1
    assert scheduler.last_epoch == count + 1


def counted(function, calls):
    def wrapper(*args):
        calls.append(function)
        return function(*args)

    return wrapper


def test_a_lambda_is_asked_for_the_last_step_only():
    asked = []
    scheduler = schedules.LambdaLR(optimizer(), lambda step: asked.append(step) or 1.0)
    scheduler.step()
    jump(scheduler, 32)
    assert asked == [0, 1, 33]


def test_rates_that_the_script_changed_are_kept():
    first, second = optimizer(), optimizer()
    single, jumping = MAKERS["step"](first), MAKERS["step"](second)
    for _ in range(2):
        for group in (*first.param_groups, *second.param_groups):
            group["lr"] *= 3
        for _ in range(10):
            single.step()
        jump(jumping, 10)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == pytest.approx(0.1 * 9 * 0.5**4)


def test_rates_that_are_tensors_are_changed_in_place():
    opt = optimizer()
    rate = opt.param_groups[0]["lr"] = torch.tensor(0.1)
    scheduler = schedules.ExponentialLR(opt, 0.5)
    for count in (3, 10):
        jump(scheduler, count)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1 * 0.5**13)


def test_the_end_of_a_schedule_is_not_passed():
    scheduler = MAKERS["one_cycle"](optimizer())
    for _ in range(4):
        jump(scheduler, 16)
    assert scheduler.last_epoch == 50


def test_a_metric_goes_to_every_step():
    opt = optimizer()
    plateau = schedules.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    jump(plateau, 2, 1.0)
    assert (plateau.last_epoch, opt.param_groups[0]["lr"]) == (2, pytest.approx(0.05))


def test_a_schedule_before_its_optimizer_is_still_told_of():
    parameter = torch.nn.Parameter(torch.ones(1))
    scheduler = schedules.StepLR(torch.optim.SGD([parameter], lr=0.1), 3)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        jump(scheduler, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jump(scheduler, 4)
