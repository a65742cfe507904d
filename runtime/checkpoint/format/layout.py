"""The documented file names of a checkpoint."""

from __future__ import annotations

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
CUSTOM_NAME = "custom_checkpoint"
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
