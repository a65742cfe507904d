"""Collectives over nested structures: flatten once, one packed collective per kind of payload, rebuild.

Every function takes the `RunContext` as its keyword ``ctx``, the current one by default. With one process all of them
return their input.
"""

from __future__ import annotations

from orc.runtime.collectives.collectives import any_process, broadcast, gather, pad_across_processes, reduce
from orc.runtime.collectives.metrics import gather_for_metrics
from orc.runtime.collectives.objects import broadcast_object_list, gather_object
from orc.runtime.collectives.tree import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    flatten,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
    unflatten,
)

__all__ = [
    "any_process",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "flatten",
    "gather",
    "gather_for_metrics",
    "gather_object",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "unflatten",
]
