"""States of the files of a checkpoint, read into the tensors that they are to replace.

What is read is mapped into memory first, so that names, shapes and types are known at no cost. The bytes go straight
to their places then (`CopyQueue`), with no second copy of the state in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import pickled
from orc.runtime.checkpoint.storage.copying import CopyQueue
from orc.runtime.collectives.tree import recursively_apply


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped into memory, with the names that share a tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            aliases = json.loads((file.metadata() or {}).get("orc.aliases", "{}"))
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    for alias, name in aliases.items():
        state[alias] = state[name]
    return state


def read_state(path: Path, map_location: Any = None) -> Any:
    """Return the state in the file *path*, of either format."""
    return read_weights(path) if path.suffix == ".safetensors" else unpickle(path, map_location)


def unpickle(path: Path, map_location: Any = None) -> Any:
    """Return what was pickled to *path*, mapped unless it is for another place. Raises `CheckpointError`."""
    try:
        if map_location is None:
            return pickled.read(path, "cpu", mmap=True)
        return pickled.read(path, map_location)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def unmapped(state: Any, copies: CopyQueue, current: Any = None) -> Any:
    """*state* in memory once *copies* are: what stayed mapped would break when a network file system loses the file.

    Tensors go where the ones they replace are, if *current*, an optimizer's state, has such already: that needs no
    memory twice, and moves them to their device.
    """
    if current is None or _shape(current) != _shape(state):
        return recursively_apply(_fresh, state, copies)
    return _filled(state, current, copies)


def _fresh(value: torch.Tensor, copies: CopyQueue) -> torch.Tensor:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return value.clone()
    target = torch.empty_like(value)
    copies.start(target, value)
    return target


def _shape(state: Any) -> list[int] | None:
    """Parameters in each group of an optimizer's *state*."""
    try:
        return [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError):
        return None


def _filled(value: Any, current: Any, copies: CopyQueue) -> Any:
    if isinstance(value, torch.Tensor):
        if type(current) is not torch.Tensor or current.shape != value.shape or current.dtype != value.dtype:
            return _fresh(value, copies)
        copies.start(current, value)
        return current
    if isinstance(value, dict):
        known = current if isinstance(current, dict) else {}
        return {key: _filled(item, known.get(key), copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, None, copies) for item in value)
    return value


def placed(state: Mapping[str, Any], model: torch.nn.Module, copies: CopyQueue) -> dict[str, Any]:
    """Return *state* with the weights of *model* in the place of those that *copies* bring there."""
    weights = dict(state)
    origins: dict[int, torch.Tensor] = {}
    for name, mine in model.state_dict(keep_vars=True).items():
        value = weights.get(name)
        if type(mine) not in (torch.Tensor, torch.nn.Parameter) or type(value) is not torch.Tensor:
            continue
        if mine.device.type != "cpu" or mine.dtype != value.dtype or mine.shape != value.shape:
            continue
        origin = origins.get(id(mine))
        if origin is None:
            origins[id(mine)] = value
            copies.start(mine, value)
        elif origin.data_ptr() != value.data_ptr():
            continue  # two values for one tensor: the last counts, as without this
        weights[name] = mine
    return weights
