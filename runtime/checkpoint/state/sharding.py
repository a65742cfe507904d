"""Optimizers of prepared models: whose parameters they step, and the names that these have whatever is around them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.prepared import Layout, PreparedModel

# What compiling, checkpointing of activations and FSDP 1 put between a module's name and its children's.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def gathers_state(optimizer: object) -> bool:
    """Return whether the ``state_dict`` of *optimizer* is gathered: all processes call it together."""
    return bool(getattr(optimizer, "gathers_state", False))


def is_dtensor(value: object) -> bool:
    """Return whether *value* is a DTensor; torch's module of them is not imported for the question."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # another thread may be loading it
    return kind is not None and isinstance(value, kind)


def flattened(models: Sequence[PreparedModel]) -> bool:
    """Return whether only torch itself can name the parameters of one of *models*."""
    return any(model.layout is Layout.FLATTENED for model in models)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside a prepared one."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def has_sharded_parameters(optimizer: Any) -> bool:
    """Return whether *optimizer* steps DTensors."""
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())
    return any(is_dtensor(parameter) for group in groups for parameter in group["params"])


def models_of(optimizer: Any, models: Sequence[PreparedModel]) -> list[PreparedModel]:
    """Return those of *models* whose parameters *optimizer* steps, in their order."""
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())  # an optimizer of the script may have none
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return [model for model in models if any(id(parameter) in stepped for parameter in model.model.parameters())]


def parameter_names(models: Sequence[PreparedModel]) -> dict[int, str]:
    """Return the name of each parameter by its ``id``, as in the model that the script wrote.

    With several models their number stands before the name. A parameter that several modules share has its first name.
    """
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.bare.named_parameters():
            names.setdefault(id(parameter), (f"{number}." if len(models) > 1 else "") + _WRAPPERS.sub("", name))
    return names


def named_state(optimizer: Any, models: Sequence[PreparedModel]) -> dict[str, Any]:
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


def positioned_state(optimizer: Any, models: Sequence[PreparedModel], named: dict[str, Any]) -> dict[str, Any]:
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


def names_by_position(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel]) -> dict[int, str]:
    """Return the names of the parameters of *optimizer* by their positions in its ``state_dict``."""
    names = parameter_names(models)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = [list(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps {len(unknown)} parameters of no prepared model (shapes "
            f"{', '.join(map(str, unknown[:4]))}): what it steps must be prepared with it, and after a model was "
            "sharded the optimizer needs its new parameters"
        )
    return {position: names[id(parameter)] for position, parameter in enumerate(parameters)}
