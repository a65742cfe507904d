"""Sharded state: every rank writes and reads the parts that it holds, through `torch.distributed.checkpoint`.

A folder per model and optimizer, in torch's own layout. Parameters go by their names, so the state can be loaded at
another world size, on another mesh, and into a model that is not sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import plain
from orc.runtime.checkpoint.state import fit, fsdp1
from orc.runtime.checkpoint.state.fit import LIKE_PARAMETER, difference, sizes_of
from orc.runtime.checkpoint.state.shard_files import files_of, paths, plan_of, read_metadata, read_shards
from orc.runtime.checkpoint.state.strategies import (
    SHARDED,
    Full,
    Stepped,
)
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.parallel.shards import replicated

_MODEL, _OPTIMIZER = "model", "optimizer"


class Sharded(Full):
    """The strategy ``dcp``."""

    name = SHARDED

    def model_state(self, model: PreparedModel, *, keep: bool = True) -> dict[str, Any]:
        """Return this rank's part of the weights, as DTensors; it is always kept."""
        return dict(get_model_state_dict(model.model))

    def optimizer_state(self, optimizer: Any, models: Sequence[PreparedModel], *, keep: bool = True) -> dict[str, Any]:
        """Return this rank's part, by names of parameters."""
        stepped = Stepped(optimizer, models)
        if stepped.flattened:
            return dict(fsdp1.optimizer_state(stepped.optimizer, stepped.models))
        state = stepped.named_state()
        return {**state, "param_groups": plain(state["param_groups"])}

    def model_problem(self, folder: Any, model: PreparedModel, *, strict: bool = True) -> str | None:
        """Return why *model* would not take the shards in *folder*: names or sizes that differ."""
        if model.layout is Layout.FLATTENED:
            return None  # its state costs a collective; names and sizes are compared before anything is read
        return difference(sizes_of(get_model_state_dict(model.model)), _saved_sizes(read_metadata(folder)), strict)

    def load_model(self, folder: Any, model: PreparedModel, *, strict: bool = True) -> None:
        """Read the shards in *folder* into *model*.

        Raises:
            CheckpointError: they cannot be read, or do not fit.
        """
        metadata = read_metadata(folder)
        state = get_model_state_dict(model.model)
        try:
            planner, plan = plan_of({_MODEL: state}, metadata, partial=not strict)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{folder} does not fit the prepared model: {error}") from error
        read_shards(folder, metadata, planner, plan)
        plainly = all(isinstance(value, torch.Tensor) for value in state.values()) and not fit.decides_itself(
            model.bare
        )
        if model.layout is Layout.FLATTENED or not plainly:  # else all of it is in place already
            set_model_state_dict(model.model, state, options=StateDictOptions(strict=strict))

    def optimizer_problem(self, folder: Any, optimizer: Any, models: Sequence[PreparedModel]) -> str | None:
        """Return why *optimizer* would not take the shards in *folder*."""
        stepped = Stepped(optimizer, models)
        if stepped.flattened:
            return None
        metadata = read_metadata(folder)
        try:
            named = _read(folder, metadata, {}, tensors=False)
            for name in named["state"]:
                if name not in stepped.names.values():
                    return f"it has state of {name}, which the optimizer here does not step"
            stepped.positioned(named)
        except CheckpointError as error:
            return str(error)
        parameters = _by_name(stepped)
        for entry, path in paths(metadata).items():
            saved = metadata.state_dict_metadata[entry]
            if path[:2] == (_OPTIMIZER, "state") and isinstance(saved, TensorStorageMetadata):
                parameter = parameters[str(path[2])]
                if path[3] in LIKE_PARAMETER and saved.size.numel() != 1 and saved.size != parameter.shape:
                    return (
                        f"size mismatch of {entry}: {list(saved.size)} in the checkpoint, {list(parameter.shape)} here"
                    )
        return None

    def load_optimizer(self, folder: Any, optimizer: Any, models: Sequence[PreparedModel]) -> None:
        """Read the shards in *folder* into *optimizer*.

        Raises:
            CheckpointError: they cannot be read, or do not fit.
        """
        stepped, metadata = Stepped(optimizer, models), read_metadata(folder)
        if stepped.flattened:
            fsdp1.load_optimizer(folder, metadata, stepped.optimizer, stepped.models)
            return
        targets = _targets(metadata, stepped)
        try:
            state = stepped.positioned(_read(folder, metadata, targets))
        except (CheckpointError, KeyError) as error:
            raise CheckpointError(f"{folder} does not fit the prepared optimizer: {error}") from error
        stepped.optimizer.load_state_dict(state)


