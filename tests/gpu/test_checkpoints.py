"""Checkpoints of what is on a device: its random numbers, saving beside training, staging in pinned memory."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from orc.runtime import Accelerator, FullyShardedDataParallelPlugin
from orc.runtime.checkpoint.state import staging
from orc.runtime.checkpoint.state.staging import Stage, lock


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
def test_a_checkpoint_of_eight_gigabytes_is_what_was_trained(device, tmp_path, form, figure):
    free = min(torch.cuda.mem_get_info(device)[0] // 2, shutil.disk_usage(tmp_path).free // 3, 8_100_000_000)
    width = 8192
    layers = free // (3 * 4 * width * width)  # weights and Adam's two moments
    if layers < 1:
        pytest.skip("there is no room for a layer on the GPU, or on the disk")
    accelerator = Accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def train():
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    train()
    size = 3 * sum(parameter.nbytes for parameter in model.parameters())
    wanted = [parameter.detach()[:2].clone() for parameter in model.parameters()]
    figure("checkpoint", size / 1e9, "GB")
    for number, kind in enumerate(("first", "second")):
        pinned = _pinned()
        began = time.perf_counter()
        accelerator.save_state(tmp_path / f"c{number}", block=False, **form)
        torch.cuda.synchronize()
        stalled = time.perf_counter()
        train()
        accelerator.wait_for_checkpoint()
        figure(f"{kind} save beside training: training waits", 1000 * (stalled - began), "ms")
        figure(f"{kind} save beside training: until it is on disk", time.perf_counter() - began, "s")
        figure(f"{kind} save beside training: pinned memory more", (_pinned() - pinned) / 1e9, "GB")
        if number == 0:
            began = time.perf_counter()
            accelerator.load_state(tmp_path / "c0")
            torch.cuda.synchronize()
            figure("load", time.perf_counter() - began, "s")
            found = [parameter.detach()[:2] for parameter in model.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        shutil.rmtree(tmp_path / f"c{number}")
    began = time.perf_counter()
    accelerator.save_state(tmp_path / "b", **form)
    figure("save that training waits for", time.perf_counter() - began, "s")
    shutil.rmtree(tmp_path / "b")


def _pinned():
    """Bytes of host memory that torch has pinned in this process."""
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return stats.get("allocated_bytes.current", 0)


@pytest.mark.cuda_only
def test_staging_memory_is_pinned_and_used_again(device):
    stage = Stage()
    state = {"weight": torch.ones(1000, device=device)}
    first = stage.take(state)["weight"]
    assert first.is_pinned()
    assert stage.take(state)["weight"].data_ptr() == first.data_ptr()


@pytest.mark.cuda_only
def test_staging_takes_as_much_memory_as_the_state(device):
    def resident():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    state = {"weight": torch.ones(600 * 2**20 // 4, device=device), "bias": torch.ones(5, device=device)}
    stage = Stage()
    before = resident()
    copy = stage.take(state)
    assert copy["weight"].is_pinned()
    assert 0.95 < (resident() - before) / state["weight"].nbytes < 1.1, "in powers of two it were 1.7 times as much"
    del stage, copy
    assert resident() - before < 2**26


@pytest.mark.parametrize("block", [True, False])
def test_shards_come_through_locked_memory(device, tmp_path, form, block, monkeypatch):
    locked = []
    real = staging.lock
    monkeypatch.setattr(staging, "lock", lambda *given: locked.append(given) or real(*given))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, optimizer = setup(accelerator)
    step(accelerator, model, optimizer, device)
    wanted = [one.full_tensor() for one in copies(model, optimizer) if hasattr(one, "full_tensor")]
    accelerator.save_state(tmp_path / "c", block=block, **form)
    accelerator.wait_for_checkpoint()
    step(accelerator, model, optimizer, device)
    accelerator.load_state(tmp_path / "c")
    found = [one.full_tensor() for one in copies(model, optimizer) if hasattr(one, "full_tensor")]
    assert len(found) == len(wanted) >= 6
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert bool(locked) == (device.type == "cuda")
    accelerator.end_training()


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


@pytest.mark.cuda_only
def test_memory_that_the_driver_refuses_to_lock_does_not_end_the_training(device):
    stage = Stage()
    block = stage._reserve(1 << 20, device)
    other = Stage()
    with pytest.warns(UserWarning, match="copies from the GPU take longer"):
        lock(block, device, other)  # which is locked already
    assert torch.ones(4, device=device).sum().item() == 4
