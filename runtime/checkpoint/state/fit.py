"""Checks that a checkpoint's states fit the prepared objects, made before anything is changed.

What a model, an optimizer or a loader will take can be told from names, shapes and types. Everything else decides for
itself when it loads: it is tried first, and put back when anything on any rank does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from orc.runtime.checkpoint.errors import CheckpointError

# State of torch's optimizers that has the shape of its parameter, or of one that broadcasts to it.
LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "prev", "step_size", "ax"}
)
_LOADING = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")


def decides_itself(target: Any) -> bool:
    """Return whether only loading shows if *target* takes a state."""
    target = _bare(target)
    if isinstance(target, nn.Module):
        return any(_loads_itself(module) for module in target.modules())
    if isinstance(target, torch.optim.Optimizer):
        return not _is_torchs(target, ("load_state_dict", "state_dict")) or bool(
            target._optimizer_load_state_dict_pre_hooks  # they may translate what would not fit
        )
    return True


def problem(target: Any, state: Any, *, strict: bool = True) -> str | None:
    """Return why *target*, a model or an optimizer, would not take *state*; `None` where nothing speaks against it."""
    target = _bare(target)
    if decides_itself(target):
        return None
    if not isinstance(state, Mapping):
        return f"it holds a {type(state).__name__}, not a state"
    return _model_problem(target, state, strict) if isinstance(target, nn.Module) else _optimizer_problem(target, state)


def position_problem(state: Any) -> str | None:
    """Return why *state* is no position of a loader."""
    if not isinstance(state, Mapping):
        return f"it holds a {type(state).__name__}"
    for name in ("epoch", "rounds", "offset", "global_batch", "length"):
        value = state.get(name)
        if type(value) is not int or value < 0:
            return f"its {name} is {value!r}"
    if type(state.get("live")) is not bool:
        return f"its live is {state.get('live')!r}"
    if not isinstance(state.get("key"), (dict, type(None))):
        return f"its key is {state['key']!r}"
    generator = state.get("generator")
    if generator is not None and not (isinstance(generator, torch.Tensor) and generator.dtype == torch.uint8):
        return f"its generator is a {type(generator).__name__}, not the state of one"
    return None


def load_tentatively(undo: ExitStack, name: str, target: Any, load: Callable[[], None]) -> None:
    """Call *load*, which loads the state *name* into *target*; *undo* puts back what it had before.

    Raises:
        CheckpointError: the state does not fit.
    """
    before = _snapshot(target)
    undo.callback(_put_back, name, target, before)
    try:
        load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{name} does not fit what is prepared: {type(error).__name__}: {error}") from error


def _bare(target: Any) -> Any:
    return getattr(target, "optimizer", target) if isinstance(target, torch.optim.Optimizer) else target


def _loads_itself(module: nn.Module) -> bool:
    if any(getattr(module, name) for name in _HOOKS):
        return True
    return not _is_torchs(module, _LOADING)


def _is_torchs(target: Any, names: Iterable[str]) -> bool:
    """Return whether the methods *names* of *target* are those of torch."""
    return all(str(getattr(type(target), name).__module__).startswith("torch.") for name in names)


def _snapshot(target: Any) -> Any:
    target = _bare(target)
    state = target.state_dict()
    if isinstance(target, nn.Module):  # in host memory, which there is more of
        return {key: one.detach().to("cpu", copy=True) if isinstance(one, torch.Tensor) else copy.deepcopy(one)
                for key, one in state.items()}  # fmt: skip
    return copy.deepcopy(state)


def _put_back(name: str, target: Any, before: Any) -> None:
    try:
        _bare(target).load_state_dict(before)
    except Exception as error:
        raise CheckpointError(
            f"{name} does not fit, and what it was to replace could not be put back: {type(error).__name__}: {error}; "
            "start again instead of training on"
        ) from error


def _model_problem(model: nn.Module, state: Mapping[str, Any], strict: bool) -> str | None:
    # torch makes up for the count that old files of normalisation layers lack, and takes one element as a scalar.
    here = {name: value for name, value in model.state_dict().items()
            if name in state or not name.endswith("num_batches_tracked")}  # fmt: skip
    tensors = [name for name in here if isinstance(here[name], torch.Tensor) and name in state]
    odd = [f"{name} is a {type(state[name]).__name__}, not a tensor" for name in tensors
           if not isinstance(state[name], torch.Tensor)]  # fmt: skip
    given = sizes_of(state)
    given |= {name: here[name].shape for name in tensors if here[name].ndim == 0 and given[name] == (1,)}
    # What is no tensor, such as a module's extra state, decides by itself.
    lines = difference(sizes_of(here) | {name: None for name in here if name not in tensors}, given, strict)
    return "; ".join([*([lines] if lines else []), *odd]) or None


def sizes_of(state: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    """Return the sizes of the tensors in *state*, by name."""
    return {name: getattr(value, "shape", None) for name, value in state.items()}


def difference(
    here: Mapping[str, torch.Size | None], saved: Mapping[str, torch.Size | None], strict: bool = True
) -> str | None:
    """Return which names and sizes that are *saved* are not those *here*; with *strict* all names must be there."""
    lines = []
    for what, names in (("missing", here.keys() - saved.keys()), ("unexpected", saved.keys() - here.keys())):
        if names and strict:
            lines.append(f"{what}: {', '.join(sorted(names))}")
    for name in sorted(here.keys() & saved.keys()):
        mine, given = here[name], saved[name]
        if mine is not None and given is not None and mine != given:
            lines.append(f"size mismatch of {name}: {list(given)} in the checkpoint, {list(mine)} here")
    return "; ".join(lines) or None


def _optimizer_problem(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str | None:
    groups, values = state.get("param_groups"), state.get("state")
    try:
        saved = [list(group["params"]) for group in groups or ()]
    except (TypeError, KeyError):
        return "its param_groups are not those of an optimizer"
    if groups is None or not isinstance(values, Mapping) or not all(isinstance(v, Mapping) for v in values.values()):
        return "it is not the state of an optimizer"
    here = [group["params"] for group in optimizer.param_groups]
    if [len(group) for group in saved] != [len(group) for group in here]:
        return (
            f"it has parameter groups of {[len(group) for group in saved]} parameters, the optimizer here has "
            f"{[len(group) for group in here]}"
        )
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    for group, parameters in zip(saved, here, strict=True):
        for number, parameter in zip(group, parameters, strict=True):
            for key, value in values.get(number, {}).items():
                if key in LIKE_PARAMETER and isinstance(value, torch.Tensor) and not _like(value, parameter):
                    return (
                        f"size mismatch of {key} of parameter {number}: {list(value.shape)} in the checkpoint, the "
                        f"parameter here has {list(parameter.shape)}"
                    )
    return None


def _like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.numel() == 1 or value.shape == parameter.shape
