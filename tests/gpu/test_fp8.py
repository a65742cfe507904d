"""Training in fp8 by torchao: on a GPU from Ada and Hopper on for real, on an older one refused by name."""

import pytest
import torch

from orc.runtime import Accelerator, AcceleratorState, AORecipeKwargs, LaunchError

pytest.importorskip("torchao.float8", reason="needs torchao")


def losses(precision, steps=30, **options):
    """Losses of *steps* steps, and the prepared model."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(mixed_precision=precision, **options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        inputs = torch.randn(64, 64, generator=generator).to(accelerator.device)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, accelerator, model


def test_float8_trains_near_bfloat16_where_the_gpu_has_it(device, tmp_path):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        with pytest.raises(LaunchError, match="it needs a GPU with fp8"):
            losses("fp8")
        return
    half, *_ = losses("bf16")
    low, accelerator, model = losses("fp8")
    layer = model[2]
    assert type(layer).__name__ == "Float8Linear"
    assert layer.config.emulate == (device.type == "cpu")
    assert low != half
    assert low == pytest.approx(half, rel=0.1)
    assert layer.weight.dtype is torch.float32
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.save_state(tmp_path)
    _, accelerator, again = losses("bf16", steps=1)
    accelerator.load_state(tmp_path)
    assert all(torch.equal(value, saved[name]) for name, value in again.state_dict().items())


@pytest.mark.cuda_only
def test_float8_compiles_and_pads_sizes(device, compiler):
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("the GPU has no fp8")
    plain, *_ = losses("fp8", steps=5)
    padded, *_ = losses("fp8", steps=5, kwargs_handlers=[AORecipeKwargs(pad_inner_dim=True)])
    compiled, *_ = losses("fp8", steps=5, dynamo_backend=compiler)
    assert padded == pytest.approx(plain, rel=0.05)
    assert compiled == pytest.approx(plain, rel=0.05)
