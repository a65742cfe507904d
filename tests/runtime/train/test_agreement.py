"""Ranks that were told to train in different ways, or that bring different objects: the same error on every rank."""

import pytest
import torch
from torch import nn

RANKS_IMPORT = ("orc.runtime.parallel.fsdp_plugin",)
WAYS = {
    "an argument": "mixed_precision is 'no' on ranks 0, 2 and 'bf16' on rank 1. Give all",
    "a variable": "fsdp_plugin is not given on ranks 0, 2 and given on rank 1. Give all",
    "a layout": "the layout of the ranks is dp_replicate 3 on ranks 0, 2 and tp 3 on rank 1. Give all",
    "a field": "fsdp_plugin: forward_prefetch is False on ranks 0, 2 and True on rank 1. Give all",
    "accumulation": "gradient_accumulation_steps is 1 on ranks 0, 2 and 4 on rank 1. Give all",
    "dispatch": "DataLoaderConfiguration: dispatch_batches is None on ranks 0, 2 and True on rank 1. Give all",
    "order": "prepare(model, SGD) on ranks 0, 2 and prepare(SGD, model) on rank 1. Call it on all",
    "number": "prepare(model, SGD) on ranks 0, 2 and prepare(model) on rank 1. Call it on all",
    "optimizer": "prepare(model, SGD) on ranks 0, 2 and prepare(model, AdamW) on rank 1. Call it on all",
    "shape": "the model of rank 1 is not that of rank 0: 1.weight is torch.float32 [3, 4] instead of "
    "torch.float32 [2, 4]. Make the same",
    "dtype": "the model of rank 1 is not that of rank 0: 0.weight is torch.float64 [4, 4] instead of torch.float32 [4",
    "frozen": "0.bias is torch.float32 [4], frozen instead of torch.float32 [4]. Make",
    "a layer more": "the model of rank 1 is not that of rank 0: 2.weight is torch.float32 [4, 4] instead of missing",
    "a buffer": "the model of rank 1 is not that of rank 0: kept is torch.float32 [1] instead of missing",
}


def prepared(way):
    """Return what the ranks get from prepare; rank 1 goes its own *way*."""
    from orc.runtime import Accelerator, AcceleratorState, DataLoaderConfiguration, ParallelismConfig, PartialState
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin

    AcceleratorState._reset_state(reset_partial_state=False)
    other = PartialState(cpu=True).process_index == 1
    options = {}
    if way == "a field":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, forward_prefetch=other)
    with pytest.MonkeyPatch.context() as patch:
        if other and way == "an argument":
            options["mixed_precision"] = "bf16"
        if other and way == "a variable":
            patch.setenv("ACCELERATE_USE_FSDP", "true")
        if other and way == "a layout":
            options["parallelism_config"] = ParallelismConfig(tp_size=3)
        if other and way == "accumulation":
            options["gradient_accumulation_steps"] = 4
        if other and way == "dispatch":
            options["dataloader_config"] = DataLoaderConfiguration(dispatch_batches=True)
        accelerator = Accelerator(cpu=True, **options)
    layers = [nn.Linear(4, 4), nn.Linear(4, 3 if other and way == "shape" else 2)]
    if other and way == "a layer more":
        layers.append(nn.Linear(4, 4))
    model = nn.Sequential(*layers)
    if other and way == "dtype":
        model = model.double()
    if other and way == "frozen":
        model[0].bias.requires_grad_(False)
    if other and way == "a buffer":
        model.register_buffer("kept", torch.ones(1))
    optimizer = (torch.optim.AdamW if other and way == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    objects = {"order": (optimizer, model), "number": (model,)}.get(way if other else None, (model, optimizer))
    return accelerator, accelerator.prepare(*objects)


def each_way():
    found = {}
    for way in WAYS:
        with pytest.raises(RuntimeError) as error:
            prepared(way)
        found[way] = f"{type(error.value).__name__}: {error.value}"
    # Nobody trains what is frozen, what one rank trains by itself is its own, and all can go on.
    accelerator, (model, optimizer) = prepared("not at all")
    size = accelerator.process_index + 1
    accelerator.prepare(nn.Linear(size, size).requires_grad_(False))
    ignoring = nn.ModuleDict({"shared": nn.Linear(2, 2), "own": nn.Linear(size, size)})
    ignoring._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]
    accelerator.prepare(ignoring)
    if accelerator.is_main_process:  # by one rank alone
        accelerator.prepare(torch.utils.data.DataLoader(range(4)), nn.Linear(2, 2).requires_grad_(False))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return found


def test_ranks_that_differ_are_told_so_before_anything_is_prepared(run_ranks):
    first, *others = run_ranks(3, each_way, timeout=120)
    assert others == [first, first]
    for way, message in WAYS.items():
        assert first[way].startswith("ContextError: the ")
        assert message in first[way], way
