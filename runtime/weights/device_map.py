"""Assignment of modules to devices (numbers, ``cpu``, ``disk``), planned from sizes and memory limits."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.weights.sizes import (
    class_names,
    compute_module_sizes,
    convert_file_size_to_int,
    get_max_layer_size,
    named_module_tensors,
    top_level,
)

logger = logging.getLogger(__name__)

Device = int | str
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
        found: dict[Device, int] = dict(enumerate(_free_memory()))
        if not torch.backends.mps.is_available():
            found["cpu"] = _free_host_memory()
        else:
            found["mps"] = _free_host_memory()
        return found
    bad = [key for key in max_memory if not isinstance(key, int) and key not in ("cpu", "mps", "disk")]
    if bad:
        raise ValueError(f"max_memory: {bad[0]!r} is no device; use numbers of accelerators, 'cpu' and 'disk'")
    # A plan fills them in this order, whatever order they were written in.
    last: tuple[Device, ...] = ("mps", "cpu", "disk")
    order = [*sorted(key for key in max_memory if isinstance(key, int)), *(key for key in last if key in max_memory)]
    # Libraries compute limits as fractions of what is free.
    limits = {key: int(limit) if isinstance(limit, float) else limit for key, limit in max_memory.items()}
    found = {key: convert_file_size_to_int(limits[key]) for key in order}
    if isinstance(max_memory, dict):
        max_memory.update(found)
    return found


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
    largest, _ = get_max_layer_size(top_level(model), sizes, no_split_module_classes)
    share = -(-sizes[""] // (len(numbers) - 1 if low_zero else len(numbers)))
    # Layers do not fill a device exactly: allow as little more than the share as it takes to place them all.
    for more in (largest // 4, largest // 2, largest, 2 * largest):
        lowered = dict(limits)
        for key in numbers[:-1]:  # the last device takes what remains
            reserve = largest if key == numbers[0] else 0
            lowered[key] = min(limits[key], share + more + reserve)
        if low_zero:
            elsewhere = sum(lowered[key] for key in numbers[1:])
            lowered[numbers[0]] = min(max(0, sizes[""] - elsewhere), limits[numbers[0]])
        accelerators: dict[Device, int | str] = {key: lowered[key] for key in numbers}
        plan = infer_auto_device_map(
            model, accelerators, no_split_module_classes, dtype, special_dtypes, offload_buffers=True
        )
        if "disk" not in plan.values():
            return lowered
    return limits  # something has to be offloaded: then all strategies fill the devices in order


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
        owners = [(model.get_submodule(path), name) for path, _, name in (one.rpartition(".") for one in group)]
        found = [getattr(owner, name) for owner, name in owners]
        there = [one for one in found if one is not None]
        kept = next((one for one in there if not one.is_meta), there[0] if there else None)
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


@dataclass
class _Plan:
    """A plan being made: what may be used on each device, what is used, what was put where."""

    limits: dict[Device, int]
    placed: OrderedDict[str, Device] = field(default_factory=OrderedDict)
    used: dict[Device, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.devices: deque[Device] = deque([*(key for key in self.limits if key != "disk"), "disk"])
        accelerators = [key for key in self.limits if key not in ("cpu", "disk")]
        self.main = {*accelerators[:1], "cpu"}

    def room(self, reserve: int) -> float:
        """Bytes left on the device being filled, with *reserve* kept free where offloaded layers have to fit."""
        device = self.devices[0]
        limit = self.limits.get(device, float("inf"))
        return limit - self.used.get(device, 0) - (reserve if device in self.main else 0)

    def account(self, reserve: int) -> str:
        """Return what is on each device, in words."""
        return "; ".join(
            f"{device}: {self.used.get(device, 0)} of {limit} bytes used"
            + (f", {reserve} kept free for the largest layer" if device in self.main else "")
            for device, limit in self.limits.items()
        )

    def put(self, size: int, *names: str) -> None:
        """Put the modules *names* on the device being filled."""
        device = self.devices[0]
        self.placed.update(dict.fromkeys(names, device))
        self.used[device] = self.used.get(device, 0) + size
        logger.debug("%s on %s (%d bytes)", ", ".join(names), device, size)


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
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    whole = class_names(no_split_module_classes)
    plan = _Plan(get_max_memory(max_memory))
    waiting: deque[tuple[str, Any]] = deque(top_level(model))
    if sizes[""] <= plan.room(0):
        plan.put(sizes[""], *(name for name, _ in waiting))  # nothing is offloaded: no reserve is needed
        waiting.clear()
    else:
        _fill(plan, waiting, sizes, whole, find_tied_parameters(model), fallback_allocation)
    if not offload_buffers:
        _warn_of_buffers(model, plan, dtype, special_dtypes)
    result = OrderedDict(clean_device_map(plan.placed)) if clean_result else plan.placed
    if verbose:
        for name, device in result.items():
            logger.info("%s: %s", name or "the whole model", device)
    return result


def _fill(
    plan: _Plan,
    waiting: deque[tuple[str, Any]],
    sizes: Mapping[str, int],
    whole: tuple[str, ...],
    ties: list[list[str]],
    fallback: bool,
) -> None:
    largest: list[str] = []  # names of the largest layers that are still waiting
    reserve = 0
    while waiting:
        largest = [name for name in largest if not _is_placed(name, plan.placed)]
        if not largest:
            reserve, largest = get_max_layer_size(list(waiting), sizes, whole)
        name, module = waiting.popleft()
        partners = [one for one in waiting if _share(ties, name, one[0]) and not list(_children(one[1]))]
        together = sizes.get(name, 0) + sum(sizes.get(key, 0) for key, _ in partners)
        alone = sizes.get(name, 0)
        if together <= plan.room(reserve):
            plan.put(together, name, *(key for key, _ in partners))
            for one in partners:
                waiting.remove(one)
        elif partners and alone <= plan.room(reserve):
            plan.put(alone, name)
        elif type(module).__name__ not in whole and (parts := _parts(name, module)):
            waiting.extendleft(reversed(parts))
        else:
            waiting.appendleft((name, module))
            unused = plan.devices[0] not in plan.used
            small = _first_that_fits(waiting, sizes, whole, plan.room(reserve)) if fallback and unused else None
            if small is not None:
                plan.put(sizes.get(small, 0), small)
            else:
                plan.devices.popleft()
                if not plan.devices:
                    raise ValueError(
                        f"no device has room for {name}, which needs {alone} bytes ({plan.account(reserve)}); "
                        "raise the limits in max_memory"
                    )


def _children(module: Any) -> list[tuple[str, nn.Module]]:
    return [] if isinstance(module, Tensor) else list(module.named_children())


def _parts(name: str, module: Any) -> list[tuple[str, Any]]:
    return [(f"{name}.{key}", one) for key, one in top_level(module)] if _children(module) else []


def _under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _is_placed(name: str, placed: Mapping[str, Device]) -> bool:
    while name not in placed and name:
        name = name.rpartition(".")[0]
    return bool(name)


def _share(ties: list[list[str]], one: str, other: str) -> bool:
    """Return whether the modules (or parameters) *one* and *other* hold the same parameter."""
    return any(
        any(_under(name, one) for name in group) and any(_under(name, other) for name in group) for group in ties
    )


def _first_that_fits(
    waiting: deque[tuple[str, Any]], sizes: Mapping[str, int], whole: tuple[str, ...], room: float
) -> str | None:
    """The first layer that fits into *room*; it is taken out of *waiting*, the rest of its module stays there."""
    for place, (name, module) in enumerate(waiting):
        if 0 < sizes.get(name, 0) <= room:
            del waiting[place]
            return name
        if type(module).__name__ not in whole and (parts := _parts(name, module)):
            inside = deque(parts)
            found = _first_that_fits(inside, sizes, whole, room)
            if found is not None:
                after = list(waiting)[place + 1 :]
                while len(waiting) > place:
                    waiting.pop()
                waiting.extend([*inside, *after])
                return found
    return None


def _warn_of_buffers(
    model: nn.Module,
    plan: _Plan,
    dtype: torch.dtype | str | None,
    special_dtypes: Mapping[str, torch.dtype | str] | None,
) -> None:
    """Warn when the buffers of offloaded modules, which stay on the accelerator, do not fit there."""
    accelerators = [key for key in plan.limits if key not in ("cpu", "disk")]
    offloaded = [name for name, device in plan.placed.items() if device in ("cpu", "disk")]
    if not accelerators or not offloaded:
        return
    buffers = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)
    needed = sum(buffers.get(name, 0) for name in offloaded)
    main = accelerators[0]
    if needed > plan.limits[main] - plan.used.get(main, 0):
        import warnings

        warnings.warn(
            f"the buffers of the offloaded layers ({needed} bytes) do not fit on device {main} next to what is there; "
            "pass offload_buffers=True",
            stacklevel=3,
        )
