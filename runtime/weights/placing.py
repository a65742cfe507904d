"""Weights of a checkpoint, or of the model itself, on their way to where a device map places them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.weights.alignment import Device, as_device
from orc.runtime.weights.dispatch import module_device
from orc.runtime.weights.empty_weights import moved_parameter
from orc.runtime.weights.offload import no_room, offload_weight, remove_offloaded, save_offload_index
from orc.runtime.weights.weights_map import file_entry

Source = tuple[Path | None, Tensor]  # the file that holds a weight, if one does, and the weight


class Placement:
    """Weights for *model* by *device_map*. Those for the disk stay in their file where it holds what is wanted.

    Args:
        model: the model; it is changed in place.
        device_map: devices by module name.
        folder: where weights go that are for the disk and in no file, or in another data type.
        offload_buffers: buffers for the disk go there too; else they stay on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device],
        folder: str | os.PathLike[str] | None,
        offload_buffers: bool = False,
    ) -> None:
        self.model, self.device_map = model, device_map
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
        own = {name: value for name, value in self.model.state_dict(keep_vars=True).items() if name in weights}
        away = {name for name in own if self._is_for_the_disk(name)}
        for name in away:
            source, dtype = weights[name]
            self.to_disk(name, source, _wanted(source, dtype))
        for name, tensor in own.items():
            source, dtype = weights[name]
            wanted, value = _wanted(source, dtype), source[1]
            if name in away:
                self._set(name, tensor, torch.empty(value.shape, dtype=wanted, device="meta"))
            else:
                device = module_device(name, self.device_map)
                self._set(name, tensor, value.detach().to(as_device("cpu" if device == "disk" else device), wanted))

    def _is_for_the_disk(self, name: str) -> bool:
        return module_device(name, self.device_map) == "disk" and name not in self.buffers

    def _set(self, name: str, own: Tensor, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(path) if path else self.model
        if isinstance(own, nn.Parameter):
            owner._parameters[attribute] = moved_parameter(own, value)
        else:
            owner._buffers[attribute] = value

    def to_disk(self, name: str, source: Source, dtype: torch.dtype) -> None:
        """Note where the weight *name* is on the disk; it is written to the folder if no file has it like this.

        Raises:
            CheckpointError: there is no room for it.
        """
        path, value = source
        if path is not None and (dtype == value.dtype or self.folder is None):
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
