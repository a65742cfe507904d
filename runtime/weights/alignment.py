"""Weights where the computation is: hooks that bring them, and a module's inputs, to a device and put them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.collectives.tree import find_device, send_to_device
from orc.runtime.memory.sizes import named_module_tensors
from orc.runtime.weights.empty_weights import moved_parameter
from orc.runtime.weights.hooks import Arguments, ModelHook, SequentialHook, add_hook_to_module
from orc.runtime.weights.offload import PrefixedDataset
from orc.runtime.weights.read_ahead import ReadAhead

Device = int | str | torch.device
TiedTensors = dict[int, dict[torch.device, Tensor]]  # by the address of the weight at rest, then by device
Keys = str | Sequence[str] | None


class AlignDevicesHook(ModelHook):
    """Hook that brings a module's inputs, and its weights where they are offloaded, to the execution device.

    Args:
        execution_device: where forward runs; `None` leaves everything where it is.
        offload: keep the weights away between forwards.
        io_same_device: return the output on the device of the input.
        weights_map: the offloaded weights by their names in the module; by default they are kept on the CPU.
        offload_buffers: offload the buffers too.
        place_submodules: care for the weights of the modules inside too.
        skip_keys: keyword arguments that stay where they are.
        tied_params_map: weights that several modules share, by address: one copy of each is made on a device.
    """

    moves_weights = True

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: Keys = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.no_grad = offload  # what autograd keeps for a backward pass would keep the weights as well
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._borrowed: list[tuple[int, torch.device]] = []  # entries of tied_params_map that this hook has made
        self.read_ahead: ReadAhead | None = None  # shared by the offloaded layers of a model on one device
        self._resting: dict[str, Tensor] = {}  # what stands in the module between forwards, while the weights are there

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return *module* with its weights on the execution device, or offloaded."""
        if not self.offload:
            if self.execution_device is not None:
                for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
                    if not tensor.is_meta:
                        self._put(module, name, tensor)
            return module
        tensors = dict(self._offloaded(module))
        self.original_devices = {
            name: tensor.device for name, tensor in named_module_tensors(module, recurse=self.place_submodules)
        }
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            set_tensor(module, name, tensor, torch.empty_like(tensor, device="meta"))
        if self.execution_device is not None:
            for name, buffer in list(module.named_buffers(recurse=self.place_submodules)):
                if name not in tensors and not buffer.is_meta:
                    self._put(module, name, buffer)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments on the execution device, where the weights are now.

        Args:
            module: the module of the hook.
        """
        if self.io_same_device:
            self.input_device = find_device((args, kwargs))
        if self.offload:
            assert self.weights_map is not None
            brought = self.read_ahead.take(self, self.weights_map) if self.read_ahead is not None else {}
            for name, tensor in list(self._offloaded(module)):
                if tensor.is_meta:
                    self._resting[name] = tensor
                if name in brought:
                    set_tensor(module, name, tensor, brought[name])
                else:
                    self._put(module, name, tensor, self.weights_map[name])
            self._read_ahead(module)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return *output*, on the input's device if that was requested; the weights leave.

        Args:
            module: the module of the hook.
        """
        self.forward_failed(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Take the weights away again.

        Args:
            module: the module of the hook.
        """
        if not self.offload:
            return
        for name, tensor in list(self._offloaded(module)):
            if not tensor.is_meta:
                self._put_away(module, name, tensor)
        self._resting = {}
        for address, device in self._borrowed:
            assert self.tied_params_map is not None
            self.tied_params_map.get(address, {}).pop(device, None)
        self._borrowed = []

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return *module* with its weights where they were before the hook came."""
        if self.offload:
            assert self.weights_map is not None
            if self.read_ahead is not None:
                self.read_ahead.give_up()
            tensors = dict(self._offloaded(module))
            for name, device in self.original_devices.items():
                if name in tensors and device.type != "meta":
                    set_tensor(module, name, tensors[name], self.weights_map[name].to(device))
        return module

    def _offloaded(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of *module* that this hook offloads, by name; buffers that no file has are none of them."""
        return named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )

    def _read_ahead(self, module: nn.Module) -> None:
        """Have the weights of the layer that comes after *module* brought while this one computes."""
        following = self.read_ahead.following(self, module) if self.read_ahead is not None else None
        if following is not None:
            hook, its = following
            wanted = {name: tensor.dtype for name, tensor in hook._offloaded(its)}
            self.read_ahead.start(hook, hook.weights_map, wanted, hook.tied_params_map or ())  # type: ignore[union-attr]

    def _put_away(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Put what stood there before the forward in the place of *tensor*, so that tied weights stay one parameter."""
        resting = self._resting.get(name)
        if resting is None or (resting.shape, resting.dtype) != (tensor.shape, tensor.dtype):
            set_tensor(module, name, tensor, torch.empty_like(tensor, device="meta"))
            return
        tensors, attribute = _place(module, name, tensor)
        tensors[attribute] = resting

    def _put(self, module: nn.Module, name: str, old: Tensor, value: Tensor | None = None) -> None:
        """Put *value* (or *old* itself) on the execution device as the tensor *name*."""
        source = old if value is None else value
        device = source.device if self.execution_device is None else as_device(self.execution_device)
        known = (self.tied_params_map or {}).get(source.data_ptr())
        if known is not None and device in known:
            set_tensor(module, name, old, known[device])
            return
        if known is None and value is None and source.device == device:
            return
        moved = source.detach().to(device, dtype=old.dtype if source.is_floating_point() else None, non_blocking=True)
        if known is not None:
            known[device] = moved
            if value is not None:  # brought for one forward
                self._borrowed.append((source.data_ptr(), device))
        if moved is not old:
            set_tensor(module, name, old, moved)


def as_device(device: Device) -> torch.device:
    """Return the device that *device* means: a number is one of the accelerator's."""
    if isinstance(device, int):
        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        return torch.device(accelerator.type if accelerator else "cuda", device)
    return torch.device(device)


def set_tensor(module: nn.Module, name: str, old: Tensor, value: Tensor) -> None:
    """Make *value* the tensor *name* of *module*, as the kind of parameter that *old* is."""
    tensors, attribute = _place(module, name, old)
    tensors[attribute] = moved_parameter(old, value) if isinstance(old, nn.Parameter) else value


def _place(module: nn.Module, name: str, tensor: Tensor) -> tuple[dict[str, Any], str]:
    """Return the table that holds *tensor*, the one with the name *name* in *module*, and its name there."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path) if path else module
    return (owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers), attribute


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: Keys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Have *module*, and every module in it that has weights, receive its inputs on *execution_device*.

    Modules that have a hook keep it; those in modules of *preload_module_classes* get none.

    Args:
        skip_keys: names of arguments that are not moved.
        tied_params_map: the weights that are on a device already, by address.
    """
    for one in _without_preloaded(module, preload_module_classes):
        if not hasattr(one, "_hf_hook") and len(one.state_dict()) > 0:
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(one, hook)


def _without_preloaded(module: nn.Module, preload: Sequence[str] | None) -> Iterator[nn.Module]:
    yield module
    if preload is not None and type(module).__name__ in preload:
        return
    for child in module.children():
        yield from _without_preloaded(child, preload)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add an `AlignDevicesHook` to every module in *module* that has weights of its own.

    Args:
        module: the module.
        execution_device: where forward runs.
        offload: keep the weights away between forwards.
        weights_map: the offloaded weights, by their names in the model.
        offload_buffers: offload the buffers too.
        module_name: the name of *module* in the model.
        skip_keys: keyword arguments that stay where they are.
        preload_module_classes: classes whose modules get all their weights at once, because their forward uses weights
            of the modules inside without calling these.
        tied_params_map: weights that several modules share, by address.
    """
    whole = offload and preload_module_classes is not None and type(module).__name__ in preload_module_classes
    if whole or next(named_module_tensors(module), None) is not None:
        prefix = f"{module_name}." if module_name else ""
        source = weights_map if weights_map is None or not prefix else PrefixedDataset(weights_map, prefix)
        hook = AlignDevicesHook(
            execution_device, offload, weights_map=source, offload_buffers=offload_buffers, place_submodules=whole,
            skip_keys=skip_keys, tied_params_map=tied_params_map,
        )  # fmt: skip
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child, execution_device, offload, weights_map, offload_buffers,
            f"{module_name}.{name}" if module_name else name, skip_keys, preload_module_classes, tied_params_map,
        )  # fmt: skip


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add hooks to the blocks of *module* that *execution_device* and *offload* name.

    A block that is not offloaded moves to its device as a whole; of one that is, each module with weights of its own
    gets them for its forward alone. The outermost module returns its output on the device of its input.

    Args:
        module: the module.
        execution_device: where forward runs: one device, or one by block.
        offload: keep weights away between forwards: one answer, or one by block.
        weights_map: the offloaded weights, by their names in the model.
        offload_buffers: offload the buffers too.
        module_name: the name of *module* in the model.
        skip_keys: keyword arguments that stay where they are.
        preload_module_classes: classes whose modules get all their weights at once.
        tied_params_map: weights that several modules share, by address.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if not offload:
            hook = AlignDevicesHook(
                execution_device, io_same_device=True, skip_keys=skip_keys, place_submodules=True,
                tied_params_map=tied_params_map,
            )  # fmt: skip
            add_hook_to_module(module, hook)
            return
        add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys), append=True)
        attach_align_device_hook(
            module, execution_device, True, weights_map, offload_buffers, module_name, skip_keys,
            preload_module_classes, tied_params_map,
        )  # fmt: skip
        return
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(offload, execution_device)  # type: ignore[arg-type]
    away = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    # First, because it has to see where the inputs were.
    add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys), append=True)

    def attach(block: nn.Module, name: str) -> None:
        device = devices.get(name)
        if device is not None and away.get(name):
            attach_align_device_hook(
                block, device, True, weights_map, offload_buffers, name, skip_keys, preload_module_classes,
                tied_params_map,
            )  # fmt: skip
        elif device is not None:
            hook = AlignDevicesHook(device, place_submodules=True, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(block, hook, append=True)
        if device is not None:
            attach_execution_device_hook(block, device, skip_keys, preload_module_classes, tied_params_map)
        for child_name, child in block.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, module_name)


def align_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    """Yield the hooks of *module* itself that align devices."""
    hook = vars(module).get("_hf_hook")
    for one in hook.hooks if isinstance(hook, SequentialHook) else (hook,):
        if isinstance(one, AlignDevicesHook):
            yield one


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook keeps the weights of *module* itself away between forwards."""
    return any(hook.offload for hook in align_hooks(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Bring the parameters of *module* itself to *execution_device* for a block; after it they are where they were.

    Offloaded ones come from where they are kept, to their hook's device by default, and what is written to them in the
    block is lost, unless they are kept in memory and the device is the CPU.
    """
    offloading = [hook for hook in align_hooks(module) if hook.offload]
    if offloading:
        hook = offloading[0]
        usual, ahead = hook.execution_device, hook.read_ahead
        hook.read_ahead = None  # no forward
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.forward_failed(module)
            hook.execution_device, hook.read_ahead = usual, ahead
        return
    if execution_device is None:
        yield
        return
    own = dict(module.named_parameters(recurse=False))
    try:
        for name, parameter in own.items():
            set_tensor(module, name, parameter, parameter.detach().to(as_device(execution_device)))
        yield
    finally:
        for name, parameter in own.items():
            moved = module._parameters[name]
            if moved is not None and not moved.is_meta and moved.data_ptr() != parameter.data_ptr():
                with torch.no_grad():
                    parameter.copy_(moved)  # what was written in the block stays
            module._parameters[name] = parameter
