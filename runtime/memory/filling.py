"""Filling devices with the modules of a model, one device after another, by the bytes of their weights."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.memory.sizes import class_names, element_size, top_level

logger = logging.getLogger(__name__)

Device = int | str
Modules = list[tuple[str, Any]]  # names and modules, or tensors that modules hold beside other modules


class Filling:
    """Which modules of *model* lie where. Devices are filled in the order of *limits*, the disk last.

    A weight that several modules share counts once on each device where one of them lies.

    Args:
        model: the model; it may be on the meta device.
        limits: bytes by device.
        no_split_module_classes: names of classes whose modules stay whole.
        dtype: the weights' dtype, if they are going to be converted.
        special_dtypes: other dtypes for single weights.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Mapping[Device, int],
        no_split_module_classes: str | Sequence[str] | None,
        dtype: torch.dtype | str | None,
        special_dtypes: Mapping[str, torch.dtype | str] | None,
    ) -> None:
        self.limits = dict(limits)
        self.placed: OrderedDict[str, Device] = OrderedDict()
        self.used: dict[Device, float] = {}
        self._there: dict[Device, set[int]] = {}
        self._devices: list[Device] = [*(key for key in limits if key != "disk"), "disk"]
        self._accelerator = next((key for key in limits if key not in ("cpu", "disk")), None)
        self._main = (self._accelerator, "cpu")  # layers that are offloaded come there
        self._whole = class_names(no_split_module_classes)
        self._inside = _tensors_by_module(model, dtype, special_dtypes)
        self._waiting: Modules = list(top_level(model))
        self._layers = [layer for name, module in self._waiting for layer in self._layers_of(name, module)]
        self._parameters = {id(parameter) for parameter in model.parameters()}
        # Layers that come and go have parameters: single buffers do not count.
        self._by_size = sorted(
            ((self._bytes(layer), layer) for layer in self._layers if self._parameters_of(layer)), reverse=True
        )
        self._holders: dict[int, list[str]] = {}  # layers by the parameters that they hold
        for layer in self._layers:
            for tensor in self._parameters_of(layer):
                self._holders.setdefault(tensor, []).append(layer)

    def fill(self, fallback: bool) -> None:
        """Place all modules. A module that does not fit is split into its parts, unless it must stay whole.

        On the first accelerator and on the CPU room is kept for the largest layer that is still to be placed. Layers
        that share a parameter go together, where they fit.

        Args:
            fallback: give a device that would stay empty the first layer that does fit.

        Raises:
            ValueError: there is room for a layer nowhere.
        """
        if self._bytes("") <= self._room():
            self._put(*(name for name, _ in self._waiting))  # nothing is offloaded: no room is kept
            return
        while self._waiting:
            name, module = self._waiting[0]
            partners = self._partners(name)
            if self._fits(name, *partners):
                self._put(name, *partners)
            elif parts := self._parts(name, module):
                self._waiting[:1] = parts
            elif partners and self._fits(name):
                self._put(name)
            elif small := self._first_that_fits() if fallback and not self.used.get(self._devices[0]) else None:
                self._put(small)
            elif len(self._devices) > 1:
                del self._devices[0]
            else:
                raise ValueError(
                    f"no device has room for {name}, which needs {int(self._bytes(name))} bytes ({self._account()}); "
                    "raise the limits in max_memory"
                )

    def buffers_without_room(self) -> tuple[int, Device] | None:
        """Return the bytes of the buffers of offloaded layers, and the accelerator where they do not fit.

        There they have to stay, beside what is there and the parameters of one offloaded layer after the other.
        """
        away = [self._inside.get(name, {}) for name in self._layers if self._device_of(name) in ("cpu", "disk")]
        buffers = {tensor: size for layer in away for tensor, size in layer.items() if tensor not in self._parameters}
        if self._accelerator is None or not buffers:
            return None
        largest = max(sum(size for tensor, size in layer.items() if tensor in self._parameters) for layer in away)
        needed = sum(buffers.values())
        room = self.limits[self._accelerator] - self.used.get(self._accelerator, 0)
        return (int(needed), self._accelerator) if needed + largest > room else None

    def _parameters_of(self, name: str) -> set[int]:
        return self._inside.get(name, {}).keys() & self._parameters

    def _device_of(self, layer: str) -> Device:
        while layer not in self.placed:
            layer = layer.rpartition(".")[0]
        return self.placed[layer]

    def _parts(self, name: str, module: Any) -> Modules:
        """Return what *module* consists of, or nothing if it is a layer: without modules inside, or to stay whole."""
        if isinstance(module, Tensor) or type(module).__name__ in self._whole or not any(module.children()):
            return []
        return [(f"{name}.{key}", part) for key, part in top_level(module)]

    def _layers_of(self, name: str, module: Any) -> Iterator[str]:
        parts = self._parts(name, module)
        if not parts:
            yield name
        for key, part in parts:
            yield from self._layers_of(key, part)

    def _bytes(self, *names: str, device: Device | None = None) -> float:
        """Return the bytes of the modules *names*, less what lies on *device* already."""
        there = self._there.get(device, ()) if device is not None else ()
        tensors = {tensor: size for name in names for tensor, size in self._inside.get(name, {}).items()}
        return sum(size for tensor, size in tensors.items() if tensor not in there)

    def _room(self) -> float:
        device = self._devices[0]
        return self.limits.get(device, float("inf")) - self.used.get(device, 0)

    def _fits(self, *names: str) -> bool:
        reserve = self._reserve(*names) if self._devices[0] in self._main else 0
        return self._bytes(*names, device=self._devices[0]) + reserve <= self._room()

    def _reserve(self, *names: str) -> float:
        """Return the bytes of the largest layer that waits when *names* are placed."""
        while self._by_size and self._is_placed(self._by_size[0][1]):
            del self._by_size[0]
        waiting = (size for size, layer in self._by_size if not _is_under(layer, names) and not self._is_placed(layer))
        return next(waiting, 0)

    def _is_placed(self, layer: str) -> bool:
        return _is_under(layer, self.placed)

    def _partners(self, name: str) -> list[str]:
        """Return the layers outside of *name* that share a parameter with it, and wait."""
        sharing = dict.fromkeys(
            layer for tensor in self._inside.get(name, {}) for layer in self._holders.get(tensor, ())
        )
        return [layer for layer in sharing if not _is_under(layer, (name,)) and not self._is_placed(layer)]

    def _first_that_fits(self) -> str | None:
        """Return the first module or layer that waits, has weights, and fits on the device being filled."""
        modules = list(self._waiting)
        while modules:
            name, module = modules.pop(0)
            if self._inside.get(name) and self._fits(name):
                return name
            modules[:0] = self._parts(name, module)
        return None

    def _put(self, *names: str) -> None:
        """Put the modules *names* on the device being filled; the rest of the modules around them waits."""
        device = self._devices[0]
        self.used[device] = self.used.get(device, 0) + self._bytes(*names, device=device)
        for name in names:
            self._there.setdefault(device, set()).update(self._inside.get(name, ()))
            self._take(name)
            self.placed[name] = device
            logger.debug("%s on %s", name, device)

    def _take(self, name: str) -> None:
        place, (around, module) = next(
            (place, entry) for place, entry in enumerate(self._waiting) if _is_under(name, (entry[0],))
        )
        if around == name:
            del self._waiting[place]
        else:
            self._waiting[place : place + 1] = self._parts(around, module)
            self._take(name)

    def _account(self) -> str:
        """Return what is on each device, in words."""
        reserve = int(self._reserve())
        return "; ".join(
            f"{device}: {int(self.used.get(device, 0))} of {limit} bytes used"
            + (f", {reserve} kept free for the largest layer" if device in self._main else "")
            for device, limit in self.limits.items()
        )


def _is_under(name: str, modules: Mapping[str, Any] | Sequence[str]) -> bool:
    """Return whether *name* is one of *modules*, or inside of one."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return bool(name)


def _tensors_by_module(
    model: nn.Module, dtype: torch.dtype | str | None, special_dtypes: Mapping[str, torch.dtype | str] | None
) -> dict[str, dict[int, float]]:
    """Return the bytes of all parameters and buffers inside each module, and of each by its own names too."""
    inside: dict[str, dict[int, float]] = {"": {}}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for path, tensor in tensors:
        # The first of several names says what the tensor becomes.
        size = inside[""].get(id(tensor))
        if size is None:
            size = tensor.numel() * element_size(tensor, dtype, (special_dtypes or {}).get(path))
        name = path
        while name:
            inside.setdefault(name, {})[id(tensor)] = size
            name = name.rpartition(".")[0]
        inside[""][id(tensor)] = size
    return inside
