"""Gradient accumulation: the documented toy problem, when gradients synchronise, and what that costs."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, AcceleratorState, GradientAccumulationPlugin, GradientState


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, inputs):
        return inputs @ self.weight


def toy(accelerator, batch_size):
    """The documented example; the batches seen and the final weight."""
    x = torch.arange(1.0, 9.0)
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=batch_size)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            batches.append(inputs.tolist())
            outputs = model(inputs.view(-1, 1))
            loss = torch.nn.functional.mse_loss(outputs, labels.view(-1, 1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return batches, round(accelerator.unwrap_model(model).weight.item(), 5)


def test_the_documented_example_in_one_process():
    assert toy(Accelerator(gradient_accumulation_steps=4), 2) == ([[1, 2], [3, 4], [5, 6], [7, 8]], 2.04)


def test_accumulating_equals_one_large_batch():
    assert toy(Accelerator(gradient_accumulation_steps=1), 8) == ([[1, 2, 3, 4, 5, 6, 7, 8]], 2.04)


@pytest.mark.distributed
def test_the_documented_example_over_two_processes(run_ranks):
    def body():
        return toy(Accelerator(gradient_accumulation_steps=2), 2)

    assert run_ranks(2, body) == [([[1, 2], [5, 6]], 2.04), ([[3, 4], [7, 8]], 2.04)]


def flags(accelerator, batches):
    loader = accelerator.prepare(DataLoader(torch.arange(batches), batch_size=1))
    model = accelerator.prepare(Linear())
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
            assert GradientState().sync_gradients == accelerator.sync_gradients
    return seen


def test_the_end_of_a_loader_synchronises():
    assert flags(Accelerator(gradient_accumulation_steps=2), 5) == [False, True, False, True, True]


def test_without_sync_with_dataloader_the_count_carries_on():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    assert flags(accelerator, 5) == [False, True, False, True, False]
    assert flags(accelerator, 3) == [True, False, True]


def test_an_evaluation_loop_inside_does_not_end_the_training_loop():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    training = accelerator.prepare(DataLoader(torch.arange(4), batch_size=1))
    evaluation = accelerator.prepare(DataLoader(torch.arange(2), batch_size=1))
    seen = []
    for index, _ in enumerate(training):
        if index == 1:
            assert [accelerator.gradient_state.end_of_dataloader for _ in evaluation] == [False, True]
        if index == 2:
            for _ in evaluation:
                break
        with accelerator.accumulate():
            seen.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader))
    assert seen == [(False, False), (True, False), (False, False), (True, True)]
    assert not accelerator.gradient_state.in_dataloader


def test_the_environment_sets_the_steps_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert Accelerator().gradient_accumulation_steps == 3
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator().gradient_accumulation_steps == 4


def test_each_accelerator_of_a_process_accumulates_as_it_was_told():
    training = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False))
    of_a_library = Accelerator()
    assert (GradientState().num_steps, GradientState().adjust_scheduler) == (1, True)
    weight = torch.nn.Parameter(torch.zeros(1))
    synchronised = []
    for accelerator in (training, of_a_library, training):
        with accelerator.accumulate():
            accelerator.backward((2 * weight).sum())
        synchronised.append((accelerator.sync_gradients, weight.grad.item()))
        weight.grad = None
    assert synchronised == [(False, 1.0), (True, 2.0), (True, 1.0)]
    of_a_library.gradient_accumulation_steps = 3
    assert (training.gradient_accumulation_steps, of_a_library.gradient_accumulation_steps) == (2, 3)
    assert training.gradient_state.plugin_kwargs == {"num_steps": 2, "adjust_scheduler": False}


@pytest.mark.distributed
def test_synchronisations_are_only_paid_for_when_due(run_ranks):
    """29 batches, 4 accumulation steps: 29 all-reduces naively, 8 with accumulate or a proper no_sync."""

    def body(how):
        accelerator = Accelerator(gradient_accumulation_steps=4)
        data = TensorDataset(torch.randn(29 * 2, 3), torch.randn(29 * 2, 1))
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=1))
        assert len(loader) == 29
        count = 0

        def hook(state, bucket):
            nonlocal count
            count += 1
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)

        def loss(batch):
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        for index, batch in enumerate(loader):
            due = (index + 1) % 4 == 0 or index == 28
            if how == "accumulate":
                with accelerator.accumulate(model):
                    accelerator.backward(loss(batch))
                    optimizer.step()
                    optimizer.zero_grad()
            elif how == "no_sync" and not due:
                with accelerator.no_sync(model):
                    accelerator.backward(loss(batch))
            elif how == "no_sync around backward" and not due:
                value = loss(batch)
                with accelerator.no_sync(model):
                    accelerator.backward(value)
            else:
                accelerator.backward(loss(batch))
        return count

    assert run_ranks(2, body, "baseline") == [29, 29]
    assert run_ranks(2, body, "no_sync around backward") == [29, 29]
    assert run_ranks(2, body, "no_sync") == [8, 8]
    assert run_ranks(2, body, "accumulate") == [8, 8]


@pytest.mark.distributed
def test_sync_each_batch_synchronises_without_stepping(run_ranks):
    def body():
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        model = accelerator.prepare(Linear())
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[1.0 + accelerator.process_index]])).sum())
            return accelerator.sync_gradients, accelerator.unwrap_model(model).weight.grad.item()

    assert run_ranks(2, body) == [(False, 0.75)] * 2


@pytest.mark.distributed
def test_trigger_sync_in_backward(run_ranks):
    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(Linear())
        weight, rank = accelerator.unwrap_model(model).weight, accelerator.process_index
        with accelerator.no_sync(model):
            first, second = model(torch.tensor([[1.0 + rank]])).sum(), model(torch.tensor([[10.0]])).sum()
        accelerator.backward(first)
        local = weight.grad.item()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        return local, weight.grad.item()

    assert run_ranks(2, body) == [(1.0, 11.5), (2.0, 11.5)]


@pytest.mark.distributed
def test_several_models_accumulate_in_one_block(run_ranks):
    def body():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        one, two = accelerator.prepare(Linear(), Linear())
        inputs = torch.tensor([[1.0 + accelerator.process_index]])
        grads = []
        for _ in range(2):
            with accelerator.accumulate(one, two):
                accelerator.backward((one(inputs) + two(inputs)).sum())
            grads.append([accelerator.unwrap_model(m).weight.grad.item() for m in (one, two)])
        return grads

    assert run_ranks(2, body) == [[[0.5, 0.5], [1.5, 1.5]], [[1.0, 1.0], [1.5, 1.5]]]


def test_steps_below_one_are_refused():
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        Accelerator(gradient_accumulation_steps=0)


def test_contradicting_steps_are_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 contradicts"):
        Accelerator(gradient_accumulation_steps=3, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


def test_accumulating_by_hand_still_works():
    """The documented loop without the helper: the script divides and counts."""
    accelerator = Accelerator()
    x = torch.arange(1.0, 9.0)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(inputs.view(-1, 1)), labels.view(-1, 1)) / 4
        accelerator.backward(loss)
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(2.04)


def test_parameters_change_on_synchronised_steps_only_and_clipping_sees_the_sum():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    for inputs in ([6.0, 0.0], [0.0, 8.0]):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([inputs])).sum())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
            seen.append((norm and norm.item(), model.weight.abs().sum().item() > 0))
    assert seen == [(None, False), (5.0, True)]
    assert model.weight.tolist() == [[pytest.approx(-0.6, abs=1e-5), pytest.approx(-0.8, abs=1e-5)]]


def test_a_plugin_without_steps_leaves_them_to_the_argument_and_the_environment(monkeypatch):
    plugin = GradientAccumulationPlugin(sync_with_dataloader=False)
    assert plugin.num_steps is None
    both = Accelerator(gradient_accumulation_steps=3, gradient_accumulation_plugin=plugin)
    assert (both.gradient_accumulation_steps, both.gradient_state.sync_with_dataloader) == (3, False)
    AcceleratorState._reset_state()
    monkeypatch.setenv("ORC_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 5
    AcceleratorState._reset_state()
    assert Accelerator(gradient_accumulation_steps=1).gradient_accumulation_steps == 1, "said is said"
    assert plugin.num_steps is None


def test_the_gradient_state_shows_the_plugin_and_the_loaders():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True, adjust_scheduler=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    state = GradientState()
    assert state.plugin_kwargs == {"num_steps": 2, "adjust_scheduler": False, "sync_each_batch": True}
    assert (state.num_steps, state.adjust_scheduler, state.sync_each_batch) == (2, False, True)
    loader = accelerator.prepare(DataLoader(torch.arange(2), batch_size=1))
    assert [state.active_dataloader is loader for _ in loader] == [True, True]
    assert state.dataloader_references == [None]


def test_windows_of_two_accelerators_may_lie_within_each_other():
    first, second = Accelerator(gradient_accumulation_steps=4), Accelerator()
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    one = first.prepare(torch.optim.SGD(models[0].parameters(), lr=0.1))
    other = second.prepare(torch.optim.SGD(models[1].parameters(), lr=0.1))
    rates = [torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1) for optimizer in (one, other)]
    schedules = first.prepare(rates[0]), second.prepare(rates[1])
    for _ in range(4):
        with first.accumulate(models[0]), second.accumulate(models[1]):
            for accelerator, model in zip((first, second), models, strict=True):
                accelerator.backward(model(torch.ones(1, 1)).sum())
            for part in (one, other, *schedules):
                part.step()
    assert (one.steps, other.steps) == (1, 4)
    assert [rate.last_epoch for rate in rates] == [1, 4]
    assert copy.copy(first).gradient_accumulation_steps == 4
