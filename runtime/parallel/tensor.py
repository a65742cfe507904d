"""Tensor parallelism: matrices of each layer are cut over the ranks along ``tp``, which share the work of one batch.

The first gradients are looked at: what a plan leaves whole must have the same on all of these ranks.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from orc.runtime.core.errors import ContextError
from orc.runtime.memory.device_map import retie_parameters
from orc.runtime.parallel import sharding
from orc.runtime.parallel.base import Parallelizer, Request, shards_problem
from orc.runtime.parallel.sharding import Missing, agree_on_model, initialize
from orc.runtime.parallel.shards import local_part, spread_over
from orc.runtime.parallel.tensor_plan import cut_dimension, plan_of, styles_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.parallelism import TorchTensorParallelConfig


_APART = 0.05  # of a gradient's norm: far more than rounding, far less than what a rank's part lacks


class TensorParallel(Parallelizer):
    """``torch.distributed.tensor.parallel.parallelize_module`` by the plan of the script or of the model."""

    name = "tensor"
    order = 100
    conflicts: tuple[str, ...] = ("ddp", "xla")
    places_parameters = True
    serves: tuple[str, ...] = ("tp",)

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """With several ranks along ``tp``; for evaluation if there is a plan, for training in any case."""
        if ctx.topology.size("tp") == 1 or not any(True for _ in model.parameters()):
            return False
        return not request.evaluation or plan_of(model, _handler(request)) is not None

    def requires(self, ctx: RunContext) -> str | None:
        """An open process group of the device."""
        return shards_problem(ctx) or super().requires(ctx)

    def check(self, model: nn.Module, ctx: RunContext, request: Request) -> None:
        """Raise for a model that its plan cannot cut, and for options that the device does not have."""
        handler = _handler(request)
        if handler is not None and handler.enable_async_tp and ctx.device.type != "cuda":
            raise ContextError("enable_async_tp needs GPUs that reach each other's memory; leave it out here")
        if not any(_is_cut(parameter) for parameter in model.parameters()):
            _tied(model, styles_of(model, handler, ctx.topology.size("tp")))

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Cut *model* in place, one matrix at a time, with the values of the first rank along ``tp``."""
        from torch.distributed.tensor.parallel import parallelize_module

        handler, size = _handler(request), ctx.topology.size("tp")
        if handler is not None and handler.enable_async_tp:
            _overlap(model, ctx)
        if not request.evaluation:
            _draw_alike(ctx)
        mixed = request.mixed_precision if request.options.get("fsdp") is not None else "no"
        if cut := [parameter for parameter in model.parameters() if _is_cut(parameter)]:
            _adopt(model, cut, ctx, sharding.Trained(model, mixed))
            return model
        styles = styles_of(model, handler, size)
        tied = _tied(model, styles)
        init_fn = getattr(request.options.get("fsdp"), "param_init_fn", None)
        agree_on_model(model, ctx, lambda: initialize(model, init_fn))
        missing = Missing(model)
        trained = sharding.Trained(model, mixed)
        mesh = ctx.topology.submesh("tp")
        for name, style in styles.items():
            module = model.get_submodule(name)
            own = missing.allocate(module.parameters(), ctx.device)
            sharding.place(own, ctx.device, ctx, synchronise=False)
            trained.convert(own)
            # By itself: torch takes a name with a dot apart, and warns where a level is missing.
            parallelize_module(module, mesh, style)
            # What is tied is left until it is cut in all places.
            left = {id(parameter) for parameter in model.parameters()}
            sharding.let_go(parameter for parameter in own if id(parameter) not in left)
        retie_parameters(model, tied)
        whole = [tensor for tensor in (*model.parameters(), *model.buffers()) if not _is_cut(tensor)]
        whole = missing.allocate(whole, ctx.device)
        sharding.place(whole, ctx.device, ctx, synchronise=True, dims=("tp",))
        trained.convert(whole)
        return model

    def check_gradients(self, model: nn.Module, ctx: RunContext) -> bool:
        """Refuse a plan that leaves something whole whose gradients are those of parts."""
        return refuse_partial(model, ctx)


def _handler(request: Request) -> TorchTensorParallelConfig | None:
    handler: TorchTensorParallelConfig | None = request.options.get("tp")
    return handler


