"""Re-exports under a documented path: ``from orc.runtime.utils.operations import DistributedOperationException``."""

from __future__ import annotations

from orc.runtime.collectives.collectives import broadcast, gather, pad_across_processes, reduce
from orc.runtime.collectives.objects import broadcast_object_list, gather_object
from orc.runtime.collectives.tree import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from orc.runtime.core.errors import DistributedOperationException
from orc.runtime.parallel.precision.forward import convert_outputs_to_fp32

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