def model_files(folder: Path, model: PreparedModel) -> set[str]:
    """Return the names of the files in *folder* from which this rank would read *model*."""
    metadata = read_metadata(folder)
    if model.layout is Layout.FLATTENED:  # its state costs a collective
        return _all_files(metadata)
    return files_of(metadata, plan_of({_MODEL: get_model_state_dict(model.model)}, metadata, partial=True)[1])


def load_part(folder: Path, model: PreparedModel, state: Mapping[str, Any], only: Mapping[str, str]) -> None:
    """Read the shards in *folder* into some weights of *model*.

    Args:
        folder: of these shards.
        model: sharded, or not.
        state: its state of this rank.
        only: names in the folder, each with its name in *state*.

    Raises:
        CheckpointError: they cannot be read, or there are others in the folder.
    """
    metadata = read_metadata(folder)
    part = {name: state[own] for name, own in only.items()}
    if lines := difference(sizes_of(part), _saved_sizes(metadata)):
        raise CheckpointError(f"{folder} does not fit the prepared model: {lines}")
    read_shards(folder, metadata, *plan_of({_MODEL: part}, metadata))
    if model.layout is Layout.FLATTENED:
        loaded = {**state, **{own: part[name] for name, own in only.items()}}
        set_model_state_dict(model.model, loaded)


def optimizer_files(folder: Path, optimizer: Any, models: Sequence[PreparedModel]) -> set[str]:
    """Return the names of the files in *folder* from which this rank would read *optimizer*."""
    metadata, stepped = read_metadata(folder), Stepped(optimizer, models)
    if stepped.flattened:
        return _all_files(metadata)
    targets = _targets(metadata, stepped)
    return files_of(metadata, plan_of(_unread(metadata, targets), metadata, partial=True)[1])


def _all_files(metadata: Metadata) -> set[str]:
    return {place.relative_path for place in metadata.storage_data.values()}


def _targets(metadata: Metadata, stepped: Stepped) -> dict[str, torch.Tensor]:
    """Return the tensors to read the entries of *metadata* into, by entry."""
    parameters = _by_name(stepped)
    current = {name: stepped.optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    targets = {}
    for entry, path in paths(metadata).items():
        saved = metadata.state_dict_metadata[entry]
        if isinstance(saved, TensorStorageMetadata):
            known = path[1] == "state" and len(path) == 4
            there = current.get(str(path[2]), {}).get(path[3]) if known else None
            targets[entry] = _target(saved, there, parameters.get(str(path[2])) if known else None)
    return targets


def _read(folder: Path, metadata: Metadata, targets: Mapping[str, Any], *, tensors: bool = True) -> dict[str, Any]:
    """Return an optimizer's state by names, with tensors in *targets* (by entry); without *tensors* the rest of it."""
    state = _unread(metadata, targets, tensors=tensors)
    planner, plan = plan_of(state, metadata, partial=True)
    read_shards(folder, metadata, planner, plan)
    read: dict[str, Any] = state[_OPTIMIZER]
    return read


def _unread(metadata: Metadata, targets: Mapping[str, Any], *, tensors: bool = True) -> dict[str, Any]:
    """Return what `_read` fills."""
    state: dict[str, Any] = {_OPTIMIZER: {"state": {}, "param_groups": []}}
    for entry, path in paths(metadata).items():
        is_tensor = isinstance(metadata.state_dict_metadata[entry], TensorStorageMetadata)
        if path[0] != _OPTIMIZER or len(path) < 3:
            raise CheckpointError(f"it is not the state of an optimizer: it holds {entry}")
        if tensors or not is_tensor:
            set_element(state, path, targets.get(entry))
        elif path[1] == "state":
            state[_OPTIMIZER]["state"].setdefault(path[2], {})
    return state


def _target(saved: TensorStorageMetadata, there: Any, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor to read into: the one that is *there*, or a new one that is sharded as *parameter* is."""
    dtype = saved.properties.dtype
    if isinstance(there, torch.Tensor) and there.shape == saved.size and there.dtype == dtype:
        return there.detach()
    if parameter is None or (saved.size.numel() == 1 and parameter.numel() != 1):
        return torch.empty(saved.size, dtype=dtype)
    if parameter.shape == saved.size:
        return torch.empty_like(parameter, dtype=dtype).detach()
    if hasattr(parameter, "full_tensor"):
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        return replicated(torch.empty(saved.size, dtype=dtype, device=mesh.device_type), mesh)
    return torch.empty(saved.size, dtype=dtype, device=parameter.device)


def _by_name(stepped: Stepped) -> dict[str, torch.Tensor]:
    return {stepped.names[position]: parameter for position, parameter in enumerate(stepped.parameters)}


def _saved_sizes(metadata: Metadata) -> dict[str, torch.Size | None]:
    sizes = {name: getattr(entry, "size", None) for name, entry in metadata.state_dict_metadata.items()}
    return {name.removeprefix(f"{_MODEL}."): size for name, size in sizes.items()}
