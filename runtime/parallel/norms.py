"""Norms of gradients: of plain ones, of those that are cut over the processes, and of both together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orc.runtime.parallel.replacements import fate_of
from orc.runtime.parallel.shards import local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def clip_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    sharded: bool,
    over: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of *parameters* down to *max_norm*; returns their total norm before, as a plain tensor.

    *sharded* says that some may be DTensors; then all processes call it. *over*: see `total_norm`.
    """
    if not sharded:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not _alike(gradients):
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        with torch.no_grad():  # the same operations, without torch's looking for groups: half of a small model's time
            norm = _combined(torch._foreach_norm(gradients, norm_type), norm_type)
            torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm
    norm = total_norm(parameters, norm_type, over)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for (device, dtype), gradients in _held(parameters).items():
            torch._foreach_mul_(gradients, factor.to(device, dtype))
    return norm


def clip_values(parameters: Sequence[Tensor], clip_value: float, *, sharded: bool) -> None:
    """Clamp gradients of *parameters* to [-clip_value, clip_value] by element; *sharded* as for `clip_norm`."""
    if not sharded:
        nn.utils.clip_grad_value_(parameters, clip_value)
        return
    with torch.no_grad():
        for parameter in parameters:
            placements = getattr(parameter.grad, "placements", ())
            if any(placement.is_partial() for placement in placements):  # summands of elements that are not there yet
                grad: Any = parameter.grad
                parameter.grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        for gradients in _held(parameters).values():
            torch._foreach_clamp_min_(gradients, -clip_value)
            torch._foreach_clamp_max_(gradients, clip_value)


def _held(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """What this rank holds of the gradients of *parameters*, as plain tensors by device and dtype."""
    held: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_part(parameter.grad)
            held.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return held


def total_norm(parameters: Iterable[Tensor], norm_type: float, over: ProcessGroup | None = None) -> Tensor:
    """Return the norm of all gradients of *parameters* together, over all shards and stages; 0 without gradients.

    *over*: the group whose ranks have other stages; also where this one has none of the parameters.
    """
    # torch's own comes with 2.6, and takes gradients of one mesh only.
    groups: dict[Any, list[Tensor]] = {}
    # By group and device, also without gradients: others of the group may have some.
    noted: dict[tuple[ProcessGroup, torch.device], list[Tensor]] = {}
    device: torch.device | None = None
    for parameter in parameters:
        gradient = parameter.grad
        device = device or parameter.device
        fate = fate_of(parameter)
        if fate.stage is not None:
            over = fate.stage.group
            if not fate.stage.counts:
                continue
        if fate.shards is not None:
            noted.setdefault((fate.shards, parameter.device), []).extend(() if gradient is None else (gradient,))
        elif gradient is not None:
            groups.setdefault((getattr(gradient, "device_mesh", None), gradient.device), []).append(gradient)
    norms = [_whole(_combined(torch._foreach_norm(group, norm_type), norm_type)) for group in groups.values()]
    norms += [_over_group(*place, gradients, norm_type) for place, gradients in noted.items()]
    if not norms:
        norm = torch.tensor(0.0)
    else:
        norm = norms[0] if len(norms) == 1 else _combined([norm.to(norms[0].device) for norm in norms], norm_type)
    return norm if over is None else _summed(norm.float().to(device or norm.device).clone(), over, norm_type)


def _alike(gradients: Sequence[Tensor]) -> bool:
    """Return whether there are *gradients*, all dense, on one device and of one dtype."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    for gradient in gradients:
        if gradient.device != device or gradient.dtype != dtype or gradient.layout != torch.strided:
            return False
    return True


def _over_group(group: ProcessGroup, device: torch.device, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients that the ranks of *group* have parts of, on *device*; collective."""
    held = [gradient for gradient in gradients if gradient.numel()]
    local = torch.zeros((), device=device)
    if held:
        local = _combined(torch._foreach_norm(held, norm_type), norm_type).float().to(device)
    return _summed(local, group, norm_type)


def _summed(local: Tensor, group: ProcessGroup, norm_type: float) -> Tensor:
    """The norm of what the ranks of *group* have together, from that of each, in place; collective."""
    import torch.distributed as dist

    if math.isinf(norm_type):
        dist.all_reduce(local, dist.ReduceOp.MAX, group)
        return local
    local.pow_(norm_type)
    dist.all_reduce(local, group=group)
    return local.pow_(1 / norm_type)


def _combined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


def _whole(norm: Tensor) -> Tensor:
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return full
