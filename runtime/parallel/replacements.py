"""What became of parameters when their model was prepared: replaced, cut into shards, left to another stage.

The map is one for the process, because an optimizer may be prepared by another call than its model, and gradients
clipped of parameters of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

# What wrappers inside a model put into the names of parameters.
_INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

_STATE = (
    "the optimizer has state already, which cannot follow its parameters into shards: prepare it before its first "
    "step, or load the state afterwards"
)


@dataclass(slots=True)
class Stage:
    """Where a parameter lies of a model that is spread over processes by stages.

    Attributes:
        name: in the model that the script made.
        kept: by this process; optimizers let go of the others.
        counts: in norms: no earlier stage has it, too.
        group: the ranks that have the other stages.
    """

    name: str
    kept: bool
    counts: bool
    group: ProcessGroup


@dataclass(slots=True)
class Fate:
    """What became of a parameter when its model was prepared.

    Attributes:
        successor: what has taken its place.
        shards: the group whose ranks hold a part of it each, as version 1 of FSDP cuts it: in place.
        stage: its place in a pipeline.
    """

    successor: nn.Parameter | None = None
    shards: ProcessGroup | None = None
    stage: Stage | None = None


_fates: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter, which it does not keep alive
_AS_BEFORE = Fate()
_ORDER = "_orc_order"  # of an optimizer that has let go of parameters


def fate_of(parameter: Tensor) -> Fate:
    """Return what became of *parameter*."""
    # Not `get`: an optimizer's state may have keys that are no parameters, of which there is no weak reference.
    fate: Fate = _fates[parameter] if len(_fates) and parameter in _fates else _AS_BEFORE
    return fate


def note_shards(parameters: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Note that every rank of *group* holds a part of each of *parameters*; `None` is a group of one rank."""
    for parameter in parameters if group is not None else ():
        _fates.setdefault(parameter, Fate()).shards = group


def note_stages(
    names: Mapping[str, nn.Parameter], kept: Collection[str], elsewhere: Collection[str], group: ProcessGroup
) -> None:
    """Note that this process keeps those of the parameters in *names* that are *kept*, and ranks of *group* the others.

    A parameter with several names is kept if one of them is. Those *elsewhere* an earlier stage has, too.
    """
    here, there = {id(names[name]) for name in kept}, {id(names[name]) for name in elsewhere}
    for name, parameter in names.items():
        fate = _fates.setdefault(parameter, Fate())
        fate.stage = fate.stage or Stage(name, id(parameter) in here, id(parameter) not in there, group)


def order_of(optimizer: Optimizer) -> list[list[str]] | None:
    """Return the names of all parameters that *optimizer* had by group; `None` if it never let go of any."""
    return getattr(optimizer, _ORDER, None)


def replaced(old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """Note that the parameters in *new* take the place of those of the same names in *old*."""
    for name, parameter in old.items():
        if name in new and new[name] is not parameter:
            fate = _fates.setdefault(parameter, Fate())
            fate.successor = new[name]
            if fate.stage is not None:
                _fates.setdefault(new[name], Fate()).stage = fate.stage


@contextlib.contextmanager
def following(model: nn.Module) -> Iterator[None]:
    """A block in which parameters of *model* may be replaced in place: their names tell which became which."""
    before = named_parameters(model)
    yield
    replaced(before, named_parameters(model))


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Yield the parameters of *model* by the names that the script uses, tied ones under each of their names."""
    return {_bare(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """*model* on *device*; parameters that were one (tied weights) are one again.

    Raises:
        ValueError: it has parameters without content (of the meta device).
    """
    before = named_parameters(model)
    try:
        model = model.to(device)
    except NotImplementedError as error:
        empty = [name for name, parameter in before.items() if parameter.is_meta]
        if not empty:
            raise
        raise ValueError(
            f"{len(empty)} parameters ({empty[0]}, ...) are on the meta device, without content: load the weights "
            "before prepare (load_checkpoint_and_dispatch), or shard the model, which fills it piece by piece"
        ) from error
    after = named_parameters(model)
    if any(after.get(name) is not parameter for name, parameter in before.items()):
        _retie(model, before)
        replaced(before, named_parameters(model))
    return model


def _retie(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    from orc.runtime.memory.device_map import retie_parameters

    names: dict[int, list[str]] = {}
    for name, parameter in before.items():
        names.setdefault(id(parameter), []).append(name)
    retie_parameters(model, [group for group in names.values() if len(group) > 1])


def follow(optimizer: Optimizer) -> None:
    """Let *optimizer* train the new parameters where it has old ones, with the state that these have.

    Raises:
        ValueError: parameters of several groups have become one, or there is state that cannot be cut into shards.
    """
    if not len(_fates):
        return
    for parameter, state in optimizer.state.items():  # cut in place
        values = state.values() if fate_of(parameter).shards is not None and isinstance(state, dict) else ()
        if any(getattr(value, "numel", int)() not in (0, 1, parameter.numel()) for value in values):
            raise ValueError(_STATE)
    _let_go(optimizer)
    home: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        latest = [_latest(parameter) for parameter in group["params"]]
        if any(home.setdefault(id(parameter), index) != index for parameter in latest):
            raise ValueError(
                "parameters of different groups of the optimizer were joined when the model was sharded: set "
                "use_orig_params=True, or make the optimizer after prepare"
            )
    for group in optimizer.param_groups:
        latest = [_latest(parameter) for parameter in group["params"]]
        group["params"] = list({id(parameter): parameter for parameter in latest}.values())  # several may be one now
    for old in [parameter for parameter in optimizer.state if fate_of(parameter).successor is not None]:
        state = optimizer.state.pop(old)
        optimizer.state.setdefault(_latest(old), _state_of(old, _latest(old), state))


def _let_go(optimizer: Optimizer) -> None:
    """Let *optimizer* forget the parameters that only other stages have."""
    stages = [[fate_of(parameter).stage for parameter in group["params"]] for group in optimizer.param_groups]
    every = [stage for group in stages for stage in group]
    if order_of(optimizer) is not None or not any(every):
        return
    if not all(every):
        raise ValueError(
            f"{type(optimizer).__name__} steps parameters of a model that is spread over processes by stages, and "
            "others: make an optimizer for each"
        )
    setattr(optimizer, _ORDER, [[stage.name for stage in group if stage] for group in stages])
    for group, own in zip(optimizer.param_groups, stages, strict=True):
        group["params"] = [
            parameter for parameter, stage in zip(group["params"], own, strict=True) if stage and stage.kept
        ]
    for parameter in [old for old in optimizer.state if not (stage := fate_of(old).stage) or not stage.kept]:
        del optimizer.state[parameter]


def _state_of(old: Tensor, new: Any, state: Any) -> Any:
    """*state* of *old* for *new*: what has a value for each element is cut into shards as *new* is."""
    placements = getattr(new, "placements", None)
    if placements is None and new.shape == old.shape:
        return state
    if placements is None or not isinstance(state, dict):
        raise ValueError(_STATE)
    from torch.distributed.tensor import distribute_tensor

    def cut(value: Any) -> Any:
        if getattr(value, "shape", None) != new.shape:
            return value
        return distribute_tensor(value.to(new.device), new.device_mesh, placements)

    return {name: cut(value) for name, value in state.items()}


def _latest(parameter: Tensor) -> Tensor:
    while (successor := fate_of(parameter).successor) is not None:
        parameter = successor
    return parameter


def _bare(name: str) -> str:
    for infix in _INFIXES:
        name = name.replace(infix, "")
    return name
