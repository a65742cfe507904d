"""Assignment of modules to devices (numbers, ``cpu``, ``disk``), planned from sizes and memory limits."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from orc.runtime.memory.filling import Device, Filling
from orc.runtime.memory.sizes import (
    compute_module_sizes,
    convert_file_size_to_int,
    get_max_layer_size,
    named_module_tensors,
    top_level,
)

logger = logging.getLogger(__name__)

MaxMemory = Mapping[Device, int | str]


# ---- memory


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[Device, int]:
    """Return the bytes that may be used on each device: accelerators by number, then ``cpu``.

    Args:
        max_memory: limits, in bytes or as text (``"10GiB"``), which becomes bytes in *max_memory* itself, because
            Transformers goes on with that one. Without them: what is free now, nine tenths of it on the accelerators.

    Raises:
        ValueError: a limit cannot be read, or belongs to no device.
    """
    if max_memory is None:
        limit_of: dict[Device, int] = dict(enumerate(_free_memory()))
        if not torch.backends.mps.is_available():
            limit_of["cpu"] = _free_host_memory()
        else:
            limit_of["mps"] = _free_host_memory()
        return limit_of
    bad = [key for key in max_memory if not isinstance(key, int) and key not in ("cpu", "mps", "disk")]
    if bad:
        raise ValueError(f"max_memory: {bad[0]!r} is no device; use numbers of accelerators, 'cpu' and 'disk'")
    # A plan fills them in this order, whatever order they were written in.
    last: tuple[Device, ...] = ("mps", "cpu", "disk")
    order = [*sorted(key for key in max_memory if isinstance(key, int)), *(key for key in last if key in max_memory)]
    # Libraries compute limits as fractions of what is free.
    limits = {key: int(limit) if isinstance(limit, float) else limit for key, limit in max_memory.items()}
    limit_of = {key: convert_file_size_to_int(limits[key]) for key in order}
    if isinstance(max_memory, dict):
        max_memory.update(limit_of)
    return limit_of


def _free_memory() -> list[int]:
    for module in (torch.cuda, getattr(torch, "xpu", None)):
        if module is not None and module.is_available():
            return [module.mem_get_info(index)[0] * 9 // 10 for index in range(module.device_count())]
    return []


def _free_host_memory() -> int:
    import os

    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 (one short read)
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return *max_memory* lowered so that a sequential plan spreads *model* evenly over all accelerators.

    Args:
        model: the model; it may be on the meta device.
        max_memory: limits per device; what is free by default.
        no_split_module_classes: names of classes whose modules stay whole.
        dtype: the weights' dtype, if they are going to be converted.
        special_dtypes: other dtypes for single weights.
        low_zero: leave as much as possible of device 0 free, for what a script does with the outputs.
    """
    limits = get_max_memory(max_memory)
    numbers = [key for key in limits if isinstance(key, int) and limits[key] > 0]
    if len(numbers) < 2:
        return limits
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    total = sizes[""]
    if total > sum(limits[key] for key in numbers):
        return limits  # something has to be offloaded: then all strategies fill the devices in order
    largest, _ = get_max_layer_size(top_level(model), sizes, no_split_module_classes)
    low_zero = low_zero and 0 in numbers
    first, spread = numbers[0], numbers[1:] if low_zero else numbers
    share = _even_share(total, [limits[key] for key in spread])
    lowest, best = [float("inf")], limits  # bytes by device, largest first
    # Layers do not fill a device exactly: allow as little more than the share as it takes to place them all.
    for slack in (largest * quarters // 4 for quarters in range(9)):
        lowered = {key: min(limits[key], share + slack) for key in spread}
        if low_zero:
            on_first = [max(0, total - sum(lowered.values()) + slack)]
        else:  # a plan keeps room for a layer there, unless it holds the whole model
            with_room = share + slack + largest
            on_first = [share + slack, with_room, min(with_room, total - 1)]
        for most in dict.fromkeys(on_first):
            lowered[first] = min(limits[first], most)
            plan = Filling(
                model, {key: lowered[key] for key in numbers}, no_split_module_classes, dtype, special_dtypes
            )
            plan.fill(fallback=False)
            loads = sorted(plan.used.values(), reverse=True)
            if not plan.used.get("disk") and loads < lowest:
                # The last device takes what is left in any case.
                lowest, best = loads, limits | lowered | {numbers[-1]: limits[numbers[-1]]}
        if lowest[0] <= share + slack:
            break
    return best


def _even_share(total: int, limits: Sequence[int]) -> int:
    """Return the bytes that each device takes at most, if devices with *limits* share *total* evenly."""
    share, waiting = 0, total
    for place, limit in enumerate(sorted(limits)):
        share = -(-waiting // (len(limits) - place))
        if share <= limit:
            break
        waiting -= limit
    return share


# ---- tied parameters


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return groups of names under which *model* has one and the same parameter, each sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make each group of names in *tied_params* one parameter again: the first off the meta device, if any.

    Args:
        model: the model of the names.
    """
    for group in tied_params:
        owners = [(model.get_submodule(path), name) for path, _, name in (tied.rpartition(".") for tied in group)]
        parameters = [getattr(owner, name) for owner, name in owners]
        there = [tied for tied in parameters if tied is not None]
        kept = next((tied for tied in there if not tied.is_meta), there[0] if there else None)
        for owner, name in owners:
            if kept is not None:
                owner._parameters[name] = kept if isinstance(kept, nn.Parameter) else nn.Parameter(kept)


# ---- maps


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Raise `ValueError` unless *device_map* has a device for every parameter and buffer of *model*."""
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    if "" in device_map:
        return
    missing = [name for name in names if not any(name == key or name.startswith(f"{key}.") for key in device_map)]
    if missing:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: " + ", ".join(missing)
        )


def clean_device_map(device_map: dict[str, Device], module_name: str = "") -> dict[str, Device]:
    """*device_map* with one entry for each module whose parts are all on one device. Changes it and returns it.

    Args:
        module_name: the module below which entries are joined; the whole model unless given.
    """
    cleaned = _cleaned(dict(device_map), module_name)
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def _cleaned(entries: dict[str, Device], module_name: str) -> dict[str, Device]:
    prefix = f"{module_name}." if module_name else ""
    depth = module_name.count(".") + 1 if module_name else 0
    inside = {name: device for name, device in entries.items() if name.startswith(prefix)}
    outside = {name: device for name, device in entries.items() if name not in inside}
    if len(inside) > 1 and len(set(inside.values())) == 1:
        return outside | {module_name: next(iter(inside.values()))}
    result: dict[str, Device] = {}
    for child in dict.fromkeys(".".join(name.split(".")[: depth + 1]) for name in inside):
        own = {name: device for name, device in inside.items() if name == child or name.startswith(f"{child}.")}
        result |= _cleaned(own, child) if len(own) > 1 else own
    return outside | result


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, Device]:
    """Return a device for every module of *model*: device 0 is filled first, then 1, ..., then the CPU, then the disk.

    A module that does not fit is split into its children, unless its class must stay whole. On the first accelerator
    and on the CPU room is kept for the largest layer that is still to be placed: layers that are offloaded have to fit
    there when they are used. Modules that share a weight stay together where they can. Nothing is moved.

    Args:
        model: the model; it may be on the meta device.
        max_memory: limits per device, in bytes or as text; what is free by default.
        no_split_module_classes: names of classes whose modules stay whole (blocks with a residual connection).
        dtype: the weights' dtype, if they are going to be converted.
        special_dtypes: other dtypes for single weights.
        verbose: print the decisions.
        clean_result: one entry where all parts of a module are on one device.
        offload_buffers: buffers of offloaded modules stay offloaded, and need no room on the accelerator.
        fallback_allocation: give a device that would stay empty, because the next layer is too large for it, the first
            layer that does fit.

    Raises:
        ValueError: a limit cannot be read, or there is room for a layer nowhere.
    """
    plan = Filling(model, get_max_memory(max_memory), no_split_module_classes, dtype, special_dtypes)
    plan.fill(fallback_allocation)
    if not offload_buffers and (lacking := plan.buffers_without_room()):
        needed, device = lacking
        warnings.warn(
            f"the buffers of the offloaded layers ({needed} bytes) do not fit on device {device} next to what is there "
            "and the largest of these layers; pass offload_buffers=True",
            stacklevel=2,
        )
    result = OrderedDict(clean_device_map(plan.placed)) if clean_result else plan.placed
    if verbose:
        for name, device in result.items():
            logger.info("%s: %s", name or "the whole model", device)
    return result
