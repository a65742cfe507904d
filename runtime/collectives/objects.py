"""Collectives of arbitrary picklable objects: pickles that the ranks sign with the run's key; no other is unpickled.

A pickle may run code when it is read, and neither gloo nor NCCL knows who is at the other end.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
from mmap import mmap
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from orc.runtime.collectives.exchange import all_gather_flat
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.core.errors import ContextError

TAG = 32  # bytes in front of a signed content
_HEAD = 8  # bytes: the length of what follows, an int64
_FIRST_CAPACITY = 1 << 10
# Bytes that a process sends at once, equal on all processes: what the largest object of the last call needed.
_capacity: WeakKeyDictionary[RunContext, int] = WeakKeyDictionary()


def tag_of(content: bytes | memoryview | mmap, key: bytes) -> bytes:
    """The tag of *content*."""
    return hmac.new(key, content, hashlib.sha256).digest()  # `hmac.digest` takes no more than 2 GiB


def sign(content: bytes, key: bytes) -> bytes:
    """*content* behind its tag."""
    return tag_of(content, key) + content


def verified(message: bytes | memoryview, key: bytes) -> memoryview:
    """The content of what `sign` has made, in the memory of *message*. Raises `ContextError` for anything else."""
    tag, content = bytes(message[:TAG]), memoryview(message)[TAG:]
    if not hmac.compare_digest(tag, tag_of(content, key)):
        raise ContextError(
            "a message that should come from a rank of this run was not signed by one; it was not read. Ranks that "
            "were not started together have different keys, or somebody else on the network writes to this run's ports"
        )
    return content


def gather_object(object: Any, *, ctx: RunContext | None = None) -> Any:
    """Return the objects of all processes in one list, in order of rank, on every process.

    Lists and tuples are joined: ``["a"]`` and ``["b"]`` become ``["a", "b"]``. Other objects become the elements.
    With one process the object is returned as it is. Objects are pickled, so tensors are better gathered with `gather`.

    Args:
        ctx: the run; the current one unless given.
    """
    ctx = ctx or current_context()
    if ctx.world_size == 1:
        return object
    everything = all_gather_pickled(object, ctx)
    if all(isinstance(part, (list, tuple)) for part in everything):
        return [element for part in everything for element in part]
    return everything


def all_gather_pickled(object: Any, ctx: RunContext, what: str = "gather_object") -> list[Any]:
    """The objects of all processes: one collective while none is larger than those of the last call, two otherwise."""
    group = ctx.require_group(what)
    pickled = pickle.dumps(object, protocol=pickle.HIGHEST_PROTOCOL)
    tag, length = tag_of(pickled, ctx.key), TAG + len(pickled)
    capacity = _capacity.get(ctx, _FIRST_CAPACITY)
    while True:
        mine = torch.empty(capacity, dtype=torch.uint8, device="cpu")  # also where a script has another default
        view = memoryview(cast(Any, mine.numpy()))
        view[:_HEAD] = length.to_bytes(_HEAD, "little")
        if _HEAD + length <= capacity:
            view[_HEAD : _HEAD + TAG] = tag
            view[_HEAD + TAG : _HEAD + length] = pickled
        rows = torch.empty(ctx.world_size * capacity, dtype=torch.uint8, device=ctx.control_device)
        all_gather_flat(rows, mine.to(ctx.control_device), group)
        received = [memoryview(row.numpy()) for row in rows.cpu().view(ctx.world_size, capacity)]
        sizes = [int.from_bytes(row[:_HEAD], "little") for row in received]
        needed = _HEAD + max(sizes)
        enough = needed <= capacity
        # With room for a little more, in steps, so that objects of about one size keep needing one collective.
        capacity = max(_FIRST_CAPACITY, -(-(needed + needed // 8) // 256) * 256)
        if enough:
            _capacity[ctx] = capacity
            contents = [  # all of them verified before the first is read
                pickled if rank == ctx.rank else verified(row[_HEAD : _HEAD + size], ctx.key)
                for rank, (row, size) in enumerate(zip(received, sizes, strict=True))
            ]
            return [pickle.loads(content) for content in contents]  # noqa: S301 - signed


def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, ctx: RunContext | None = None) -> list[Any]:
    """Fill the list of every process, in place, with the objects of *from_process*; returns the list.

    All lists must have the same length.

    Args:
        object_list: objects that can be pickled.
        ctx: the run; the current one unless given.
    """
    ctx = ctx or current_context()
    if ctx.world_size > 1 and not ctx.mirrored:
        group = ctx.require_group("broadcast_object_list")
        sends = ctx.rank == from_process
        pickled = sign(pickle.dumps(list(object_list), protocol=pickle.HIGHEST_PROTOCOL), ctx.key) if sends else b""
        size = torch.tensor([len(pickled)], device=ctx.control_device)
        dist.broadcast(size, from_process, group)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if sends:
            data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        data = data.to(ctx.control_device)
        dist.broadcast(data, from_process, group)
        if not sends:
            object_list[:] = pickle.loads(verified(memoryview(cast(Any, data.cpu().numpy())), ctx.key))  # noqa: S301 - signed
    return object_list
