"""Models that are spread over the device, the CPU and the disk: what computes where, and what the device holds."""

import copy

import pytest
import torch
from torch import nn

from orc.runtime import (
    BnbQuantizationConfig,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_and_quantize_model,
    load_checkpoint_and_dispatch,
)
from orc.runtime.weights.alignment import align_hooks
from orc.runtime.weights.dispatch import share_read_ahead
from orc.runtime.weights.loading import save_model
from orc.runtime.weights.read_ahead import CudaLane, ReadAhead

WIDTH, LAYERS = 1024, 8


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture
def places(device):
    """Three layers on the device (the CPU where that is it), three on the CPU, two on the disk."""
    main = device.index if device.type == "cuda" else "cpu"
    return {str(layer): main if layer < 3 else "cpu" if layer < 6 else "disk" for layer in range(LAYERS)}


@pytest.mark.parametrize("way", ["dispatch", "load"])
def test_a_spread_model_computes_as_before_and_holds_its_own_part(device, places, allocated, tmp_path, way):
    whole, x = layers().eval(), torch.randn(4, WIDTH)
    with torch.no_grad():
        expected = whole(x)
    before = allocated()
    if way == "dispatch":
        model = dispatch_model(copy.deepcopy(whole), places, offload_dir=tmp_path / "away")
    else:
        save_model(whole, tmp_path / "weights")
        with init_empty_weights():
            empty = layers()
        model = load_checkpoint_and_dispatch(empty, tmp_path / "weights", device_map=places)
    for _ in range(2):
        output = model(x)
        assert output.device == x.device
        assert torch.allclose(output, expected, atol=1e-4)
    assert model[7].weight.is_meta
    assert model[0].weight.device.type == device.type
    if device.type == "cuda":
        layer = 4 * WIDTH * (WIDTH + 1)
        assert model[4].weight.is_meta
        assert 3 * layer <= allocated() - before < 5 * layer


@pytest.mark.cuda_only
def test_the_device_holds_the_present_layer_and_the_next(device):
    model = layers().eval()
    cpu_offload(model, device)
    for _ in range(2):
        model(torch.randn(4, WIDTH))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(torch.randn(4, WIDTH))
    peak = torch.cuda.max_memory_allocated(device) - before
    print(f"peak {peak >> 20} MiB of {4 * LAYERS * WIDTH * (WIDTH + 1) >> 20}")
    assert peak < 3 * 4 * WIDTH * (WIDTH + 1)


@pytest.mark.cuda_only
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("rows", [4, 2**15], ids=["copies are slower", "computation is slower"])
def test_weights_that_were_read_ahead_are_the_right_ones(device, tmp_path, monkeypatch, where, rows):
    handed = []
    hand_over = CudaLane.hand_over
    monkeypatch.setattr(
        CudaLane, "hand_over", lambda lane, *arguments: (handed.append(lane.device), hand_over(lane, *arguments))
    )
    model, x = layers().eval(), torch.randn(rows, WIDTH, device=device)
    whole = copy.deepcopy(model).to(device)
    with torch.no_grad():
        expected = whole(x)
    cpu_offload(model, device) if where == "cpu" else disk_offload(model, tmp_path, device)
    # Buffers of a fraction of a layer, so that each is used again and again while copies are on their way.
    share_read_ahead(model, ReadAhead(device, buffer_bytes=2**18))
    outputs = [model(x) for _ in range(5)]
    assert handed == [device] * 4 * (LAYERS - 1)
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.cuda_only
def test_an_offloaded_model_reads_ahead_by_itself(device):
    model = layers().eval()
    cpu_offload(model, device.type)  # without a number it is the present one
    (shared,) = {hook.read_ahead for layer in model for hook in align_hooks(layer)}
    for _ in range(2):
        model(torch.randn(4, WIDTH))
    assert shared.device == device
    assert isinstance(shared.lane, CudaLane)


@pytest.mark.cuda_only
@pytest.mark.parametrize("bits", [8, 4])
def test_layers_are_quantized_on_the_device_and_eight_bits_offloaded(device, places, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    whole = layers().eval()
    save_model(whole, tmp_path / "weights")
    config = BnbQuantizationConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    x = torch.randn(4, WIDTH, dtype=torch.float16)
    for spread in (None, places):
        with init_empty_weights():
            empty = layers()
        model = load_and_quantize_model(
            empty, config, tmp_path / "weights", device_map=spread, offload_folder=tmp_path / f"away{bits}"
        )
        assert model[0].weight.device.type == "cuda"
        with torch.no_grad():
            assert (model(x.to(device)).float().cpu() - whole(x.float())).abs().max() < 0.3
    assert model[4].weight.dtype == (torch.int8 if bits == 8 else torch.float16)
