"""Optimizers over models of FSDP version 1, whose flat parameters only torch itself can name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.prepared import PreparedModel


def optimizer_state(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel], full: bool = False) -> Any:
    """Return the state of *optimizer* by names, sharded, or whole on rank 0's CPU with *full*; on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    fresh = not optimizer.state
    with _unheard(optimizer):
        options = whole(models) if full else StateDictOptions()
        state = get_optimizer_state_dict(_one(models), optimizer, options=options)
    if fresh:  # torch has taken a step to make one, which is none of the training's
        optimizer.state.clear()
        state = {**state, "state": {}}
    return state


def whole(models: Sequence[PreparedModel]) -> Any:
    """Return torch's options for the whole state of *models*: on rank 0's CPU alone, where they are not on the CPU."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    # torch's way to the CPU fails for what is there already.
    elsewhere = any(parameter.device.type != "cpu" for model in models for parameter in model.model.parameters())
    return StateDictOptions(full_state_dict=True, cpu_offload=elsewhere)


def load_optimizer(
    folder: Path, metadata: Any, optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel]
) -> None:
    """Read the shards in *folder* into *optimizer*, on every rank.

    Raises:
        CheckpointError: they cannot be read, or do not fit.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from orc.runtime.checkpoint.state.shard_files import plan_of, read_shards

    model = _one(models)
    with _unheard(optimizer), _without_gradients(optimizer):
        state = get_optimizer_state_dict(model, optimizer)
    if not any(name.startswith("optimizer.state.") for name in metadata.state_dict_metadata):
        state = {**state, "state": {}}  # it was saved before the first step
    try:
        planner, plan = plan_of({"optimizer": state}, metadata)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit the prepared optimizer: {error}") from error
    read_shards(folder, metadata, planner, plan)
    load_named(optimizer, models, state)


def load_named(
    optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel], state: Any, full: bool = False
) -> None:
    """Load *state*, which goes by names, on every rank: each has its shards of it, or all of it with *full*."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if not state["state"]:
        optimizer.state.clear()
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        return
    with _unheard(optimizer), _without_gradients(optimizer):
        options = StateDictOptions(full_state_dict=full)
        set_optimizer_state_dict(_one(models), optimizer, state, options=options)


def _one(models: Sequence[PreparedModel]) -> torch.nn.Module:
    if len(models) != 1:
        raise CheckpointError(
            f"an optimizer steps parameters of {len(models)} models: with FSDP version 1 each model needs its own "
            "optimizer; version 2 has no such limit"
        )
    return models[0].model


@contextmanager
def _unheard(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block steps call no hooks: torch makes the state by a step without gradients.

    Nor does torch warn of functions of its own that are to go and that its gathering still calls.
    """
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = type(before[0])(), type(before[1])()
    try:
        with warnings.catch_warnings():
            for text in ("`_get_pg_default_device` will be deprecated", "Multiple backends are registered"):
                warnings.filterwarnings("ignore", text, UserWarning)
            yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block no parameter has a gradient: torch would take them for those of a step under way."""
    kept = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def numbered(named: Any, models: Sequence[PreparedModel], keep: bool) -> dict[str, Any]:
    """Return the whole state *named* by positions, as an optimizer over the same parameters without FSDP has it.

    Every rank calls it; without *keep* it is empty.
    """
    order = {name: place for place, name in enumerate(_order(models))}
    if not (named and keep):
        return {}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in named["param_groups"]:
        names = sorted(group["params"], key=order.__getitem__)
        first = sum(len(group["params"]) for group in groups)
        groups.append({**group, "params": list(range(first, first + len(names)))})
        state |= {first + place: named["state"][name] for place, name in enumerate(names) if name in named["state"]}
    return {"state": state, "param_groups": groups}


def load_numbered(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel], state: Any) -> None:
    """Load the whole *state* by positions, which every rank has."""
    order = {name: place for place, name in enumerate(_order(models))}
    with _unheard(optimizer), _without_gradients(optimizer):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        here: Any = get_optimizer_state_dict(_one(models), optimizer)
    names: dict[int, str] = {}
    groups = []
    for saved, group in zip(state["param_groups"], here["param_groups"], strict=True):
        mine = sorted(group["params"], key=order.__getitem__)
        if len(mine) != len(saved["params"]):
            raise CheckpointError(f"it has a group of {len(saved['params'])} parameters, here are {len(mine)}")
        names.update(zip(saved["params"], mine, strict=True))
        groups.append({**saved, "params": mine})
    by_name = {names[place]: values for place, values in state["state"].items()}
    load_named(optimizer, models, {"state": by_name, "param_groups": groups}, full=True)


def _order(models: Sequence[PreparedModel]) -> list[str]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return list(get_model_state_dict(_one(models)))
