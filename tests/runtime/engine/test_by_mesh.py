"""Cut and whole parameters in one optimizer, one loss scale and one clipping: with torch's operations on lists."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    GradScalerKwargs,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from orc.runtime.engine.by_mesh import groups_of_one_kind
from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin
from orc.runtime.parallel.norms import clip_values
from orc.runtime.parallel.shards import local_part, whole

STEPS = 3
PLAN = {"up": "colwise", "down": "rowwise"}
LAYOUTS = ("copies", "fsdp2", "fsdp2 with ignored modules", "tp", "tp with a norm outside the plan", "fsdp2 x tp")
LISTS = [("SGD", {"momentum": 0.9}), *((name, {}) for name in ("Adam", "AdamW", "Adagrad", "RMSprop"))]
FUSED = [("Adam", {}), ("AdamW", {})]  # which torch has for parameters that are cut


class Block(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=norm)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return (model(batch(step)) - batch(100 + step)).square().mean()


def optimizer_of(model, name, options):
    early, late = [*model.norm.parameters(), *model.up.parameters()], [*model.down.parameters()]
    return getattr(torch.optim, name)([{"params": early}, {"params": late, "lr": 0.02}], lr=0.01, **options)


def prepared(layout, name, options, **more):
    """Accelerator, model, optimizer and schedule of a run in *layout*."""
    AcceleratorState._reset_state(reset_partial_state=False)
    sharding = "fsdp2" in layout
    plugin = Plugin(fsdp_version=2, ignored_modules="norm" if "ignored" in layout else None) if sharding else None
    sizes = {"dp_shard_size": 2} if layout.startswith("fsdp2 x") else {}
    handler = TorchTensorParallelConfig(plan=PLAN)
    config = ParallelismConfig(tp_size=2, tp_handler=handler, **sizes) if "tp" in layout else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config, **more)
    model = Block(norm=layout != "tp")
    optimizer = optimizer_of(model, name, options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def as_on_gpus():
    """Let torch choose its operations on lists by itself, as it does on GPUs."""
    from torch.utils import _foreach_utils

    _foreach_utils._get_foreach_kernels_supported_devices = lambda: ["cpu"]


def trained(layout, cases, clip=None):
    """Whole weights, learning rates and the shape of the optimizer's state after some steps, for each of *cases*."""
    as_on_gpus()
    results = []
    for name, options in cases:
        accelerator, model, optimizer, schedule = prepared(layout, name, options, step_scheduler_with_optimizer=False)
        for step in range(STEPS):
            accelerator.backward(loss_of(model, step))
            if clip is not None:
                getattr(accelerator, f"clip_grad_{clip}_")(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        shape = [len(group["params"]) for group in state["param_groups"]], sorted(state["state"])
        weights = {key: value.clone() for key, value in whole(accelerator.unwrap_model(model).state_dict()).items()}
        results.append((weights, schedule.get_last_lr(), shape))
    return results


def alone(layout, name, options, clip=None):
    """The same by torch, whole and one parameter after the other."""
    model = Block(norm=layout != "tp")
    optimizer = optimizer_of(model, name, {**options, "foreach": False})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        loss_of(model, step).backward()
        if clip is not None:
            getattr(nn.utils, f"clip_grad_{clip}_")(model.parameters(), 0.01)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()
    shape = [len(group["params"]) for group in state["param_groups"]], sorted(state["state"])
    return model.state_dict(), schedule.get_last_lr(), shape


def assert_same(found, expected):
    weights, rates, shape = found
    torch.testing.assert_close(weights, dict(expected[0]), rtol=1e-4, atol=1e-5)
    assert (rates, shape) == (expected[1], expected[2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_on_lists_step_cut_and_whole_parameters(layout, run_ranks):
    cases = [(name, {**options, "foreach": True}) for name, options in LISTS]
    cases += [(name, {**options, "fused": True}) for name, options in FUSED]
    expected = [alone(layout, name, options) for name, options in [*LISTS, *FUSED]]
    for results in run_ranks(4 if "x" in layout else 2, trained, layout, cases):
        for found, wanted in zip(results, expected, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("layout", ["fsdp2 with ignored modules", "fsdp2 x tp"])
def test_cut_and_whole_gradients_are_clipped_together(layout, clip, run_ranks):
    expected = alone(layout, "SGD", {}, clip)
    for results in run_ranks(4 if "x" in layout else 2, trained, layout, [("SGD", {})], clip):
        assert_same(results[0], expected)


def scaled(layout, where):
    """Of one good step and one that overflows on one rank alone, in what *where* names: what was skipped, weights."""
    as_on_gpus()
    scaler = GradScalerKwargs(init_scale=8.0)
    accelerator, model, optimizer, _ = prepared(layout, "SGD", {}, mixed_precision="fp16", kwargs_handlers=[scaler])
    told = []
    for step in range(2):
        accelerator.backward(loss_of(model, step))
        if step and accelerator.process_index == 1:
            local_part(model.get_parameter(where).grad).fill_(float("inf"))
        optimizer.step()
        told.append((optimizer.step_was_skipped, accelerator.scaler.get_scale()))
        optimizer.zero_grad()
    return told, {key: value.clone() for key, value in whole(accelerator.unwrap_model(model).state_dict()).items()}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_an_overflow_of_one_rank_in_anything_makes_all_ranks_skip(layout, run_ranks):
    expected = Block(norm=layout != "tp")
    optimizer = optimizer_of(expected, "SGD", {})
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(expected, 0)
    loss.backward()
    optimizer.step()
    for where in ("up.weight",) if layout == "tp" else ("norm.weight", "up.weight"):
        for told, weights in run_ranks(4 if "x" in layout else 2, scaled, layout, where):
            assert told == [(False, 8.0), (True, 4.0)]
            torch.testing.assert_close(weights, dict(expected.state_dict()), rtol=1e-2, atol=1e-4)


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: values that the host reads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_a_window_of_fp16_reads_one_value(options):
    scaler = GradScalerKwargs(init_scale=8.0)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=4, kwargs_handlers=[scaler])
    model = Block()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), **options))
    with Waits() as waits:
        for step in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert waits.count == 1


def test_what_an_optimizer_counts_in_its_groups_is_kept_and_a_failing_step_leaves_the_groups():
    class Counting(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                assert len({hasattr(one, "device_mesh") for one in group["params"]}) == 1
                group["updates"] = group.get("updates", 0) + 1
            if self.param_groups[0]["updates"] == 2:
                raise RuntimeError("the second fails")

    cut, whole = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    cut.device_mesh = "a mesh"
    optimizer = Counting([cut, whole], lr=0.1)
    groups = optimizer.param_groups
    with groups_of_one_kind(optimizer):
        optimizer.step()
    with pytest.raises(RuntimeError, match="the second fails"), groups_of_one_kind(optimizer):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert len(groups) == 1
    assert groups[0]["params"] == [cut, whole]
    assert copy.copy(groups[0])["updates"] == 2


def summed():
    """Gradients that are summands on each rank, as those of a norm over the heads of a rank; clipped, and stepped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    accelerator = Accelerator(cpu=True)
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    rank = accelerator.process_index
    weight.grad = DTensor.from_local(torch.tensor([5.0 - 9.0 * rank, 0.25]), mesh, [Partial()])
    clip_values([weight], 2.0, sharded=True)
    torch.optim.SGD([weight], lr=1.0, foreach=True).step()
    return weight.detach().full_tensor()


def test_gradients_in_summands_are_added_before_their_values_are_clipped(run_ranks):
    for weight in run_ranks(2, summed):
        assert torch.equal(weight, torch.tensor([-1.0, -0.5]))
