"""Models whose weights lie on several devices, on the CPU or on the disk: each module computes on its device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.core.parsing import nearest
from orc.runtime.memory.device_map import check_device_map, find_tied_parameters, retie_parameters
from orc.runtime.weights.alignment import (
    AlignDevicesHook,
    Device,
    Keys,
    TiedTensors,
    align_hooks,
    as_device,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from orc.runtime.weights.hooks import add_hook_to_module
from orc.runtime.weights.offload import INDEX_NAME, Entry, OffloadedWeightsLoader, offload_state_dict
from orc.runtime.weights.read_ahead import ReadAhead

_MOVES = ("to", "cuda", "cpu", "xpu", "npu", "mps")


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep the weights of *model* on the CPU; each module gets its own on *execution_device* for its forward alone.

    Args:
        model: the model.
        execution_device: where forward runs; where the model is by default.
        offload_buffers: keep the buffers away too.
        state_dict: the weights on the CPU; the model's own by default. There is one copy of them.
        preload_module_classes: classes whose modules get all their weights at once, because their forward uses weights
            of the modules inside without calling these.

    Returns:
        *model*, changed in place.

    Raises:
        ValueError: this machine does not have the device.
    """
    device = _device_of(model) if execution_device is None else execution_device
    check_device(device, "execution_device: the model")
    if state_dict is None:
        _check_values(model.state_dict())
        state_dict = {name: value.detach().to("cpu") for name, value in model.state_dict().items()}
    weights: Mapping[str, Tensor] = state_dict
    return _offload(model, device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keep the weights of *model* in memory-mapped files in *offload_dir*; see `cpu_offload`.

    A folder that `offload_state_dict` has filled before is used as it is.

    Args:
        execution_device: where forward computes; the device of the first parameter unless given.
        offload_buffers: also move the buffers.
        preload_module_classes: names of classes whose weights are loaded at once with those of their parts.

    Returns:
        *model*, changed in place.

    Raises:
        ValueError: *offload_dir* holds the weights of another model.
        CheckpointError: there is no room for the weights.
    """
    folder = Path(offload_dir)
    device = _device_of(model) if execution_device is None else execution_device
    check_device(device, "execution_device: the model")
    if not (folder / INDEX_NAME).is_file():
        _check_values(model.state_dict())
        offload_state_dict(folder, model.state_dict())
    weights = OffloadedWeightsLoader(save_folder=folder)
    _check_kept(weights, dict(model.named_parameters()), folder)
    return _offload(model, device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module, device: Device, weights: Mapping[str, Tensor], buffers: bool, preload: Sequence[str] | None
) -> nn.Module:
    ties, tied = find_tied_parameters(model), _tied_tensors(model, weights)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model, device, True, weights, buffers, preload_module_classes=preload, tied_params_map=tied
    )  # fmt: skip
    _retie_where_together(model, ties)
    _read_ahead_on(model, device)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: Keys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Spread *model* over the devices of *device_map* and have each module compute on its own.

    Modules for the CPU (where the main device is another one) and for the disk compute on the main device; their
    weights are there during their forward alone. The plan stays in ``model.hf_device_map``.

    Args:
        model: the model; it is changed in place and returned.
        device_map: devices by module name: numbers of accelerators, ``"cpu"``, ``"disk"``. It covers every weight.
        main_device: where offloaded modules compute; by default the first device of the map that computes.
        state_dict: weights of the modules that are kept on the CPU; the model's own by default.
        offload_dir: folder with the weights for the disk. Without an index there, the model's own are written.
        offload_index: entries of the weights for the disk (`OffloadedWeightsLoader`), which may lie in the safetensors
            files of a checkpoint; then no folder is needed.
        offload_buffers: keep the buffers of offloaded modules away too.
        skip_keys: keyword arguments of forward that stay where they are.
        preload_module_classes: classes whose modules get all their weights at once.
        force_hooks: add hooks although there is one device only.

    Returns:
        *model*, changed in place.

    Raises:
        ValueError: the map leaves out a weight, names a module or a device that is not there, or weights are for the
            disk and neither a folder nor an index was given.
    """
    check_plan(model, device_map)
    places = list(dict.fromkeys(device_map.values()))
    main = main_device if main_device is not None else computing_device(device_map)
    check_device(main, "main_device: the model")
    if len(places) == 1 and places[0] != "disk" and not force_hooks:
        _check_values(dict(model.named_parameters()))
        tied = find_tied_parameters(model)
        model.to(as_device(places[0]))
        retie_parameters(model, tied)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    away = offloading_devices(main)
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    weights = _weights_away(model, device_map, away, on_disk, state_dict, offload_dir, offload_index)
    ties = find_tied_parameters(model)
    tied_map = _tied_tensors(model, weights)
    attach_align_device_hook_on_blocks(
        model,
        {name: main if device in away else device for name, device in device_map.items()},
        {name: device in away for name, device in device_map.items()},
        weights,
        offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied_map,
    )
    _retie_where_together(model, ties)
    _read_ahead_on(model, main)
    if any(device in away for device in places):
        for name in _MOVES:
            object.__setattr__(model, name, GuardedMove(model, name))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _weights_away(
    model: nn.Module,
    device_map: Mapping[str, Device],
    away: Sequence[str],
    on_disk: Sequence[str],
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Entry] | None,
) -> OffloadedWeightsLoader | None:
    """The weights of the modules that are offloaded: those for the CPU in memory, those for the disk mapped."""
    if not any(device in away for device in device_map.values()):
        return None
    state = model.state_dict()
    in_memory: Mapping[str, Tensor] = {}
    if "cpu" in away:
        held = state if state_dict is None else state_dict
        in_memory = {
            name: value.detach().to("cpu")
            for name, value in held.items()
            if module_device(name, device_map) == "cpu" and not value.is_meta
        }
    folder = None if offload_dir is None else Path(offload_dir)
    if on_disk and not offload_index:
        if folder is None:
            raise ValueError(
                f"the device_map puts {', '.join(on_disk[:3])} on the disk: say where their weights are, or go, with "
                "offload_dir (or offload_index)"
            )
        if not (folder / INDEX_NAME).is_file():
            for_the_disk = {name: value for name, value in state.items() if module_device(name, device_map) == "disk"}
            _check_values(for_the_disk)
            offload_state_dict(folder, for_the_disk)
    if folder is not None and offload_index is None and not (folder / INDEX_NAME).is_file():
        folder = None
    weights = OffloadedWeightsLoader(in_memory, folder, offload_index)
    away_now = {name: value for name, value in model.named_parameters() if module_device(name, device_map) in away}
    _check_kept(weights, away_now, "the offload_index" if offload_index else offload_dir)
    return weights


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Refuse to take weights from a model that has none.

    Raises:
        ValueError: some of *tensors* are on the meta device.
    """
    without = [name for name, value in tensors.items() if value.is_meta]
    if without:
        raise ValueError(
            f"{', '.join(without)} have no values (they are on the meta device): load_checkpoint_and_dispatch "
            "gives an empty model the weights of a checkpoint"
        )


def _check_kept(weights: OffloadedWeightsLoader, parameters: Mapping[str, Tensor], where: Any) -> None:
    """Refuse *weights* that are not those of *parameters*.

    Raises:
        ValueError: some are missing, or of another shape.
    """
    lacking = [name for name in parameters if name not in weights.all_keys]
    if lacking:
        raise ValueError(f"{where} holds the weights of another model: it lacks {', '.join(lacking)}")
    for name, parameter in parameters.items():
        shape = weights.index.get(name, {}).get("shape")
        if shape is not None and list(shape) != list(parameter.shape):
            raise ValueError(
                f"{where} holds the weights of another model: {name} has shape {tuple(shape)}, "
                f"the model's has {tuple(parameter.shape)}"
            )


def _read_ahead_on(model: nn.Module, device: Device) -> None:
    """Have the next layer's weights brought to *device* while one computes there, if it is one of CUDA.

    Elsewhere there is nothing to bring: on the CPU weights are used where they are mapped.
    """
    where = as_device(device)
    if where.type == "cuda":
        # By its number, because the thread that brings them has a current device of its own.
        number = torch.cuda.current_device() if where.index is None else where.index
        share_read_ahead(model, ReadAhead(torch.device("cuda", number)))


def share_read_ahead(model: nn.Module, read_ahead: ReadAhead) -> None:
    """Let all layers of *model* whose weights are offloaded have them brought by *read_ahead*."""
    for module in model.modules():
        for hook in align_hooks(module):
            if hook.offload:
                hook.read_ahead = read_ahead


def module_device(name: str, device_map: Mapping[str, Device]) -> Device:
    """Return the device of the weight *name*: that of the nearest module above it in *device_map*.

    Raises:
        ValueError: the map has none.
    """
    module = name
    while module and module not in device_map:
        module = module.rpartition(".")[0]
    if module not in device_map:
        raise ValueError(f"device_map names no device for {name}")
    return device_map[module]


class GuardedMove:
    """`to`, `cuda` or `cpu` of a model with offloaded modules: it is refused while they have hooks."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model. Raises `RuntimeError` while modules of it are offloaded."""
        if any(hook.offload for module in self.model.modules() for hook in align_hooks(module)):
            raise RuntimeError(
                "You can't move a model that has some modules offloaded to cpu or disk. Its inputs go to their devices "
                "by themselves; to have it elsewhere, load it with another device_map, or call "
                "orc.runtime.hooks.remove_hook_from_submodules(model) first."
            )
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