def _is_cut(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _adopt(model: nn.Module, cut: Iterable[Any], ctx: RunContext, trained: sharding.Trained) -> None:
    """Put parameters that came cut (Transformers) on the mesh of the run, of which FSDP then takes another dimension.

    Raises:
        ContextError: they are cut over other ranks than those along ``tp``.
    """
    from torch.distributed.tensor import DTensor

    mesh = ctx.topology.submesh("tp")
    for parameter in cut:
        theirs = parameter.device_mesh
        if theirs.ndim != 1 or theirs.mesh.tolist() != mesh.mesh.tolist():
            raise ContextError(
                f"the model came cut over the ranks {theirs.mesh.tolist()}, and {ctx.topology.by} puts "
                f"{mesh.mesh.tolist()} along tp: load it with the same tp_size, or whole, and prepare cuts it"
            )
    new: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and isinstance(old, DTensor):
                if old not in new:
                    local = DTensor.from_local(
                        old.to_local().to(trained.dtype(old)),
                        mesh,
                        old.placements,
                        run_check=False,
                        shape=old.shape,
                        stride=old.stride(),
                    )
                    new[old] = nn.Parameter(local.detach(), requires_grad=old.requires_grad)
                module._parameters[name] = new[old]


def _tied(model: nn.Module, styles: dict[str, ParallelStyle]) -> list[list[str]]:
    """Return names of weights that are one and will be cut; *styles* gets what those need that no plan names.

    Raises:
        ContextError: a weight would be cut in one place and whole, or cut otherwise, in another.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    groups = []
    for group in names.values():
        owners = [name.rpartition(".")[0] for name in group]
        if len(group) == 1 or not any(owner in styles for owner in owners):
            continue
        wanted = {cut_dimension(model.get_submodule(name), styles[name]) for name in owners if name in styles}
        for owner in owners:
            if owner not in styles and wanted == {0} and isinstance(model.get_submodule(owner), nn.Embedding):
                styles[owner] = RowwiseParallel(input_layouts=Replicate())
        if len(wanted) > 1 or any(owner not in styles for owner in owners):
            raise ContextError(
                f"{' and '.join(group)} are one weight, and the plan cuts it in one place only, or in two ways: name "
                "all of them in the plan, with styles that cut it along the same side, or untie them"
            )
        groups.append(group)
    return groups


def _draw_alike(ctx: RunContext) -> None:
    """Let the ranks along ``tp`` draw the same random numbers: they must drop the same of what all of them have."""
    sources: list[Any] = [torch] if ctx.device.type == "cpu" else [torch, getattr(torch, ctx.device.type)]
    states = [source.get_rng_state() for source in sources]
    sharding.place(states, ctx.device, ctx, synchronise=True, dims=("tp",))
    for source, state in zip(sources, states, strict=True):
        source.set_rng_state(state.cpu())


def _overlap(model: nn.Module, ctx: RunContext) -> None:
    """Let compiled models overlap exchanges along ``tp`` with the products around them, as long as *model* lives.

    Raises:
        ContextError: this torch cannot.
    """
    import torch._inductor.config as inductor

    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    except ImportError:
        raise ContextError("enable_async_tp needs torch 2.6 or newer; leave it out") from None
    mesh: DeviceMesh = ctx.topology.submesh("tp")
    weakref.finalize(model, setattr, inductor, "_micro_pipeline_tp", inductor._micro_pipeline_tp)
    inductor._micro_pipeline_tp = True  # of the whole process: torch has no other way for both passes
    enable_symm_mem_for_group(mesh.get_group().group_name)


@torch.no_grad()
def refuse_partial(model: nn.Module, ctx: RunContext) -> bool:
    """Compare the gradients of what is not cut along ``tp``; collective over all ranks of the run.

    A parameter that is used on activations that are cut gets the gradient of one rank's part of them, and its copies
    drift apart silently.

    Returns:
        `False` where there are no finite gradients yet to compare.

    Raises:
        ContextError: they differ; the same on every rank.
    """
    group = ctx.topology.group("tp")
    assert group is not None
    whole = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "tp" not in spread_over([parameter])
    ]
    if not whole:
        return True
    first = dist.get_global_rank(group, 0)
    partial = []
    for _, parameter in whole:
        gradient = local_part(parameter if parameter.grad is None else parameter.grad).float()
        if parameter.grad is None:
            gradient = torch.zeros_like(gradient)
        theirs = gradient.clone(memory_format=torch.contiguous_format)
        dist.broadcast(theirs, first, group)
        partial.append(torch.stack([(gradient - theirs).norm(), theirs.norm()]))
    norms = torch.stack(partial)
    dist.all_reduce(norms, dist.ReduceOp.MAX, ctx.require_group("tensor parallelism"))
    apart, size = norms.double().cpu().unbind(1)
    total = float(size.norm())
    if not 0 < total < float("inf"):
        return False
    wrong = [
        name for (name, _), bad in zip(whole, (apart > _APART * size) & (apart > 1e-6 * total), strict=True) if bad
    ]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ContextError(
            f"tensor parallelism: the processes along tp have different gradients of {shown}, which the plan leaves "
            "whole: they are used on activations that are cut. Name their modules in the plan: "
            "'replicated_with_grad_allreduce' for a norm over each head, 'colwise' or 'rowwise' for a matrix, or a "
            "ParallelStyle of your own"
        )
    return True


PARALLELIZER = TensorParallel()
