"""torch's optimizers with its own defaults of the device, on models that are whole, sharded, cut, and mixed."""

import copy

import pytest
import torch
from torch import nn

from orc.runtime import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs, TorchTensorParallelConfig
from orc.runtime.parallel.base import Request
from orc.runtime.parallel.tensor import PARALLELIZER

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.001),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
}
MODES = ("plain", "sharded", "sharded, norm ignored", "cut, norm whole")


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)).to(device)


def prepared(mode, model, make, precision="no", **handlers):
    plugin = None
    if mode.startswith("sharded"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
            ignored_modules="1" if "ignored" in mode else None,
        )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision, **handlers)
    if mode.startswith("cut"):
        accelerator.ctx.set_topology({"tp": 1}, by="this test")
        handler = TorchTensorParallelConfig(plan={"0": "colwise_rep", "3": "rowwise_rep"})
        model = PARALLELIZER.apply(model, accelerator.ctx, Request(options={"tp": handler}))
        model = accelerator.prepare(model)
        return accelerator, model, accelerator.prepare(make(model.parameters()))
    return accelerator, *accelerator.prepare(model, make(model.parameters()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_as_it_does_by_hand(device, name, mode):
    make = OPTIMIZERS[name]
    whole = network(device)
    accelerator, model, optimizer = prepared(mode, copy.deepcopy(whole), make)
    by_hand = make(whole.parameters())
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(4):
        loss = (model(inputs) - inputs).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        accelerator.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
        expected = (whole(inputs) - inputs).square().mean()
        expected.backward()
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        nn.utils.clip_grad_value_(whole.parameters(), 0.02)
        by_hand.step()
        by_hand.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        assert float(norm) == pytest.approx(float(wanted), rel=5e-3)
    accelerator.end_training()


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", MODES)
def test_fp16_that_overflows_on_shards_skips_and_goes_on(device, mode):
    handlers = [GradScalerKwargs(init_scale=1024.0, growth_interval=1000)]
    accelerator, model, optimizer = prepared(
        mode, network(device), OPTIMIZERS["AdamW"], precision="fp16", kwargs_handlers=handlers
    )
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.backward(model(inputs).sum())
    gradient = model.get_parameter("1.weight").grad  # of the norm alone: whole beside others that are cut
    getattr(gradient, "to_local", lambda: gradient)().fill_(float("inf"))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert accelerator.scaler.get_scale() == 512.0
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    losses = []
    for _ in range(30):
        loss = (model(inputs).float() - inputs).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 0 < norm.item() < 100, "unscaled"
    assert losses[-1] < losses[0] / 2
    accelerator.end_training()


@pytest.mark.cuda_only
@pytest.mark.parametrize("fused", [None, True])
def test_a_warm_window_of_fp16_waits_for_the_device_once(device, fused):
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]
    )
    model = network(device)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused))
    inputs = torch.randn(8, 16, device=device)

    def window():
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    window()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as told:
            window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in told if "synchroniz" in str(one.message)]) == 1
