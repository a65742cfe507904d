"""The native engine by itself: what it passes on, to whom, and in which order."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from orc.runtime.core.context import current_context
from orc.runtime.core.prepared import Prepared
from orc.runtime.engine.native import NativeEngine
from orc.runtime.engine.xla import XlaEngine
from orc.runtime.launch.xla import Xla
from orc.runtime.parallel import records
from orc.runtime.train.optimizer import AcceleratedOptimizer


class Scaler:
    """Records what is asked of it; ``scale`` doubles."""

    def __init__(self):
        self.calls = []

    def scale(self, loss):
        return loss * 2

    def unscale_(self, optimizer):
        self.calls.append(("unscale", optimizer))

    def step(self, *arguments):
        self.calls.append(("step", *arguments))
        return "stepped"

    def update(self):
        self.calls.append("update")

    def get_scale(self):
        return 2.0


def with_gradients(*rows):
    parameters = [torch.nn.Parameter(torch.zeros(len(row))) for row in rows]
    for parameter, row in zip(parameters, rows, strict=True):
        parameter.grad = torch.tensor(row)
    return parameters


def optimizer_of(*rows):
    return torch.optim.SGD(with_gradients(*rows), lr=1.0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("context", ["no_sync", "sync_in_backward"])
def test_the_parallelizer_that_synchronizes_a_model_is_looked_for_when_it_is_prepared(monkeypatch, context, compiled):
    model = torch.nn.Linear(1, 1)
    looked_for, asked, answer = [], [], contextlib.nullcontext()
    synchronizer = SimpleNamespace(**{context: lambda model: asked.append(model) or answer})
    monkeypatch.setattr(records, "synchronizer_of", lambda model: looked_for.append(model) or synchronizer)
    shown = torch.nn.Module()
    if compiled:
        shown.add_module("_orig_mod", model)
    else:
        shown = model
    engine = NativeEngine(current_context())
    engine.prepared.add_model(records.described(shown))
    monkeypatch.setattr(records, "synchronizer_of", lambda model: None)
    assert getattr(engine, context)(shown) is answer
    assert looked_for == asked == [model]
    with getattr(engine, context)(torch.nn.Linear(1, 1)) as nothing:  # of no prepared model
        assert nothing is None


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (float("inf"), 4.0)])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_norm_is_of_the_kind_that_was_asked_for(norm_type, norm, scaled):
    engine = NativeEngine(current_context(), prepared=Prepared(scaler=Scaler() if scaled else None))
    (parameter,) = with_gradients([3.0, -4.0])
    assert engine.clip_grad_norm_(parameter, 2 * norm, norm_type).item() == norm, "a tensor by itself is a list of one"
    if scaled:  # while gradients accumulate they stay scaled, and the norm is told without the scale
        engine._gradient.sync_gradients = False
        assert engine.clip_grad_norm_([parameter, torch.zeros(1)], 0.1, norm_type).item() == norm / 2
        assert engine.clip_grad_norm_([torch.zeros(1)], 0.1, norm_type).item() == 0.0
        engine.clip_grad_value_(parameter, 0.1)
        assert parameter.grad.tolist() == [3.0, -4.0]


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (float("inf"), 4.0), ("inf", 4.0)])
def test_the_norm_of_several_gradients_is_of_one_kind_throughout(norm_type, norm):
    engine = NativeEngine(current_context(), prepared=Prepared(scaler=Scaler()))
    engine._gradient.sync_gradients = False
    assert engine.clip_grad_norm_(with_gradients([3.0], [-4.0]), 0.1, norm_type).item() == norm / 2


def test_gradients_without_a_loss_scale_are_clipped_while_they_accumulate():
    engine = NativeEngine(current_context())
    engine._gradient.sync_gradients = False
    (parameter,) = with_gradients([3.0, -4.0])
    assert engine.clip_grad_norm_([parameter], 2.5, 2.0).item() == 5.0
    assert parameter.grad.tolist() == pytest.approx([1.5, -2.0], rel=1e-5)
    engine.clip_grad_value_([parameter], 1.0)
    assert parameter.grad.tolist() == [1.0, -1.0]
    engine.clip_grad_value_(parameter, 0.5)
    assert parameter.grad.tolist() == [0.5, -0.5], "a tensor by itself is a list of one"


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_over_xla_the_gradients_of_the_clipped_parameters_are_averaged_first(clip):
    averaged = []

    class Recorder(Xla):
        def __init__(self):
            self.reduce_gradients = averaged.append

    ctx = SimpleNamespace(
        gradient=SimpleNamespace(sync_gradients=True, num_steps=1),
        compute=Recorder(),
    )
    engine = XlaEngine(ctx)
    mine, others = optimizer_of([3.0], [4.0]), optimizer_of([1.0])
    engine.prepared.optimizers += [SimpleNamespace(optimizer=one) for one in (mine, others)]

    def clip_all():
        parameters = (parameter for parameter in mine.param_groups[0]["params"])
        if clip == "norm":
            engine.clip_grad_norm_(parameters, 1.0, 2.0)
        else:
            engine.clip_grad_value_(parameters, 1.0)

    clip_all()
    assert averaged == [[mine]]
    ctx.gradient.sync_gradients = False
    clip_all()
    assert averaged == [[mine]], "not while they accumulate"


def test_the_loss_scale_changes_once_after_all_optimizers_have_stepped():
    scaler = Scaler()
    engine = NativeEngine(current_context(), prepared=Prepared(scaler=scaler))
    first, second = optimizer_of([1.0]), optimizer_of([1.0])

    def closure():
        return 1.0

    assert engine.step(AcceleratedOptimizer(first, engine=engine)) == "stepped"
    assert engine.step(AcceleratedOptimizer(second, engine=engine), closure) == "stepped"
    assert scaler.calls == [("step", first), ("step", second, closure)]
    engine.step(AcceleratedOptimizer(first, engine=engine))
    assert scaler.calls[2:] == ["update", ("step", first)], "the same optimizer again: the next iteration has begun"
    assert engine.scaler is scaler
    assert scaler.calls[4:] == ["update"]
    assert engine.scaler is scaler
    assert len(scaler.calls) == 5, "nothing has stepped since"


def test_weights_have_the_names_that_the_script_wrote_unless_asked_otherwise():
    model = torch.nn.Linear(2, 1)
    compiled = torch.compile(model)
    engine = NativeEngine(current_context())
    assert list(engine.model_state(compiled)) == ["weight", "bias"]
    assert list(engine.model_state(compiled, unwrap=False)) == ["_orig_mod.weight", "_orig_mod.bias"]
    assert list(engine.model_state(model)) == ["weight", "bias"]
