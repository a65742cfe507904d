"""The worked training loops of the documentation, with only their import line changed, on one process and on two."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.distributed
each_world = pytest.mark.parametrize("world", [1, 2])


def parts(samples=32, batch_size=4):
    """Model, optimizer, loader, scheduler and loss function, the same on every process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(samples, 3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    return model, optimizer, loader, scheduler, torch.nn.functional.mse_loss


def by_hand(world, accumulate=1):
    """Weights of the same training in one process: *world* batches of *accumulate* steps make one."""
    model, optimizer, loader, scheduler, loss_function = parts()
    inputs, targets = loader.dataset.tensors
    each = 4 * world * accumulate
    for start in range(0, 32, each):
        loss_function(model(inputs[start : start + each]), targets[start : start + each]).backward()
        optimizer.step()
        for _ in range(world):
            scheduler.step()
        optimizer.zero_grad()
    return weights(model), scheduler.get_last_lr()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def the_same(results, expected):
    for found, rate in results:
        torch.testing.assert_close(found, expected[0])
        assert rate == pytest.approx(expected[1])


@each_world
def test_the_quick_tour(run_ranks, world):
    def script():
        model, optimizer, training_dataloader, scheduler, loss_function = parts()

        from orc.runtime import Accelerator

        accelerator = Accelerator()

        device = accelerator.device
        model, optimizer, training_dataloader, scheduler = accelerator.prepare(
            model, optimizer, training_dataloader, scheduler
        )

        for batch in training_dataloader:
            optimizer.zero_grad()
            inputs, targets = batch
            assert inputs.device.type == device.type
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        return weights(accelerator.unwrap_model(model)), scheduler.get_last_lr()

    the_same(run_ranks(world, script), by_hand(world))


@each_world
def test_accumulation_by_hand_and_by_the_context_manager(run_ranks, world):
    def manual():
        model, optimizer, training_dataloader, scheduler, loss_function = parts()
        gradient_accumulation_steps = 2

        from orc.runtime import Accelerator

        accelerator = Accelerator()

        model, optimizer, training_dataloader, scheduler = accelerator.prepare(
            model, optimizer, training_dataloader, scheduler
        )

        for index, batch in enumerate(training_dataloader):
            inputs, targets = batch
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if (index + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return weights(accelerator.unwrap_model(model)), scheduler.get_last_lr()

    def managed():
        model, optimizer, training_dataloader, scheduler, loss_function = parts()

        from orc.runtime import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, training_dataloader, scheduler = accelerator.prepare(
            model, optimizer, training_dataloader, scheduler
        )
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return weights(accelerator.unwrap_model(model)), scheduler.get_last_lr()

    for script in (manual, managed):
        the_same(run_ranks(world, script), by_hand(world, accumulate=2))


@each_world
def test_the_checkpointing_example(run_ranks, world, tmp_path):
    def script(path):
        my_model, my_optimizer, my_training_dataloader, _, my_loss_function = parts()
        before = weights(my_model)
        num_epochs = 2

        from orc.runtime import Accelerator

        accelerator = Accelerator(project_dir=path)

        my_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, step_size=1, gamma=0.99)
        my_model, my_optimizer, my_training_dataloader = accelerator.prepare(
            my_model, my_optimizer, my_training_dataloader
        )

        # Register the LR scheduler
        accelerator.register_for_checkpointing(my_scheduler)

        # Save the starting state
        accelerator.save_state()

        device = accelerator.device
        my_model.to(device)

        # Perform training
        for _epoch in range(num_epochs):
            for batch in my_training_dataloader:
                my_optimizer.zero_grad()
                inputs, targets = batch
                inputs = inputs.to(device)
                targets = targets.to(device)
                outputs = my_model(inputs)
                loss = my_loss_function(outputs, targets)
                accelerator.backward(loss)
                my_optimizer.step()
            my_scheduler.step()
        after = weights(my_model)
        trained = my_scheduler.last_epoch

        # Restore the previous state
        accelerator.load_state(os.path.join(path, "checkpoints/checkpoint_0"))
        return before, after, weights(my_model), trained, my_scheduler.last_epoch

    for before, after, restored, trained, epoch in run_ranks(world, script, str(tmp_path)):
        assert all(map(torch.equal, before, restored))
        assert not any(map(torch.equal, before, after))
        assert (trained, epoch) == (2, 0)


@each_world
def test_saving_and_loading_a_model(run_ranks, world, tmp_path):
    def script(save_directory):
        from orc.runtime import Accelerator, load_checkpoint_in_model

        accelerator = Accelerator()
        model = accelerator.prepare(parts()[0])
        accelerator.wait_for_everyone()
        accelerator.save_model(model, save_directory, max_shard_size="1GB", safe_serialization=True)
        accelerator.wait_for_everyone()
        saved = weights(model)
        unwrapped_model = accelerator.unwrap_model(model)
        with torch.no_grad():
            unwrapped_model.weight.zero_()
        device = accelerator.device
        load_checkpoint_in_model(unwrapped_model, save_directory, device_map={"": device})
        return all(map(torch.equal, saved, weights(model)))

    assert run_ranks(world, script, str(tmp_path)) == [True] * world


def test_communication_hooks(run_ranks):
    def script(hook):
        from orc.runtime import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

        # DDP Communication Hook setup
        ddp_kwargs = DistributedDataParallelKwargs(comm_hook=getattr(DDPCommunicationHookType, hook))
        accelerator = Accelerator(kwargs_handlers=[ddp_kwargs])
        model, optimizer, data_loader, _, criterion = parts()
        model, optimizer, data_loader = accelerator.prepare(model, optimizer, data_loader)

        # Training loop
        for data, targets in data_loader:
            outputs = model(data)
            loss = criterion(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return weights(accelerator.unwrap_model(model))

    plain = run_ranks(2, script, "NO")[0]
    halved = run_ranks(2, script, "FP16")
    torch.testing.assert_close(halved[0], plain, rtol=1e-2, atol=1e-3)
    assert all(map(torch.equal, *halved))
    assert not all(map(torch.equal, halved[0], plain))
