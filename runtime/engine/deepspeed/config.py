"""DeepSpeed's configuration: read from a file, a dictionary or text, and looked up by dotted paths. Torch-free."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orc.runtime.core.parsing import nearest

AUTO = "auto"

# First level of DeepSpeed's configuration; it ignores anything else without a word.
KNOWN = frozenset((
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet",
    "comms_config", "comms_logger", "communication_data_type", "compile", "compression_training", "csv_monitor",
    "curriculum_learning", "data_efficiency", "data_parallel_size", "data_types", "dataloader_drop_last",
    "datastates_ckpt", "ddp_bf16", "disable_allgather", "disable_python_gc", "dump_state", "eigenvalue",
    "elasticity", "expert_parallel", "flops_profiler", "fp16", "fp32_allreduce", "gradient_accumulation_steps",
    "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting", "hybrid_engine",
    "load_universal_checkpoint", "local_rank", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "monitor_config", "mp_size", "nebula", "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop",
    "quantize_training", "scheduler", "seq_parallel_communication_data_type", "sequence_parallel_size",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers",
    "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism",
    "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization", "writer",
    "zero_allow_untested_optimizer", "zero_allow_untested_optimizers", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
))  # fmt: skip


class HfDeepSpeedConfig:
    """DeepSpeed configuration with access by dotted paths: ``config.get_value("zero_optimization.stage")``.

    Args:
        config_file_or_dict: the path of a JSON file, a dictionary (which is copied), or JSON in base64.

    Attributes:
        config: the configuration, a nested dictionary.
        mismatches: empty; for those who collect what does not agree with other settings.

    Raises:
        ValueError: there is no such file, it is no JSON object, or it has keys that DeepSpeed does not know.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.mismatches: list[str] = []
        unknown = [key for key in self.config if key not in KNOWN and not str(key).startswith("_")]
        if unknown:
            near = [f"{key!r}{nearest(str(key), KNOWN)}" for key in unknown]
            raise ValueError(f"the DeepSpeed configuration has keys that DeepSpeed does not know: {'; '.join(near)}")
        for section in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
            if not isinstance(self.config.get(section, {}), dict):
                raise ValueError(f"the DeepSpeed configuration's {section} is {self.config[section]!r}, not a section")

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section that holds *ds_key_long* (`None` if there is none) and the last part of its path."""
        *sections, key = ds_key_long.split(".")
        node: Any = self.config
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value at *ds_key_long*, or *default*."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def set_value(self, ds_key_long: str, value: Any) -> None:
        """Put *value* at *ds_key_long*; sections that are missing are made."""
        *sections, key = ds_key_long.split(".")
        node = self.config
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove what is at *ds_key_long*. Raises `ValueError` when it *must_exist* and does not."""
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no {ds_key_long}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether the value is ``auto``.

        Args:
            ds_key_long: the key with dots between sections, as in ``zero_optimization.stage``.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether the value is there and true.

        Args:
            ds_key_long: the key with dots between sections.
        """
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether the value is there and false.

        Args:
            ds_key_long: the key with dots between sections.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Return whether ZeRO's stage is 2."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether ZeRO's stage is 3."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether anything is offloaded to the CPU or to NVMe."""
        kinds = (self.get_value(f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param"))
        return any(kind in ("cpu", "nvme") for kind in kinds)

    def autos(self) -> Iterator[str]:
        """Yield the paths of all values that are ``auto``."""
        yield from _autos(self.config, "")


def _autos(section: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"


def _read(source: Any) -> dict[str, Any]:
    if isinstance(source, HfDeepSpeedConfig):
        return copy.deepcopy(source.config)
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"a DeepSpeed configuration is the path of a JSON file, a dictionary or JSON in base64, not {source!r}"
        )
    where = str(source)
    try:
        content = Path(source).read_bytes()
    except (OSError, ValueError) as error:  # a long text is no path
        try:
            content = base64.b64decode(
                where.encode(), altchars=b"-_" if set(where) & set("-_") else None, validate=True
            )
            if not content.lstrip().startswith(b"{"):
                raise ValueError
        except (ValueError, binascii.Error):
            raise ValueError(
                f"the DeepSpeed configuration {where[:200]!r} cannot be read: expected the path of a JSON file, a "
                f"dictionary or JSON in base64 ({type(error).__name__}: {getattr(error, 'strerror', None) or error})"
            ) from None
        where = "in base64"
    try:
        config = json.loads(content, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"the DeepSpeed configuration {where} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"the DeepSpeed configuration {where} holds {type(config).__name__}, not an object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return dict(pairs)