def get_state_dict_offloaded_model(model: nn.Module, strict: bool = True) -> dict[str, Tensor]:
    """Return the whole state dict of *model*, with the weights that hooks keep away (mapped, where they are files).

    Args:
        model: the model.
        strict: refuse a weight on the meta device that no hook keeps; else it is left as it is.

    Raises:
        ValueError: there is such a weight.
    """
    state = dict(model.state_dict())
    for name, value in state.items():
        if not value.is_meta:
            continue
        kept = _kept_by_a_hook(model, name)
        if kept is not None:
            state[name] = kept
        elif strict:
            raise ValueError(f"{name} has no values: it is on the meta device, and no hook keeps it")
    return state


def _kept_by_a_hook(model: nn.Module, name: str) -> Tensor | None:
    path, _, key = name.rpartition(".")
    while True:
        for hook in align_hooks(model.get_submodule(path) if path else model):
            if hook.weights_map is not None and key in hook.weights_map:
                return hook.weights_map[key]
        if not path:
            return None
        path, _, above = path.rpartition(".")
        key = f"{above}.{key}"


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters() if not parameter.is_meta), torch.device("cpu"))


def _tied_tensors(model: nn.Module, weights: Mapping[str, Tensor] | None) -> TiedTensors:
    """Return an empty entry for each weight that several modules share, by the address of its values."""
    tied: TiedTensors = {}
    for group in find_tied_parameters(model):
        for name in group:
            value = weights[name] if weights is not None and name in weights else model.get_parameter(name)
            if not value.is_meta:
                tied[value.data_ptr()] = {}
    return tied


