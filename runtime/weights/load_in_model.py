"""Loading a checkpoint into a model: what does not fit is found before anything in the model changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from orc.runtime.memory.device_map import find_tied_parameters, retie_parameters
from orc.runtime.parallel import extract_model_from_parallel
from orc.runtime.weights.alignment import as_device
from orc.runtime.weights.checkpoint_fit import check_fit, checkpoint_weights
from orc.runtime.weights.dispatch import check_plan, module_device
from orc.runtime.weights.empty_weights import as_dtype, moved_parameter
from orc.runtime.weights.offload import no_room, offload_weight, remove_offloaded, save_offload_index


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
    refused = {"offload_8bit_bnb": offload_8bit_bnb, "full_state_dict": not full_state_dict,
               "broadcast_from_rank0": broadcast_from_rank0}  # fmt: skip
    for option, given in refused.items():
        if given:
            raise ValueError(f"load_checkpoint_in_model: {option}={option != 'full_state_dict'} is not supported")
    if device_map is not None and "disk" in device_map.values() and offload_folder is None:
        raise ValueError("the device_map puts modules on the disk: say where with offload_folder")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    tied = find_tied_parameters(model)
    if device_map is not None:
        check_plan(model, device_map)
    wanted = as_dtype(dtype)
    weights = checkpoint_weights(checkpoint)
    values = {name: value for name, (_, value) in weights.items()}
    check_fit(model, values, tied, checkpoint, strict, may_lack=True)
    target = _Target(model, device_map, wanted, tuple(keep_in_fp32_modules or ()), offload_folder, offload_buffers)
    own = {name: values[name] for name in model.state_dict(keep_vars=True) if name in values}
    # What is for the disk goes first: where there is no room, the model is as it was.
    target.to_disk({name: value for name, value in own.items() if name in target.away})
    for name, value in own.items():
        target.put(name, value)
    # On the meta device a shared parameter was replaced under each of its names.
    retie_parameters(model, tied)


class _Target:
    """A model that weights are put into, on the devices of a map."""

    def __init__(
        self,
        model: torch.nn.Module,
        device_map: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        in_fp32: tuple[str, ...],
        offload_folder: str | os.PathLike[str] | None,
        offload_buffers: bool,
    ) -> None:
        self.model, self.device_map, self.dtype, self.in_fp32 = model, device_map, dtype, in_fp32
        self.folder, self.offload_buffers = Path(offload_folder or "."), offload_buffers
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self.own = dict(model.named_parameters(remove_duplicate=False)) | self.buffers
        self.away = {name for name in self.own if self._device(name) == "disk"}

    def to_disk(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write *values* to the folder, and the index last.

        Raises:
            CheckpointError: there is no room; what was written is gone again.
        """
        index: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                offload_weight(self._converted(name, value), name, self.folder, index)
            except OSError as error:
                remove_offloaded(self.folder, [*index, name])
                raise no_room(self.folder, value.nbytes, error) from error
        save_offload_index(index, self.folder)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put *value* where parameter or buffer *name* is; of one for the disk nothing but its shape."""
        own, device = self.own[name], self._device(name)
        value = value.to("meta") if device == "disk" else value
        value = self._converted(name, value)
        if device == "disk":
            self._replace(name, value)
            return
        target = as_device(device) if device is not None else own.device
        if target.type == "meta":
            target = torch.device("cpu")
        if not own.is_meta and own.device == target and (self._dtype(name) is None or own.dtype == value.dtype):
            with torch.no_grad():
                own.copy_(value)
        else:
            self._replace(name, value.to(target, copy=True))

    def _converted(self, name: str, value: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype(name)
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    def _dtype(self, name: str) -> torch.dtype | None:
        return torch.float32 if any(part in self.in_fp32 for part in name.split(".")) else self.dtype

    def _device(self, name: str) -> Any:
        if self.device_map is None:
            return None
        device = module_device(name, self.device_map)
        return "cpu" if device == "disk" and name in self.buffers and not self.offload_buffers else device

    def _replace(self, name: str, value: torch.Tensor) -> None:
        module_name, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        parameter = module._parameters.get(attribute)
        if parameter is not None:
            module._parameters[attribute] = moved_parameter(parameter, value)
        else:
            module._buffers[attribute] = value
