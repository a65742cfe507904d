"""Parallelizers: each turns a model into a parallel one, in the order they state.

A new one is a module here with an attribute ``PARALLELIZER``, named in `_OF_DIMENSIONS` by the dimension that calls for
it. Those that a run does not call for are neither asked nor loaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from orc.runtime.core import libraries
from orc.runtime.core.errors import ContextError
from orc.runtime.core.topology import DATA_DIMENSIONS, DIMENSIONS, LOSS_DIMENSIONS
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.replacements import named_parameters, replaced
from orc.runtime.parallel.shards import spread_over

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import DistributedDataParallelKwargs

_OF_DIMENSIONS = {"pp": ("pp",), "tp": ("tensor", "replicas"), "cp": ("context",), "sp": ("sequence",)}
# Classes of wrappers, by their modules: where these are not loaded there are none.
_WRAPPERS = {
    "torch.nn.parallel": ("DistributedDataParallel", "DataParallel"),
    "torch.distributed.fsdp": ("FullyShardedDataParallel",),
    "orc.runtime.parallel.pipeline_model": ("PipelineModel",),
}
_SYNCHRONIZERS = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp1", "FSDPModule": "fsdp2"}


def parallelizers(ctx: RunContext, options: Mapping[str, Any]) -> list[Parallelizer]:
    """Return the parallelizers that the layout of *ctx* and the *options* of a request call for, in their order."""
    called = [dim for dim in _OF_DIMENSIONS if ctx.topology.size(dim) > 1 or options.get(dim) is not None]
    names = [name for dim in called for name in _OF_DIMENSIONS[dim]]
    if (plugin := options.get("fsdp")) is not None:
        names.append(f"fsdp{plugin.fsdp_version}")
    names.append(ctx.compute.replicas)
    return sorted(map(_parallelizer, names), key=lambda parallelizer: parallelizer.order)


def _parallelizer(name: str) -> Parallelizer:
    parallelizer: Parallelizer = importlib.import_module(f"{__name__}.{name}").PARALLELIZER
    return parallelizer


def synchronizer_of(model: nn.Module) -> Parallelizer | None:
    """Return what brings the gradients of *model* together in backward, as its class says; `None` where nothing does.

    A script may have made it parallel by itself.
    """
    for kind in type(model).__mro__:
        if kind.__name__ in _SYNCHRONIZERS and kind.__module__.startswith("torch."):
            return _parallelizer(_SYNCHRONIZERS[kind.__name__])
    copies = sys.modules.get(f"{__name__}.replicas")  # which change no class
    return copies.PARALLELIZER if copies is not None and copies.PARALLELIZER.no_sync(model) is not None else None


def chosen(model: nn.Module, ctx: RunContext, request: Request) -> list[Parallelizer]:
    """Return the parallelizers that *ctx* and *request* call for, in their order; none for a model that is sharded.

    Raises:
        ContextError: one that was called for cannot work here, or not with another; the same on all processes.
    """
    if is_sharded(model) and not _only_part(model, ctx):
        return []
    if ctx.library is not None and not request.evaluation:
        raise ContextError(
            f"{ctx.library.title} needs the model with its optimizer: accelerator.prepare(model, optimizer, ...)"
        )
    wanted = [each for each in parallelizers(ctx, request.options) if each.wanted(model, ctx, request)]
    asked = [each for each in wanted if not each.default]
    wanted = [each for each in wanted if not (each.default and any(_conflict(each, other) for other in asked))]
    names = {each.name for each in wanted}
    for each in wanted:
        if reason := each.requires(ctx):
            raise ContextError(f"strategy {each.name} cannot be used here: {reason}")
        if missing := [name for name in each.needs if name not in names]:
            raise ContextError(f"strategy {each.name} works only together with {' and '.join(missing)}")
        if clash := next((other for other in wanted if other is not each and _conflict(each, other)), None):
            raise ContextError(f"the strategies {each.name} and {clash.name} cannot be used together; choose one")
    for each in wanted:
        each.check(model, ctx, request)
    if not request.evaluation:
        refuse_unserved(ctx, {dim for each in wanted for dim in each.serves})
        if wanted and "ddp" not in names:
            refuse_compression(ctx, request.options.get("ddp"), wanted[-1].name)
    return wanted


def _only_part(model: nn.Module, ctx: RunContext) -> bool:
    """Return whether *model* came cut over dimensions that are not of the data, and the others are left to do."""
    spread = spread_over(model.parameters())
    return bool(spread) and not spread & {*LOSS_DIMENSIONS} and all(ctx.topology.size(dim) > 1 for dim in spread)


def refuse_compression(ctx: RunContext, options: DistributedDataParallelKwargs | None, averages: str) -> None:
    """Raise `ContextError` where *options* compress the gradients of DDP, and *averages* averages them instead."""
    if options is not None and options.compresses and ctx.topology.data_size > 1:
        raise ContextError(
            f"DistributedDataParallelKwargs(comm_hook={str(options.comm_hook)!r}) compresses gradients that DDP "
            f"averages, and here {averages} averages them: leave comm_hook and comm_wrapper out"
        )


def refuse_unserved(ctx: RunContext, served: Collection[str] = (), by: str = "this version of orc") -> None:
    """Raise `ContextError` for dimensions that are not *served*: copies of a model would differ there silently."""
    topology = ctx.topology
    unserved = [name for name in DIMENSIONS if name not in (*DATA_DIMENSIONS, *served) and topology.size(name) > 1]
    if unserved:
        sizes = " and ".join(f"{name} {topology.size(name)}" for name in unserved)
        raise ContextError(
            f"{topology.by} asks for {sizes}, and {by} cannot spread a model over it: shard the model "
            "over accelerator.torch_device_mesh before prepare, or leave it out"
        )


def batch_cut(ctx: RunContext, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return what makes this rank's part of each batch of a loader; `None` where all ranks of a share get it whole."""
    cuts = (parallelizer.batch_cut(ctx, options) for parallelizer in parallelizers(ctx, options))
    return next((cut for cut in cuts if cut is not None), None)


