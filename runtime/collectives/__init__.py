"""Collectives over nested structures: flatten once, one packed collective per kind of payload, rebuild.

Every function takes the `RunContext` as its keyword ``ctx``, the current one by default. With one process all of them
return their input.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# A process by itself needs none of them to start.
_HOMES = {
    "any_process": "collectives",
    "broadcast": "collectives",
    "broadcast_object_list": "objects",
    "concatenate": "tree",
    "convert_to_fp32": "tree",
    "find_batch_size": "tree",
    "flatten": "tree",
    "gather": "collectives",
    "gather_for_metrics": "metrics",
    "gather_object": "objects",
    "listify": "tree",
    "pad_across_processes": "collectives",
    "recursively_apply": "tree",
    "reduce": "collectives",
    "send_to_device": "tree",
    "slice_tensors": "tree",
    "unflatten": "tree",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
