"""The documented file names of a checkpoint."""

from __future__ import annotations

import re

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
CUSTOM_NAME = "custom_checkpoint"
FSDP_MODEL_NAME = "pytorch_model_fsdp"
SHARD_METADATA = ".metadata"
MARK_PREFIX = ".orc-shared-"  # of files by which machines find out that they share a directory
MARK = re.compile(re.escape(MARK_PREFIX) + r"[0-9a-f]{16}-\d+")  # what a process that died while looking may leave
# Folders of shards: of a model, of an optimizer; without a number DeepSpeed's, of both.
SHARDS = re.compile(r"(?:pytorch_model|pytorch_model_fsdp|optimizer)_\d+|pytorch_model")
SHARD = re.compile(r"((?:pytorch_model|optimizer)_\d+)/__\d+_\d+\.distcp")
RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
WEIGHTS_NAME = "pytorch_model.bin"
SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"


def numbered(name: str, index: int, suffix: str) -> str:
    """``optimizer.bin`` for the first, ``optimizer_1.bin`` for the second, and so on."""
    return f"{name}.{suffix}" if index == 0 else f"{name}_{index}.{suffix}"


def model_file(index: int, safe: bool = True) -> str:
    """The weights of model *index*."""
    return numbered(SAFE_MODEL_NAME, index, "safetensors") if safe else numbered(MODEL_NAME, index, "bin")


def random_states_file(rank: int) -> str:
    """The generators of *rank*."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_file(index: int) -> str:
    """Registered object *index*."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def model_shards(index: int) -> str:
    """Folder of the shards of model *index*."""
    return f"{MODEL_NAME}_{index}"


def optimizer_shards(index: int) -> str:
    """Folder of the shards of optimizer *index*."""
    return f"{OPTIMIZER_NAME}_{index}"


def shard_file(folder: str, rank: int) -> str:
    """The shards in *folder* that *rank* writes."""
    return f"{folder}/__{rank}_0.distcp"


def shard_metadata(folder: str) -> str:
    """Return the file of *folder* that lists its shards."""
    return f"{folder}/{SHARD_METADATA}"
