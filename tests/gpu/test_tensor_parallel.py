"""Tensor parallelism with the one rank that one GPU has: plans, DTensors on the device, clipping, states."""

import torch
import torch.nn.functional as F

from orc.runtime import Accelerator, TorchTensorParallelConfig
from orc.runtime.parallel.base import Request
from orc.runtime.parallel.tensor import PARALLELIZER


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))


def losses_of(model, parameters, clip):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = next(iter(parameters)).device
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(10):
        loss = F.mse_loss(model(inputs), inputs)
        loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_cut_model_trains_as_a_whole_one(device):
    accelerator = Accelerator()
    accelerator.ctx.set_topology({"tp": 1}, by="this test")
    handler = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"})
    model = PARALLELIZER.apply(network(), accelerator.ctx, Request(options={"tp": handler}))
    assert model[0].weight.device_mesh.device_type == device.type
    model = accelerator.prepare(model)
    found = losses_of(model, model.parameters(), accelerator.clip_grad_norm_)
    whole = network().to(accelerator.device)
    expected = losses_of(whole, whole.parameters(), torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    state = accelerator.get_state_dict(model)
    torch.testing.assert_close(
        state["0.weight"].to(whole[0].weight.device), whole[0].weight.detach(), rtol=1e-3, atol=1e-4
    )
    accelerator.end_training()