def _conflict(parallelizer: Parallelizer, other: Parallelizer) -> bool:
    return other.name in parallelizer.conflicts or parallelizer.name in other.conflicts


def apply_all(applied: Sequence[Parallelizer], model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
    """*model* transformed by each of *applied*; optimizers that are prepared from now on get its new parameters."""
    for parallelizer in applied:
        if not parallelizer.places_parameters:
            model = parallelizer.apply(model, ctx, request)
            continue
        before = named_parameters(extract_model_from_parallel(model))
        model = parallelizer.apply(model, ctx, request)
        replaced(before, named_parameters(extract_model_from_parallel(model)))
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of *model* are cut over processes: DTensors, or those of FSDP version 1."""
    if is_flattened(model):
        return True
    # Where their modules are not loaded, or another thread is loading them, there are none.
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor is not None and any(isinstance(parameter, tensor) for parameter in model.parameters())


def is_flattened(model: nn.Module) -> bool:
    """Return whether parameters of *model* are cut over processes as FSDP version 1 does it."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(module, wrapper) for module in model.modules())


def inside(model: nn.Module) -> nn.Module:
    """Return the module with the parameters of *model*, inside what parallelizers and libraries put around it."""
    while (inner := _wrapped(model)) is not None:
        model = inner
    return model


def _wrapped(model: nn.Module) -> nn.Module | None:
    """Return the module that *model* is the wrapper of; `None` if it is none."""
    for home, names in _WRAPPERS.items():
        module = sys.modules.get(home)
        if module is not None and any(isinstance(model, getattr(module, name, ())) for name in names):
            return model.module  # type: ignore[return-value]
    return libraries.inside(model)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model that the user wrote, without what `prepare` put around it.

    Args:
        model: a model, prepared or not.
        keep_fp32_wrapper: leave the mixed-precision forward in place.
        keep_torch_compile: leave a compiled model compiled.
        recursive: unwrap the modules inside too, in place.
    """
    from torch._dynamo.eval_frame import OptimizedModule  # no public name

    from orc.runtime.parallel.precision.forward import unwrap_forward

    compiled: OptimizedModule | None = None
    inner: nn.Module | None = model
    while inner is not None:
        model = inner
        if isinstance(model, OptimizedModule):  # outermost, or what the script compiled before it was prepared
            compiled, inner = model if compiled is None else compiled, model._orig_mod
        else:
            inner = _wrapped(inner)
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if compiled is None or not keep_torch_compile:
        return model
    # Not by replacing what is in it: that one goes on training.
    return compiled if compiled._orig_mod is model else OptimizedModule(model, compiled.dynamo_ctx)


__all__ = [
    "Parallelizer",
    "Request",
    "apply_all",
    "batch_cut",
    "chosen",
    "extract_model_from_parallel",
    "inside",
    "is_flattened",
    "is_sharded",
    "parallelizers",
    "refuse_compression",
    "refuse_unserved",
    "synchronizer_of",
]
