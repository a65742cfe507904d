"""The collective whose size no process decides alone: all send as many bytes, whatever they bring.

gloo ends a process that is sent more than it expects. So what processes send to each other is never as long as *their*
operand, which may differ: they send what all of them have room for, and in front of it a fingerprint of the operand and
its length. Who sees other fingerprints than its own knows that all see it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

_HEAD = 16  # bytes: fingerprint and length, two int64
_LEAST = 240
SMALL_BYTES = 1 << 16
# Bytes that there is room for, equal on all processes: it follows from what they all have seen.
_capacity: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


@lru_cache(maxsize=256)
def fingerprint(operation: str, key: Any) -> int:
    """Return a number that stands for *operation* with operands of *key*, the same in every process."""
    digest = hashlib.blake2b(repr((operation, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exchange(ctx: RunContext, what: str, mark: int, payload: Tensor | None = None) -> Tensor | None:
    """Return the payloads of all processes, uint8 ``[world, length]``; `None`, on all, unless their *mark* is the same.

    Args:
        ctx: the process context.
        what: the operation, for errors.
        mark: the fingerprint of this process's operand; it determines the length of the payload.
        payload: uint8, on the CPU; nothing, to agree about the operand alone.
    """
    if ctx.hosts_meet:
        group, device = ctx.control_group(what), torch.device("cpu")
    else:
        group, device = ctx.require_group(what), ctx.control_device
    length = 0 if payload is None else payload.numel()
    capacity = _capacity.get(ctx, _LEAST)
    while True:
        mine = torch.empty(_HEAD + capacity, dtype=torch.uint8)
        mine[:_HEAD].view(torch.int64).copy_(torch.tensor([mark, length]))
        if payload is not None and length <= capacity:
            mine[_HEAD : _HEAD + length] = payload
        rows = torch.empty(ctx.world_size * mine.numel(), dtype=torch.uint8, device=device)
        all_gather_flat(rows, mine.to(device), group)
        rows = rows.view(ctx.world_size, -1)
        marks = rows[:, :8].contiguous().view(torch.int64).view(-1).tolist()
        if any(other != mark for other in marks):
            return None
        if length <= capacity:
            if capacity > _LEAST and length < capacity // 4:
                _capacity[ctx] = max(_LEAST, capacity // 2)  # one large operand does not make all later ones large
            return rows[:, _HEAD : _HEAD + length]
        capacity = _capacity[ctx] = -(-length // 256) * 256


def all_gather_flat(result: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """*mine* of all processes, one behind the other, in *result*."""
    # torch 2.13 renamed it and warns about the name that earlier releases have.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(result, mine, group)
