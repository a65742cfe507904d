"""Loading a checkpoint into an empty model and spreading it, without a copy of what the checkpoint's own files hold."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orc.runtime.memory.device_map import (
    MaxMemory,
    find_tied_parameters,
    get_balanced_memory,
    infer_auto_device_map,
    retie_parameters,
)
from orc.runtime.weights.alignment import Device, Keys
from orc.runtime.weights.checkpoint_fit import check_fit, checkpoint_weights
from orc.runtime.weights.dispatch import check_plan, dispatch_model, module_device
from orc.runtime.weights.empty_weights import as_dtype
from orc.runtime.weights.load_in_model import load_checkpoint_in_model
from orc.runtime.weights.placing import Placement

S = TypeVar("S")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: Keys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load *checkpoint* into *model*, which may be empty, and spread it over the devices of *device_map*.

    Weights for the CPU and for the disk stay in the checkpoint's files, mapped into memory: nothing is copied, and the
    files have to stay as they are while the model is used. What does not fit is found before anything is loaded.

    Args:
        model: the model; it is changed in place and returned.
        checkpoint: a file of weights, an index of several, or their folder.
        device_map: devices by module name, or a strategy: ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or
            ``"sequential"``; without one the model is loaded where it is.
        max_memory: limits by device, in bytes or as text, for a strategy; what is free by default.
        no_split_module_classes: names of classes whose modules stay on one device (blocks with a residual connection).
        offload_folder: folder for weights on the disk that have to be converted to *dtype*; the others need none.
        offload_buffers: keep the buffers of offloaded modules away too.
        dtype: of floating-point weights; the model's, where it has weights, or as saved.
        offload_state_dict: accepted; one weight is in memory at a time in any case.
        skip_keys: keyword arguments of forward that stay where they are.
        preload_module_classes: classes whose modules get all their weights at once.
        force_hooks: add hooks although there is one device only.
        strict: refuse weights that the model does not have, and weights of the model that the checkpoint lacks.
        full_state_dict: must be `True`: sharded state dicts are what `load_state` loads.
        broadcast_from_rank0: must be `False`: every process maps the files.

    Returns:
        *model*, changed in place.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or is one of another model.
        ValueError: the device map does not fit the model or the machine, or an option is not supported.
    """
    for option, given in (("full_state_dict", not full_state_dict), ("broadcast_from_rank0", broadcast_from_rank0)):
        if given:
            raise ValueError(f"load_checkpoint_and_dispatch: {option}={option[0] == 'b'} is not supported")
    if device_map is None:
        check_fit(model, _values(checkpoint_weights(checkpoint)), find_tied_parameters(model), checkpoint, strict)
        load_checkpoint_in_model(model, checkpoint, dtype=dtype, offload_folder=offload_folder, strict=strict)
        return model
    if isinstance(device_map, str):
        plan: Mapping[str, Device] = planned(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
        )
    else:
        plan = device_map
    check_plan(model, plan)
    weights = checkpoint_weights(checkpoint)
    ties = find_tied_parameters(model)
    check_fit(model, _values(weights), ties, checkpoint, strict)
    placement = Placement(model, plan, offload_folder, offload_buffers)
    wanted = as_dtype(dtype)
    sources = weights | _kept_apart(weights, ties, plan)
    placement.put_all({name: (source, wanted) for name, source in sources.items()})
    index = placement.finish()
    _share_entries(model, index, ties)
    retie_parameters(model, ties)
    return dispatch_model(
        model, plan, offload_dir=offload_folder, offload_index=index or None, offload_buffers=offload_buffers,
        skip_keys=skip_keys, preload_module_classes=preload_module_classes, force_hooks=force_hooks,
    )  # fmt: skip


def planned(
    model: nn.Module,
    strategy: str,
    max_memory: MaxMemory | None,
    no_split_module_classes: str | Sequence[str] | None,
    dtype: torch.dtype | str | None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> Mapping[str, Device]:
    """Return the device map that *strategy* makes for *model*.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"device_map={strategy!r} is none of {', '.join(map(repr, STRATEGIES))}{hint}")
    if strategy != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes, dtype, special_dtypes, strategy == "balanced_low_0"
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )


def _kept_apart(weights: Mapping[str, S], ties: Sequence[Sequence[str]], plan: Mapping[str, Device]) -> dict[str, S]:
    """Return sources for the names of tied weights that are for a device, where the one in the checkpoint is not."""
    sources: dict[str, S] = {}
    for group in ties:
        kept = next((name for name in group if name in weights), None)
        if kept is not None and module_device(kept, plan) == "disk":
            absent = (name for name in group if name not in weights and module_device(name, plan) != "disk")
            sources.update(dict.fromkeys(absent, weights[kept]))
    return sources


def _share_entries(model: nn.Module, index: dict[str, dict[str, Any]], ties: Sequence[Sequence[str]]) -> None:
    """Let all names of a tied weight on the disk find it: a checkpoint has it under one of them."""
    for group in ties:
        entry = next((name for name in group if name in index), None)
        if entry is None:
            continue
        for name in group:
            if name not in index and model.get_parameter(name).is_meta:
                path, _, attribute = name.rpartition(".")
                # The one parameter, of the data type that was asked for.
                model.get_submodule(path)._parameters[attribute] = model.get_parameter(entry)
                index[name] = {**index[entry], "weight_name": index[entry].get("weight_name", entry)}


def _values(weights: Mapping[str, tuple[Path | None, Tensor]]) -> dict[str, Tensor]:
    return {name: value for name, (_, value) in weights.items()}