def _retie_where_together(model: nn.Module, ties: Sequence[Sequence[str]]) -> None:
    """Make weights that are shared one parameter again on each device where several modules have them.

    The meta device is one of them: who saves an offloaded model tells by the parameter which weights are one.
    """
    for group in ties:
        by_device: dict[torch.device, list[str]] = {}
        for name in group:
            by_device.setdefault(model.get_parameter(name).device, []).append(name)
        retie_parameters(model, list(by_device.values()))


def computing_device(device_map: Mapping[str, Device]) -> Device:
    """Return the device where offloaded modules compute: the first of *device_map* that computes."""
    return next((device for device in device_map.values() if device not in ("cpu", "disk")), "cpu")


def offloading_devices(main: Device) -> tuple[str, ...]:
    """Return the devices that only keep weights, where the modules in *main* compute."""
    return ("disk",) if str(main) == "cpu" else ("cpu", "disk")


def check_plan(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Refuse a *device_map* that does not fit *model* or this machine.

    Raises:
        ValueError: it leaves out a weight, or names a module or a device that is not there.
    """
    if not isinstance(device_map, Mapping):
        raise ValueError(f"device_map is {device_map!r}: give a strategy's name, or devices by the names of modules")
    plain = {name: str(device) if isinstance(device, torch.device) else device for name, device in device_map.items()}
    check_device_map(model, plain)
    known = {name for name, _ in model.named_modules()} | set(model.state_dict())
    for name, device in device_map.items():
        if name not in known:
            raise ValueError(f"device_map: the model has no module {name!r}{nearest(name, known)}")
        if device not in ("cpu", "disk"):
            check_device(device, f"device_map: {name or 'the model'!r}")


def check_device(device: Device, what: str) -> None:
    """Refuse a *device* that this machine does not have.

    Args:
        device: the device.
        what: what is to be there, for the message.

    Raises:
        ValueError: it is not there.
    """
    try:
        torch.empty(0, device=as_device(device))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        count = torch.cuda.device_count()
        raise ValueError(
            f"{what} is for device {device!r}, which this machine does not have: "
            f"there are {count} accelerators, 'cpu' and 'disk' ({str(error).splitlines()[0]})"
        ) from None
