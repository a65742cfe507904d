"""NaN, infinities and jumps: found late but with the right step, or kept out of the weights."""

import logging
import math

import pytest
import torch
from torch import nn

from orc.runtime import Accelerator
from orc.runtime.core.context import reset_default
from orc.runtime.observe.spikes import Readings, SpikeError, Usual


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "ORC_ATTEMPT_DIR", "ORC_JOB_DIR"):
        monkeypatch.delenv(name, raising=False)
    reset_default()


def trained(monkeypatch, action, inputs, *, clip=True, every=5, make=None, precision=None, seen=None):
    """Train a linear model (loss = mean of inputs times weights) on *inputs*; returns (model, optimizer, steps)."""
    monkeypatch.setenv("ORC_SPIKE_ACTION", action)
    monkeypatch.setenv("ORC_SPIKE_EVERY", str(every))
    reset_default()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    make = make or (lambda parameters: torch.optim.SGD(parameters, 1e-3))
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    for value in inputs:
        accelerator.backward(model(torch.tensor([[value]])).mean())
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        if seen is not None:
            seen.append(model.weight.item())
    accelerator.end_training()
    return model, optimizer


# ---- what is usual


def test_a_jump_is_told_by_the_median_and_does_not_become_usual():
    usual = Usual("loss", factor=10, warm_up=5)
    assert [usual.judge(step, 1.0) for step in range(5)] == [None] * 5
    assert usual.judge(5, 9.9) is None
    first, second = usual.judge(6, 10.1), usual.judge(7, 1000.0)
    assert (first.step, first.usual, second.usual) == (6, 1.0, 1.0)
    assert str(second) == "the loss jumps to 1000 at step 7, 1000 times the usual 1"


def test_the_first_values_may_be_anything_finite():
    usual = Usual("loss", factor=2, warm_up=5)
    assert [usual.judge(step, 10.0**-step) for step in range(5)] == [None] * 5
    assert usual.judge(5, math.inf).usual is None
    assert str(usual.judge(6, math.nan)) == "the loss is nan at step 6"


def test_a_quantity_that_is_missing_is_not_taken_for_nan():
    readings = Readings(torch.device("cpu"), every=3)
    readings.write(1, (torch.tensor(2.0), None))
    readings.write(2, (None, torch.tensor(3.0)))
    assert not readings.full
    readings.send()
    assert readings.take() == [(1, [2.0, None]), (2, [None, 3.0])]
    assert readings.take() == []


# ---- warn and raise


def test_a_nan_is_raised_soon_with_its_step(monkeypatch):
    seen = []
    inputs = [1.0] * 12 + [math.nan] + [1.0] * 40
    with pytest.raises(SpikeError, match=r"rank 0: the loss is nan at step 13 .*load an earlier checkpoint"):
        trained(monkeypatch, "raise", inputs, seen=seen)
    assert 13 <= len(seen) < 13 + 10  # two looks at most


def test_a_jump_of_the_loss_is_a_warning(monkeypatch, caplog):
    inputs = [1.0] * 30 + [500.0] + [1.0] * 9
    with caplog.at_level(logging.WARNING):
        trained(monkeypatch, "warn", inputs, clip=False)
    [warning] = [record.message for record in caplog.records if "jumps" in record.message]
    assert warning.startswith("rank 0: the loss jumps to 485")
    assert "at step 31, 4" in warning


def test_the_last_steps_are_looked_at_when_training_ends(monkeypatch):
    with pytest.raises(SpikeError, match="nan at step 8"):
        trained(monkeypatch, "raise", [1.0] * 7 + [math.nan])


def test_the_gradient_norm_is_looked_at_where_it_is_clipped(monkeypatch):
    # The loss (weight times input) is moderate where the gradient (the input) is not.
    inputs = [1.0] * 25 + [-1000.0] + [1.0] * 20
    with pytest.raises(SpikeError, match="gradient norm jumps to 1000 at step 26"):
        trained(monkeypatch, "raise", inputs)


def test_no_look_waits_for_the_device(monkeypatch):
    """Between two looks nothing leaves the device: no ``item``, no ``tolist``, no copy."""
    calls = []
    for name in ("item", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _n=name, _o=original: (calls.append(_n), _o(self, *a))[1]
        )
    monkeypatch.setenv("ORC_SPIKE_ACTION", "warn")
    monkeypatch.setenv("ORC_SPIKE_EVERY", "10")
    reset_default()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    counts = []
    for _ in range(30):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        counts.append(len(calls))
    assert counts[8] == 0
    assert counts[-1] == 3  # one per look


# ---- skip


FUSED = pytest.param(lambda p: torch.optim.AdamW(p, 0.1, fused=True), id="on the device")
PLAIN = pytest.param(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), id="on the host")


@pytest.mark.parametrize("make", [FUSED, PLAIN])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
@pytest.mark.parametrize("clip", [True, False])
def test_a_bad_update_leaves_no_trace(monkeypatch, make, bad, clip):
    with_spike, without = [], []
    trained(monkeypatch, "skip", [1.0] * 25 + [bad] + [1.0] * 5, make=make, clip=clip, seen=with_spike)
    trained(monkeypatch, "skip", [1.0] * 30, make=make, clip=clip, seen=without)
    assert with_spike[25] == with_spike[24]
    assert with_spike[26:] == without[25:]


def test_an_update_skipped_by_the_host_is_known_to_the_scheduler(monkeypatch):
    _, optimizer = trained(monkeypatch, "skip", [1.0] * 3 + [math.nan])
    assert optimizer.step_was_skipped
    assert optimizer.steps == 3


def test_a_guard_changes_nothing_while_all_is_well(monkeypatch):
    results = []
    for action in ("off", "warn", "skip"):
        seen = []
        trained(monkeypatch, action, [1.0, 0.5, 2.0] * 12, seen=seen)
        results.append(seen)
    assert results[0] == results[1] == results[2]


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_skip_the_same_update(run_ranks, sharded):
    def train():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(4):
            value = math.nan if step == 2 and accelerator.process_index == 1 else 1.0
            accelerator.backward(model(torch.tensor([[value]])).mean())
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight.full_tensor() if sharded else model.module.weight
        return optimizer.steps, weight.item()

    first, second = run_ranks(2, train, env={"ORC_SPIKE_ACTION": "skip"})
    assert first == second
    assert first[0] == 3
    assert math.isfinite(first[1])
