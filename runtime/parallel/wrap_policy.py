"""Policies of sharding: which modules of a model are units, whose parameters are gathered and freed together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from orc.runtime.core.parsing import nearest

Policy = Callable[..., bool]


def known_classes(model: nn.Module) -> str:
    """Return the names of the classes of the modules in *model*, for messages."""
    return ", ".join(sorted({type(module).__name__ for module in model.modules()}))


def class_policy(model: nn.Module, names: list[str], *, every: bool = True) -> Policy:
    """Return torch's policy that makes units of the modules whose class has one of *names*.

    Raises:
        ValueError: *model* has no module of such a class; with *every* of any of them.
    """
    by_name = {type(module).__name__: type(module) for module in model.modules()}
    unknown = [name for name in names if name not in by_name]
    if unknown and (every or len(unknown) == len(names)):
        raise ValueError(
            f"no module of class {unknown[0]!r} to wrap{nearest(unknown[0], by_name)}: the model has "
            f"{known_classes(model)}"
        )
    classes = {by_name[name] for name in names if name in by_name}
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def size_policy(minimum: int) -> Policy:
    """Return torch's policy that makes units of at least *minimum* parameters."""
    return functools.partial(size_based_auto_wrap_policy, min_num_params=minimum)


def units(model: nn.Module, policy: Any, ignored: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules below *model* that *policy* makes units, inner ones first; *model* itself is always the last.

    A unit that shares a parameter with something outside of it would leave the two with copies that drift apart. Where
    *policy* names classes that is an error; units by size are chosen without such modules.

    Args:
        model: the model, not sharded yet.
        policy: a function of torch's kind (``module, recurse, nonwrapped_numel``), a policy object of torch or `None`.
        ignored: modules that stay whole.

    Raises:
        ValueError: a unit and another part of the model share a parameter.
    """
    skipped = {module for ignored_module in ignored for module in ignored_module.modules()}
    chosen: list[nn.Module] = []
    if policy is not None and hasattr(policy, "_run_policy"):
        wrapped = policy._run_policy(model, skipped, {})
        chosen = [module for module in reversed(list(model.modules())) if module in wrapped and module is not model]
    elif policy is not None:
        _collect(model, policy, skipped, chosen)
    by_size = getattr(policy, "func", None) is size_based_auto_wrap_policy
    kept = []
    for unit in chosen:
        if (shared := _shared_outside(model, unit)) is None:
            kept.append(unit)
        elif not by_size:
            raise ValueError(
                f"{type(unit).__name__} cannot be a unit of its own: its parameter {shared} is shared with another "
                "part of the model; leave that class out, so that both stand in the outermost unit"
            )
    return [*kept, model]


def _collect(module: nn.Module, policy: Policy, skipped: set[nn.Module], chosen: list[nn.Module]) -> int:
    """Add the units in *module* to *chosen*; returns how many parameters of *module* are in units."""
    own = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=own):
        return 0
    inside = 0
    for child in module.children():
        if child in skipped:
            continue
        within = _collect(child, policy, skipped, chosen)
        rest = sum(parameter.numel() for parameter in child.parameters()) - within
        if child not in chosen and policy(module=child, recurse=False, nonwrapped_numel=rest):
            chosen.append(child)
            within += rest
        inside += within
    return inside


def _shared_outside(model: nn.Module, unit: nn.Module) -> str | None:
    inner = set(unit.modules())
    own = {id(parameter): name for name, parameter in unit.named_parameters()}
    for module in model.modules():
        if module not in inner:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in own:
                    return own[id(parameter)]
    return None
