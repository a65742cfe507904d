"""Re-exports under a documented path: ``from orc.runtime.big_modeling import dispatch_model``."""

from __future__ import annotations

from orc.runtime.memory.device_map import check_device_map, infer_auto_device_map
from orc.runtime.weights.casting import attach_layerwise_casting_hooks
from orc.runtime.weights.dispatch import cpu_offload, disk_offload, dispatch_model
from orc.runtime.weights.empty_weights import init_empty_weights, init_on_device
from orc.runtime.weights.load_in_model import load_checkpoint_and_dispatch, load_checkpoint_in_model
from orc.runtime.weights.model_offload import cpu_offload_with_hook

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
