"""Loading a checkpoint into a model, where it is or spread over devices.

What does not fit is found before anything in the model changes. Of what the checkpoint's files hold on the CPU or on
the disk there is no copy when the model is spread.
"""

from __future__ import annotations

import difflib
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.core.parsing import nearest
from orc.runtime.memory.device_map import (
    MaxMemory,
    find_tied_parameters,
    get_balanced_memory,
    infer_auto_device_map,
    retie_parameters,
)
from orc.runtime.parallel import extract_model_from_parallel
from orc.runtime.weights.alignment import Device, Keys, as_device, set_tensor
from orc.runtime.weights.dispatch import check_plan, dispatch_model, module_device
from orc.runtime.weights.empty_weights import as_dtype
from orc.runtime.weights.loading import weight_files
from orc.runtime.weights.offload import (
    file_entry,
    mapped_weights,
    no_room,
    offload_weight,
    remove_offloaded,
    save_offload_index,
)

logger = logging.getLogger(__name__)
_SHOWN = 20  # names in a warning, or compared with those that are not expected; an error has all of them


def checkpoint_weights(checkpoint: str | os.PathLike[str]) -> dict[str, tuple[Path | None, Tensor]]:
    """Return the weights of *checkpoint* by name, mapped into memory, each with the file that holds it.

    Files of `torch.save` in its old format cannot be mapped: their weights are in memory, and no file is named.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    weights: dict[str, tuple[Path | None, Tensor]] = {}
    for path in weight_files(Path(checkpoint)):
        mapped = path.suffix == ".safetensors" or zipfile.is_zipfile(path)
        file = path.absolute() if mapped else None
        weights.update({name: (file, value) for name, value in mapped_weights(path, mapped).items()})
    return weights


def check_fit(
    model: nn.Module,
    found: Mapping[str, Tensor],
    ties: Sequence[Sequence[str]],
    checkpoint: str | os.PathLike[str],
    strict: bool,
    may_lack: bool = False,
) -> None:
    """Refuse a checkpoint whose names, shapes or kinds of numbers are not the model's, before anything is changed.

    Args:
        model: the model; weights that it has already need not be in the checkpoint unless *strict*.
        found: the weights of the checkpoint by name.
        ties: names that the model has for one and the same weight.
        checkpoint: its name, for messages.
        strict: refuse weights that the model does not have, and any weight of the model that the checkpoint lacks.
        may_lack: unless *strict*, say it only where the model has no values for what the checkpoint lacks.

    Raises:
        CheckpointError: it does not fit; all names are listed.
    """
    own = model.state_dict(keep_vars=True)
    wrong = [
        f"{name} has shape {tuple(found[name].shape)}, the model's has {tuple(own[name].shape)}"
        for name in own.keys() & found.keys()
        if own[name].shape != found[name].shape
    ]
    given = {name for group in ties if any(one in found for one in group) for name in group} | found.keys()
    missing = [name for name, value in own.items() if name not in given and (strict or value.is_meta)]
    unexpected = [name for name in found if name not in own]
    quantized = [name for name in own.keys() & found.keys() if _is_quantized(own[name], found[name])]
    if quantized and not wrong:
        raise CheckpointError(
            f"{checkpoint} holds quantized weights ({', '.join(sorted(quantized))}): "
            "load_and_quantize_model with load_in_8bit=True loads them"
        )
    if wrong:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(sorted(wrong))}")
    if missing and may_lack and not strict:
        logger.warning("%s lacks %s, which stay without values", checkpoint, _shortened(missing))
        missing = []
    if missing or (strict and unexpected):
        parts = []
        if missing:
            parts.append(f"it lacks {', '.join(_with_nearest(missing, unexpected))}")
        if unexpected:
            parts.append(f"it holds {', '.join(unexpected)}, which the model does not have")
        raise CheckpointError(f"{checkpoint} does not fit the model: {'; '.join(parts)}")
    if unexpected:
        logger.warning("%s holds %s, which the model does not have", checkpoint, _shortened(unexpected))


def _is_quantized(own: Tensor, found: Tensor) -> bool:
    return own.is_floating_point() and found.dtype in (torch.int8, torch.uint8)


def _with_nearest(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    near = {name: difflib.get_close_matches(name, unexpected, n=1, cutoff=0.75) for name in missing[:_SHOWN]}
    return [f"{name} (is it {near[name][0]}?)" if near.get(name) else name for name in missing]


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


Source = tuple[Path | None, Tensor]  # the file that holds a weight, if one does, and the weight


class Placement:
    """Weights for *model* by *device_map*.

    Args:
        model: the model; it is changed in place.
        device_map: devices by module name; without one each weight goes where the model's is, or to the CPU.
        folder: where weights go that are for the disk and in no file, or in another data type.
        offload_buffers: buffers for the disk go there too; else they stay on the CPU.
        in_files: weights for the CPU and the disk stay in their files, mapped, where these hold what is wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device] | None,
        folder: str | os.PathLike[str] | None,
        offload_buffers: bool = False,
        in_files: bool = True,
    ) -> None:
        self.model, self.device_map, self.in_files = model, device_map, in_files
        self.folder = None if folder is None else Path(folder)
        self.buffers: set[str] = set()
        if not offload_buffers:
            self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.index: dict[str, dict[str, Any]] = {}
        self._written: dict[str, dict[str, Any]] = {}

    def put_all(self, weights: Mapping[str, tuple[Source, torch.dtype | None]]) -> None:
        """Make *weights* the model's own, each as the data type beside it, or as it is.

        What is for the disk goes first: where there is no room, the model is as it was.

        Raises:
            CheckpointError: there is no room on the disk.
            ValueError: a weight for the disk is in no file, and there is no folder.
        """
        # The state dict has the names; a model may put copies there.
        real: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        real |= dict(self.model.named_buffers(remove_duplicate=False))
        state = self.model.state_dict(keep_vars=True)
        own = {name: real.get(name, value) for name, value in state.items() if name in weights}
        away = {name for name in own if self._device(name) == "disk"}
        for name in away:
            source, dtype = weights[name]
            self.to_disk(name, source, _wanted(source, dtype))
        for name, tensor in own.items():
            source, dtype = weights[name]
            wanted, value = _wanted(source, dtype), source[1]
            device = self._device(name)
            place = tensor.device if device is None else as_device("meta" if device == "disk" else device)
            if name in away:
                set_tensor(self.model, name, tensor, torch.empty(value.shape, dtype=wanted, device="meta"))
            elif self.in_files:
                set_tensor(self.model, name, tensor, value.detach().to(place, wanted))
            elif place == tensor.device != torch.device("meta") and (dtype is None or tensor.dtype == wanted):
                with torch.no_grad():
                    tensor.copy_(value)
            else:
                set_tensor(
                    self.model, name, tensor, value.to("cpu" if place.type == "meta" else place, wanted, copy=True)
                )

    def _device(self, name: str) -> Device | None:
        if self.device_map is None:
            return None
        device = module_device(name, self.device_map)
        return "cpu" if device == "disk" and name in self.buffers else device

    def to_disk(self, name: str, source: Source, dtype: torch.dtype) -> None:
        """Note where the weight *name* is on the disk; it is written to the folder if no file has it like this.

        Raises:
            CheckpointError: there is no room for it.
        """
        path, value = source
        if self.in_files and path is not None and (dtype == value.dtype or self.folder is None):
            self.index[name] = file_entry(path, name, dtype)
            return
        if self.folder is None:
            raise ValueError(f"{name} is for the disk, and in no file there: name an offload_folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            offload_weight(value.detach().to(dtype), name, self.folder, self._written)
        except OSError as error:
            self.abandon(name)
            raise no_room(self.folder, value.numel() * dtype.itemsize, error) from error

    def abandon(self, *names: str) -> None:
        """Remove what was written: without an index it would never be used."""
        if self.folder is not None:
            remove_offloaded(self.folder, [*self._written, *names])
        self._written = {}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Write the index of the folder; return the entries of all weights on the disk."""
        if self._written and self.folder is not None:
            save_offload_index(self._written, self.folder)
        return self.index | self._written


def _wanted(source: Source, dtype: torch.dtype | None) -> torch.dtype:
    _, value = source
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights (one file, several with an index, or their directory) into *model*, part by part.

    Parameters that the model shares between modules stay shared.

    Args:
        model: prepared or not; parameters on the meta device are replaced, others are filled.
        checkpoint: what `save_model` wrote, or an index with ``{parameter: file}``.
        device_map: ``{"": device}`` or devices by module name; by default where each parameter is, and the CPU for
            those on the meta device. Weights for ``disk`` go to *offload_folder*, and stay on the meta device.
        offload_folder: where weights for the disk go, as memory-mapped files with an index.
        dtype: of floating-point weights; as saved by default.
        offload_state_dict: accepted; one weight is in memory at a time in any case.
        offload_buffers: offload the buffers of modules on the disk too; else they go to the CPU.
        keep_in_fp32_modules: names of modules whose weights are float32 whatever *dtype* says.
        offload_8bit_bnb: must be `False`: quantised weights cannot be offloaded here.
        strict: refuse names that the model does not have, and names of the model that the checkpoint lacks.
        full_state_dict: must be `True`: sharded state dicts are what `load_state` loads.
        broadcast_from_rank0: must be `False`: every process reads the files.

    Raises:
        CheckpointError: no weights are there, they do not fit, or with *strict* names differ.
        ValueError: *device_map* lacks a device or an *offload_folder*, or an option is not supported.
    """
    _refuse("load_checkpoint_in_model", full_state_dict, broadcast_from_rank0, offload_8bit_bnb)
    if device_map is not None and "disk" in device_map.values() and offload_folder is None:
        raise ValueError("the device_map puts modules on the disk: say where with offload_folder")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    tied = find_tied_parameters(model)
    if device_map is not None:
        check_plan(model, device_map)
    wanted = as_dtype(dtype)
    weights = checkpoint_weights(checkpoint)
    check_fit(model, _values(weights), tied, checkpoint, strict, may_lack=True)
    in_fp32 = set(keep_in_fp32_modules or ())
    placement = Placement(model, device_map, offload_folder, offload_buffers, in_files=False)
    placement.put_all(
        {
            name: (source, wanted if in_fp32.isdisjoint(name.split(".")) else torch.float32)
            for name, source in weights.items()
        }
    )
    placement.finish()
    # On the meta device a shared parameter was replaced under each of its names.
    retie_parameters(model, tied)


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
    _refuse("load_checkpoint_and_dispatch", full_state_dict, broadcast_from_rank0)
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
        known = ", ".join(map(repr, STRATEGIES))
        raise ValueError(f"device_map={strategy!r} is none of {known}{nearest(strategy, STRATEGIES)}")
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


def _refuse(function: str, full_state_dict: bool, broadcast_from_rank0: bool, offload_8bit_bnb: bool = False) -> None:
    refused = {"full_state_dict": not full_state_dict, "broadcast_from_rank0": broadcast_from_rank0,
               "offload_8bit_bnb": offload_8bit_bnb}  # fmt: skip
    for option, given in refused.items():
        if given:
            raise ValueError(f"{function}: {option}={option != 'full_state_dict'} is not supported")


def _values(weights: Mapping[str, tuple[Path | None, Tensor]]) -> dict[str, Tensor]:
    return {name: value for name, (_, value) in weights.items()}
