"""Megatron-LM on CPUs over gloo: the one place that changes anything in the library, and only there.

`megatron.core` allocates its buffers on "the current CUDA device" in a handful of modules, with no option to say
another one. Each of those modules has a name ``torch``; on a machine that trains on CPUs it is given a view of torch
that allocates in host memory instead. The module ``torch`` itself, and everybody else's ``torch.cuda``, stay as they
are. Three functions that test for a CUDA tensor by its type's name cannot be reached this way: gradients are clipped by
a function of ours here, random numbers of tensor parallel regions come from a tracker of ours, and the distributed
optimizer and training in half precision, which test parameters so, are refused on CPUs (`rules`).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

_MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "utils",
)
_ALLOCATING = ("empty", "ones", "tensor", "zeros")
REGION = "model-parallel-rng"  # as Megatron-LM names the random numbers that differ between tensor parallel processes


class _Cuda:
    """View of ``torch.cuda`` whose current device is the CPU."""

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: work on a CPU is done when its call returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """View of torch that allocates on the CPU what is requested on a CUDA device."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _allocating(name: str) -> Any:
    make = getattr(torch, name)

    def allocate(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return make(*args, device=device, **kwargs)

    return allocate


class RegionRandom:
    """Tracker of random numbers: inside `fork` those of a region, which go on where they stopped.

    It stands for Megatron-LM's own tracker, whose states are those of CUDA generators.
    """

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        """Return that it needs no more: `add` gives it the states."""
        return True

    def add(self, name: str, seed: int) -> None:
        """Begin the region *name* with *seed*."""
        self.states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = REGION) -> Iterator[None]:
        """Draw from the region *name* inside the block."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def _clip(parameters: Iterable[Any], max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    """Scale the gradients of *parameters*, whose norm is *total_norm*, down to *max_norm*."""
    factor = max_norm / (total_norm + 1e-6)
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def name_types(parameters: Iterable[Any]) -> None:
    """Let each of *parameters* name its type as that of a CUDA tensor, as Megatron-LM's optimizers look for it."""
    for parameter in parameters:
        parameter.type = _NamedType(parameter)


class _NamedType:
    """Method ``type`` of a parameter: its type's name is that on CUDA; converting is that of tensors."""

    def __init__(self, parameter: Any) -> None:
        self._convert = parameter.type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._convert(*args, **kwargs)
        return made.replace("torch.", "torch.cuda.", 1) if isinstance(made, str) else made


def adapt() -> RegionRandom:
    """Let `megatron.core` work in this process's host memory from now on; returns its source of random numbers."""
    view = _Torch("torch")
    for name in _ALLOCATING:
        setattr(view, name, _allocating(name))
    modules: dict[str, Any] = {name: importlib.import_module(f"megatron.core.{name}") for name in _MODULES}
    for module in modules.values():
        module.torch = view
    modules["optimizer.optimizer"].clip_grad_by_total_norm_fp32 = _clip
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not isinstance(random._CUDA_RNG_STATE_TRACKER, RegionRandom):
        random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = RegionRandom(), True
    tracker: RegionRandom = random._CUDA_RNG_STATE_TRACKER
    return tracker
