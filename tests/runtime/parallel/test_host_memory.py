"""Memory that sharding takes: a unit at a time is whole and in float32, never the model."""

import copy

import pytest
import torch
from torch import nn

from orc.runtime import Accelerator, ParallelismConfig, TorchTensorParallelConfig
from orc.runtime.parallel import sharding
from orc.runtime.parallel.base import Request
from orc.runtime.parallel.fsdp2 import PARALLELIZER
from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin

UNITS, SIZE = 16, 128
PARAMETERS = UNITS * SIZE * SIZE


class Unit(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x):
        return self.layer(x)


def peak_while(act):
    """Bytes that the CPU's allocator has given at most, beyond what it had given before, while *act* runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def prepared(way, empty):
    """Bytes for each parameter at the most while a rank prepares a model in bf16; which has no values if *empty*."""
    plugin = Plugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Unit"],
        cpu_ram_efficient_loading=empty,
    )
    config = None
    if way == "tp":
        handler = TorchTensorParallelConfig(plan={"*.layer": "colwise_gather_output"})
        config = ParallelismConfig(tp_size=2, dp_shard_size=2, tp_handler=handler)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16", parallelism_config=config)
    device = "meta" if empty and accelerator.process_index else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit(device) for _ in range(UNITS)))
    models = []
    with pytest.warns(UserWarning, match=f"{UNITS} parameters of 16 bits are trained in mixed precision"):
        peak = peak_while(lambda: models.append(accelerator.prepare(model)))
    weights = [one.full_tensor() for one in models[0].parameters()]
    assert {one.dtype for one in weights} == {torch.float32}
    return peak / PARAMETERS, sum(one.double().sum().item() for one in weights)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("way", ["fsdp2", "tp"])
def test_a_model_in_bf16_becomes_float32_a_unit_at_a_time(way, empty, run_ranks):
    ranks = 4 if way == "tp" else 2
    torch.manual_seed(0)
    expected = sum(Unit("cpu").layer.weight.double().sum().item() for _ in range(UNITS))
    for peak, total in run_ranks(ranks, prepared, way, empty):
        assert total == pytest.approx(expected)
        assert peak < 5  # a half of the model in float32, a unit, and what gloo's threads let go of late; whole it is 6


def without_values():
    """Bytes of the host for each parameter, on a rank without values whose device is another one (here `meta`)."""
    plugin = Plugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Unit"])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    _ = accelerator.ctx.topology.mesh
    ctx = copy.copy(accelerator.ctx)
    object.__setattr__(ctx, "device", torch.device("meta"))
    sharding.agree_on_model = lambda model, ctx, prepare: None  # rank 0 has them
    model = nn.Sequential(*(Unit("meta") for _ in range(UNITS)))
    request = Request(options={"fsdp": plugin}, mixed_precision="bf16")
    with pytest.warns(UserWarning, match="trained in mixed precision"):
        peak = peak_while(lambda: PARALLELIZER.apply(model, ctx, request))
    assert all(hasattr(one, "to_local") for one in model.parameters())
    return peak / PARAMETERS


def test_a_rank_without_values_takes_no_memory_of_the_host_but_of_its_device(run_ranks):
    assert run_ranks(1, without_values)[0] < 0.05
