"""Checkpoints of what is on a device: its random numbers, saving beside training, staging in pinned memory."""

import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.checkpoint.state.staging import Stage


def setup(accelerator, size=64):
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, device):
    accelerator.backward(model(torch.ones(4, model.weight.shape[1], device=device)).square().sum())
    optimizer.step()
    optimizer.zero_grad()


def copies(model, optimizer):
    state = [one.detach().clone() for one in model.parameters()]
    for moments in optimizer.state_dict()["state"].values():
        state += [value.detach().clone() for value in moments.values()]
    return state


def test_random_numbers_of_the_device_go_on(device, tmp_path, form):
    accelerator = Accelerator()
    torch.rand(3, device=device)
    accelerator.save_state(tmp_path / "c", **form)
    wanted = torch.rand(5, device=device)
    torch.manual_seed(1234)
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(torch.rand(5, device=device), wanted)


@pytest.mark.parametrize("block", [True, False])
def test_what_is_saved_is_the_moment_of_the_call(device, tmp_path, block, form):
    accelerator = Accelerator()
    model, optimizer = setup(accelerator)
    step(accelerator, model, optimizer, device)
    wanted = copies(model, optimizer)
    accelerator.save_state(tmp_path / "c", block=block, **form)
    for _ in range(3):  # goes on while it is written
        step(accelerator, model, optimizer, device)
    accelerator.wait_for_checkpoint()
    accelerator.load_state(tmp_path / "c")
    found = copies(model, optimizer)
    assert len(found) == len(wanted) == 8
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(parameter.device == device for parameter in model.parameters())


def test_saving_and_loading_leave_no_memory_on_the_device(device, allocated, tmp_path, form):
    accelerator = Accelerator()
    model, optimizer = setup(accelerator, 1024)
    step(accelerator, model, optimizer, device)
    before = allocated()
    for block in (True, False):
        accelerator.save_state(tmp_path / "c", block=block, **form)
        accelerator.wait_for_checkpoint()
    accelerator.load_state(tmp_path / "c")
    assert allocated() - before < 2**20


@pytest.mark.cuda_only
def test_saving_beside_training_takes_no_second_copy_on_the_device(device, tmp_path, form):
    accelerator = Accelerator()
    model, optimizer = setup(accelerator, 2048)
    step(accelerator, model, optimizer, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accelerator.save_state(tmp_path / "c", block=False, **form)
    accelerator.wait_for_checkpoint()
    assert torch.cuda.max_memory_allocated() - before < model.weight.nbytes


def test_staged_tensors_are_independent_and_tied_ones_stay_tied(device):
    stage = Stage()
    weight = torch.arange(1000.0, device=device)
    state = {"a": weight, "tied": weight, "half": weight.to(torch.bfloat16), "none": torch.empty(0, device=device)}
    copy = stage.take(state)
    weight.zero_()
    assert torch.equal(copy["a"], torch.arange(1000.0))
    assert copy["a"].data_ptr() == copy["tied"].data_ptr()
    assert copy["half"].dtype == torch.bfloat16
    assert all(one.device.type == "cpu" for one in copy.values())


@pytest.mark.cuda_only
def test_staging_memory_is_pinned_and_used_again(device):
    stage = Stage()
    state = {"weight": torch.ones(1000, device=device)}
    first = stage.take(state)["weight"]
    assert first.is_pinned()
    assert stage.take(state)["weight"].data_ptr() == first.data_ptr()


def test_a_scaler_goes_on_where_it_was(device, tmp_path, form):
    precision = "fp16" if device.type == "cuda" else "bf16"
    accelerator = Accelerator(mixed_precision=precision)
    model, optimizer = setup(accelerator)
    step(accelerator, model, optimizer, device)
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else None
    accelerator.save_state(tmp_path / "c", **form)
    if accelerator.scaler is not None:
        accelerator.scaler.update(2.0)
    accelerator.load_state(tmp_path / "c")
    assert (accelerator.scaler.get_scale() if accelerator.scaler is not None else None) == scale
