"""Loading a checkpoint into an empty model and spreading it, without a copy of what the checkpoint's own files hold."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.weights.alignment import Device, Keys, as_device
from orc.runtime.weights.device_map import (
    MaxMemory,
    check_device_map,
    find_tied_parameters,
    get_balanced_memory,
    infer_auto_device_map,
    retie_parameters,
)
from orc.runtime.weights.dispatch import dispatch_model, module_device, plain_map
from orc.runtime.weights.empty_weights import as_dtype, moved_parameter
from orc.runtime.weights.loading import load_checkpoint_in_model, weight_files
from orc.runtime.weights.offload import offload_weight, save_offload_index
from orc.runtime.weights.weights_map import file_entry, mapped_weights

logger = logging.getLogger(__name__)
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_SHOWN = 20


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

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or is one of another model.
        ValueError: the device map does not fit the model or the machine, or an option is not supported.
    """
    for option, given in (("full_state_dict", not full_state_dict), ("broadcast_from_rank0", broadcast_from_rank0)):
        if given:
            raise ValueError(f"load_checkpoint_and_dispatch: {option}={option[0] == 'b'} is not supported")
    if device_map is None:
        load_checkpoint_in_model(model, checkpoint, dtype=dtype, offload_folder=offload_folder, strict=strict)
        return model
    if isinstance(device_map, str):
        plan: Mapping[str, Device] = planned(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers
        )
    else:
        plan = device_map
        check_device_map(model, plain_map(plan))
    weights: dict[str, tuple[Path, Tensor]] = {}
    for path in weight_files(Path(checkpoint)):
        weights.update({name: (path.absolute(), value) for name, value in mapped_weights(path).items()})
    ties = find_tied_parameters(model)
    _check_fit(model, {name: value for name, (_, value) in weights.items()}, ties, checkpoint, strict)
    index = _place(model, weights, plan, as_dtype(dtype), offload_folder, offload_buffers)
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
    offload_buffers: bool,
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
            model, max_memory, no_split_module_classes, dtype, low_zero=strategy == "balanced_low_0"
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype=dtype, offload_buffers=offload_buffers
    )


def _check_fit(
    model: nn.Module,
    found: Mapping[str, Tensor],
    ties: Sequence[Sequence[str]],
    checkpoint: str | os.PathLike[str],
    strict: bool,
) -> None:
    """Refuse a checkpoint whose names or shapes are not the model's, before anything is changed."""
    own = model.state_dict(keep_vars=True)
    wrong = [
        f"{name} has shape {tuple(found[name].shape)}, the model's has {tuple(own[name].shape)}"
        for name in own.keys() & found.keys()
        if own[name].shape != found[name].shape
    ]
    given = {name for group in ties if any(one in found for one in group) for name in group} | found.keys()
    missing = [name for name, value in own.items() if name not in given and (strict or value.is_meta)]
    unexpected = [name for name in found if name not in own]
    if wrong:
        raise CheckpointError(f"{checkpoint} is of another model: {_listed(sorted(wrong))}")
    if missing or (strict and unexpected):
        parts = []
        if missing:
            parts.append(f"it lacks {_listed(_with_nearest(missing, unexpected))}")
        if unexpected:
            parts.append(f"it holds {_listed(unexpected)}, which the model does not have")
        raise CheckpointError(f"{checkpoint} does not fit the model: {'; '.join(parts)}")
    if unexpected:
        logger.warning("%s holds %s, which the model does not have", checkpoint, _listed(unexpected))


def _with_nearest(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    near = {name: difflib.get_close_matches(name, unexpected, n=1, cutoff=0.75) for name in missing[:_SHOWN]}
    return [f"{name} (is it {near[name][0]}?)" if near.get(name) else name for name in missing]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _place(
    model: nn.Module,
    weights: Mapping[str, tuple[Path, Tensor]],
    device_map: Mapping[str, Device],
    dtype: torch.dtype | None,
    folder: str | os.PathLike[str] | None,
    offload_buffers: bool,
) -> dict[str, dict[str, Any]]:
    """Give every tensor of *model* its weight; return the index of those that stay on the disk."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    index: dict[str, dict[str, Any]] = {}
    converted: dict[str, dict[str, Any]] = {}
    for name, own in model.state_dict(keep_vars=True).items():
        if name not in weights:
            continue
        path, value = weights[name]
        target = dtype if dtype is not None and value.is_floating_point() else value.dtype
        device = module_device(name, device_map)
        if device == "disk" and (offload_buffers or name not in buffers):
            if target != value.dtype and folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
                offload_weight(value.to(target), name, folder, converted)
            else:
                index[name] = file_entry(path, name, target)
            _replace(model, name, own, torch.empty(value.shape, dtype=target, device="meta"))
        else:
            _replace(model, name, own, value.to(as_device("cpu" if device == "disk" else device), dtype=target))
    if converted and folder is not None:
        save_offload_index(converted, folder)
    return index | converted


def _replace(model: nn.Module, name: str, own: Tensor, value: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path) if path else model
    if isinstance(own, nn.Parameter):
        owner._parameters[attribute] = moved_parameter(own, value)
    else:
        owner._buffers[attribute] = value
