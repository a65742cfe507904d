"""``torch_xla.core.xla_model``."""

import torch
import torch.distributed as dist

from torch_xla import note, sync, world

_seed = 0


def mark_step(wait=False, reset_scope=True):
    sync()


def all_reduce(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True):
    note("all_reduce", reduce_type, scale)
    assert reduce_type == "sum"
    result = inputs.clone()
    if world() > 1:
        dist.all_reduce(result)
    return result * scale if scale != 1.0 else result


def all_gather(value, dim=0, groups=None, output=None, pin_layout=True, channel_id=None, use_global_device_ids=None):
    note("all_gather", tuple(value.shape))
    parts = [torch.empty_like(value) for _ in range(world())]
    dist.all_gather(parts, value.contiguous())
    return torch.cat(parts, dim)


def collective_broadcast(tensors, root_ordinal=0, groups=None, pin_layout=True):
    note("collective_broadcast", root_ordinal)
    for tensor in tensors:
        dist.broadcast(tensor, root_ordinal)


def broadcast_master_param(model):
    note("broadcast_master_param")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor, 0)


def reduce_gradients(optimizer, groups=None, pin_layout=True):
    note("reduce_gradients")
    if world() > 1:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world()


def optimizer_step(optimizer, barrier=False, optimizer_args={}, groups=None, pin_layout=True):  # noqa: B006
    note("optimizer_step", barrier)
    reduce_gradients(optimizer)
    loss = optimizer.step(**optimizer_args)
    if barrier:
        mark_step()
    return loss


def set_rng_state(seed, device=None):
    global _seed
    note("set_rng_state", seed)
    _seed = seed


def get_rng_state(device=None):
    return _seed
