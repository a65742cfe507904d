"""Parallelizers: each turns a model into a parallel one, in the order they state.

A new one is a module here with an attribute ``PARALLELIZER``, named in `_MODULES`; nothing else changes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from orc.runtime.core.errors import ContextError
from orc.runtime.core.topology import DATA_DIMENSIONS, DIMENSIONS, LOSS_DIMENSIONS
from orc.runtime.parallel.base import ChecksModels, CutsBatches, Parallelizer, Request
from orc.runtime.parallel.replacements import named_parameters, replaced
from orc.runtime.parallel.shards import spread_over

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.model_handlers import DistributedDataParallelKwargs

_MODULES = ("context", "ddp", "fsdp1", "fsdp2", "library", "pp", "replicas", "sequence", "tensor", "xla")


@cache
def parallelizers() -> tuple[Parallelizer, ...]:
    """Every parallelizer of this installation, in the order in which they apply."""
    known = [importlib.import_module(f"{__name__}.{name}").PARALLELIZER for name in _MODULES]
    return tuple(sorted(known, key=lambda parallelizer: parallelizer.order))


def chosen(model: nn.Module, ctx: RunContext, request: Request) -> list[Parallelizer]:
    """Return the parallelizers that *ctx* and *request* call for, in their order; none for a model that is sharded.

    Raises:
        ContextError: one that was called for cannot work here, or not with another; the same on all processes.
    """
    if is_sharded(model) and not _only_part(model, ctx):
        return []
    wanted = [parallelizer for parallelizer in parallelizers() if parallelizer.wanted(model, ctx, request)]
    asked = [one for one in wanted if not one.default]
    wanted = [one for one in wanted if not (one.default and any(_conflict(one, other) for other in asked))]
    names = {one.name for one in wanted}
    for one in wanted:
        if reason := one.requires(ctx):
            raise ContextError(f"strategy {one.name} cannot be used here: {reason}")
        if missing := [name for name in one.needs if name not in names]:
            raise ContextError(f"strategy {one.name} works only together with {' and '.join(missing)}")
        if clash := next((other for other in wanted if other is not one and _conflict(one, other)), None):
            raise ContextError(f"the strategies {one.name} and {clash.name} cannot be used together; choose one")
    for one in wanted:
        if isinstance(one, ChecksModels):
            one.check(model, ctx, request)
    if not request.evaluation:
        refuse_unserved(ctx, {dim for one in wanted for dim in one.serves})
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
    cuts = [
        parallelizer.batch_cut(ctx, options)
        for parallelizer in parallelizers()
        if isinstance(parallelizer, CutsBatches)
    ]
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
    # Where their modules are not loaded, or another thread is loading them, there are none.
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is not None and any(isinstance(module, wrapper) for module in model.modules()):
        return True
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor is not None and any(isinstance(parameter, tensor) for parameter in model.parameters())


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
            inner = next(
                (
                    unwrapped
                    for parallelizer in parallelizers()
                    if (unwrapped := parallelizer.unwrap(inner)) is not None
                ),
                None,
            )
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
    "is_sharded",
    "parallelizers",
    "refuse_compression",
    "refuse_unserved",
]
