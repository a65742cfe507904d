"""Warm steps wait for the device no more often than plain torch: ``set_sync_debug_mode`` raises where one would."""

import contextlib
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin

WARM, STEPS = 4, 12


@contextlib.contextmanager
def no_waits(device):
    """A block in which an operation that would wait for the device raises; on the CPU nothing waits."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loader_of(accelerator, pinned=True, workers=0, rows=(WARM + STEPS) * 8, **options):
    inputs = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    pin = pinned and accelerator.device.type == "cuda"
    return DataLoader(samples, batch_size=8, pin_memory=pin, num_workers=workers, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))


def train(accelerator, *prepared, clip=None, warm=WARM, count=None, each=None):
    """Train one pass; no step after the first *warm* may wait, the call for its batch included."""
    model, optimizer, loader = prepared
    batches, losses = iter(loader), []
    with contextlib.ExitStack() as stack:
        for number in range(WARM + STEPS):
            if number == warm:
                stack.enter_context(no_waits(accelerator.device))
            inputs, wanted = next(batches)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss, **({} if count is None else {"normalize_by": count(inputs)}))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if each is not None:
                each(number, loss)
    return [loss.item() for loss in losses]


def prepare(accelerator, **options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, loader_of(accelerator, **options))


@pytest.mark.cuda_only
def test_a_wait_is_an_error_in_these_tests(device):
    with pytest.raises(RuntimeError, match="synchroniz"), no_waits(device):
        torch.ones(1, device=device).item()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_a_plain_step_and_its_batch_wait_for_nothing(pinned, workers):
    accelerator = Accelerator()
    losses = train(accelerator, *prepare(accelerator, pinned=pinned, workers=workers))
    assert losses[-1] < losses[0]


def test_a_schedule_waits_for_nothing():
    accelerator = Accelerator()
    model, optimizer, loader = prepare(accelerator)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2, gamma=0.9))
    train(accelerator, model, optimizer, loader, each=lambda *_: schedule.step())
    assert schedule.get_last_lr() == [pytest.approx(0.01 * 0.9**8)]


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_step_waits_for_nothing_when_asked_to_copy_without_waiting(dispatch):
    configuration = DataLoaderConfiguration(non_blocking=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=configuration)
    train(accelerator, *prepare(accelerator))


def test_a_step_in_bf16_waits_for_nothing():
    accelerator = Accelerator(mixed_precision="bf16")
    train(accelerator, *prepare(accelerator), clip=1.0)


def test_accumulation_with_clipping_waits_for_nothing():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train(accelerator, *prepare(accelerator), clip=0.5)


def test_losses_that_are_sums_wait_for_nothing(device):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    on_device = torch.tensor(8, device=device)
    train(accelerator, *prepare(accelerator), clip=0.5, count=lambda inputs: on_device)


def test_gathering_for_metrics_waits_for_nothing():
    accelerator = Accelerator()
    seen = []
    train(accelerator, *prepare(accelerator), each=lambda _, loss: seen.append(accelerator.gather_for_metrics(loss)))
    assert len(seen) == WARM + STEPS


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_the_spike_guard_waits_for_nothing(action, monkeypatch):
    monkeypatch.setenv("ORC_SPIKE_ACTION", action)
    monkeypatch.setenv("ORC_SPIKE_EVERY", "2")
    accelerator = Accelerator()
    fused = {"fused": True} if action == "skip" else {}  # others cannot skip on the device
    model = network().to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **fused)
    prepared = accelerator.prepare(model, optimizer, loader_of(accelerator))
    train(accelerator, *prepared, clip=1.0, warm=8)
    accelerator.end_training()


def test_metrics_wait_for_nothing_and_have_the_loss(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORC_METRICS", "1")
    monkeypatch.setenv("ORC_METRICS_INTERVAL_S", "0.05")
    accelerator = Accelerator()
    prepared = prepare(accelerator)
    for _ in range(40):  # passes, until the thread that writes has seen some of them
        train(accelerator, *prepared)
        path = tmp_path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) > 2:
            break
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    assert "loss" in lines[-1]


def test_steps_after_load_state_wait_for_nothing(tmp_path, form):
    accelerator = Accelerator()
    prepared = prepare(accelerator)
    train(accelerator, *prepared)
    accelerator.save_state(tmp_path / "c", **form)
    accelerator.load_state(tmp_path / "c")
    train(accelerator, *prepared, clip=1.0, warm=2)


def test_steps_of_a_sharded_model_wait_for_nothing():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    train(accelerator, *prepare(accelerator), clip=1.0)
    accelerator.end_training()
