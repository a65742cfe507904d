"""Sharded models: how one is recognised, and the names that its parameters have whatever is wrapped around them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.parallel import extract_model_from_parallel
from orc.runtime.parallel import is_sharded as has_shards
from orc.runtime.parallel.parts import parts_of

# What compiling, checkpointing of activations and FSDP 1 put between a module's name and its children's.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def is_sharded(model: nn.Module) -> bool:
    """Return whether each process holds a part of *model* alone: DTensor parameters, FSDP version 1, or stages."""
    return has_shards(model) or is_fsdp1(model) or parts_of(model) is not None


def gathers_state(one: object) -> bool:
    """Return whether the ``state_dict`` of *one*, a model or optimizer, is gathered: all processes call it together."""
    return bool(getattr(one, "gathers_state", False))


def is_dtensor(value: object) -> bool:
    """Return whether *value* is a DTensor; torch's module of them is not imported for the question."""
    found = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # another thread may be loading it
    return found is not None and isinstance(value, found)


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether *model* or a part of it is wrapped by `torch.distributed.fsdp.FullyShardedDataParallel`."""
    found = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return found is not None and any(isinstance(module, found) for module in model.modules())


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside a prepared one."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def has_sharded_parameters(optimizer: Any) -> bool:
    """Return whether *optimizer* steps DTensors."""
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())
    return any(is_dtensor(one) for group in groups for one in group["params"])


def models_of(optimizer: Any, models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of *models* whose parameters *optimizer* steps, in their order."""
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())  # an optimizer of the script may have none
    stepped = {id(one) for group in groups for one in group["params"]}
    return [model for model in models if any(id(one) in stepped for one in model.parameters())]


def parameter_names(models: Iterable[nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its ``id``, as in the model that the script wrote.

    With several models their number stands before the name. A parameter that several modules share has its first name.
    """
    bare = [extract_model_from_parallel(model, keep_torch_compile=False) for model in models]
    names: dict[int, str] = {}
    for number, model in enumerate(bare):
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), (f"{number}." if len(bare) > 1 else "") + _WRAPPERS.sub("", name))
    return names


def named_state(optimizer: Any, models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the state of *optimizer* by names of parameters instead of their positions.

    Raises:
        CheckpointError: a parameter is of none of *models*.
    """
    bare = bare_optimizer(optimizer)
    names = names_by_position(bare, models)
    state = bare.state_dict()
    return {
        "state": {names[position]: values for position, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[position] for position in group["params"]]} for group in state["param_groups"]
        ],
    }


def positioned_state(optimizer: Any, models: Sequence[nn.Module], named: dict[str, Any]) -> dict[str, Any]:
    """Return what `named_state` has given as the optimizer's ``load_state_dict`` takes it.

    Raises:
        CheckpointError: the parameter groups are others.
    """
    bare = bare_optimizer(optimizer)
    names = names_by_position(bare, models)
    positions = {name: position for position, name in names.items()}
    groups, first = [], 0
    if len(named["param_groups"]) != len(bare.param_groups):
        raise CheckpointError(
            f"it has {len(named['param_groups'])} parameter groups, the optimizer here has {len(bare.param_groups)}"
        )
    for number, (saved, here) in enumerate(zip(named["param_groups"], bare.param_groups, strict=True)):
        mine = list(range(first, first + len(here["params"])))
        first += len(mine)
        if differing := {names[one] for one in mine} ^ set(saved["params"]):
            raise CheckpointError(f"parameter group {number} has other parameters: {', '.join(sorted(differing))}")
        groups.append({**saved, "params": mine})
    state = {positions[name]: values for name, values in named["state"].items()}
    return {"state": state, "param_groups": groups}


def names_by_position(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the names of the parameters of *optimizer* by their positions in its ``state_dict``."""
    names = parameter_names(models)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    unknown = [list(one.shape) for one in parameters if id(one) not in names]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps {len(unknown)} parameters of no prepared model (shapes "
            f"{', '.join(map(str, unknown[:4]))}): what it steps must be prepared with it, and after a model was "
            "sharded the optimizer needs its new parameters"
        )
    return {position: names[id(parameter)] for position, parameter in enumerate(parameters)}
