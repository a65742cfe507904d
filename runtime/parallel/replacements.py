"""Parameters that others take the place of when a model is prepared: moved to torch_xla, or cut into shards.

The map is one for the process, because an optimizer may be prepared by another call than its model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.utils.weak import WeakIdKeyDictionary

from orc.runtime.parallel.shards import shard_group, take_place

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

# What wrappers inside a model put into the names of parameters.
_INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")

_STATE = (
    "the optimizer has state already, which cannot follow its parameters into shards: prepare it before its first "
    "step, or load the state afterwards"
)

_new: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by old parameter; does not keep the old ones alive
# Parameters of models of which each process keeps a part, as the script made them: the name, and whether they are kept.
_parted: WeakIdKeyDictionary = WeakIdKeyDictionary()
_orders: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()


def parted(names: Mapping[str, nn.Parameter], kept: Collection[str]) -> None:
    """Note that this process keeps those of the parameters in *names* that are *kept*: optimizers let go of the others.

    A parameter with several names is kept if one of them is.
    """
    here = {id(names[name]) for name in kept}
    for name, parameter in names.items():
        if parameter not in _parted:
            _parted[parameter] = (name, id(parameter) in here)


def order_of(optimizer: Optimizer) -> list[list[str]] | None:
    """Return the names of all parameters that *optimizer* had by group; `None` if it never let go of any."""
    return _orders.get(optimizer)


def replaced(old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """Note that the parameters in *new* take the place of those of the same names in *old*."""
    for name, parameter in old.items():
        if name in new and new[name] is not parameter:
            _new[parameter] = new[name]
            take_place(parameter, new[name])


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
    from orc.runtime.weights.device_map import retie_parameters

    names: dict[int, list[str]] = {}
    for name, parameter in before.items():
        names.setdefault(id(parameter), []).append(name)
    retie_parameters(model, [group for group in names.values() if len(group) > 1])


def follow(optimizer: Optimizer) -> None:
    """Let *optimizer* train the new parameters where it has old ones, with the state that these have.

    Raises:
        ValueError: parameters of several groups have become one, or there is state that cannot be cut into shards.
    """
    for one, state in optimizer.state.items():  # cut in place, as version 1 of FSDP does with the original parameters
        values = state.values() if shard_group(one) is not None and isinstance(state, dict) else ()
        if any(getattr(value, "numel", int)() not in (0, 1, one.numel()) for value in values):
            raise ValueError(_STATE)
    if len(_parted):
        _let_go(optimizer)
    if not len(_new):
        return
    home: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            if home.setdefault(id(_latest(one)), index) != index:
                raise ValueError(
                    "parameters of different groups of the optimizer were joined when the model was sharded: set "
                    "use_orig_params=True, or make the optimizer after prepare"
                )
    for group in optimizer.param_groups:
        latest = [_latest(one) for one in group["params"]]
        group["params"] = list({id(one): one for one in latest}.values())  # several may have become one
    for old in [one for one in optimizer.state if one in _new]:
        state = optimizer.state.pop(old)
        optimizer.state.setdefault(_latest(old), _state_of(old, _latest(old), state))


def _let_go(optimizer: Optimizer) -> None:
    every = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer in _orders or not any(one in _parted for one in every):
        return
    if any(one not in _parted for one in every):
        raise ValueError(
            f"{type(optimizer).__name__} steps parameters of a model that is spread over processes by stages, and "
            "others: make an optimizer for each"
        )
    _orders[optimizer] = [[_parted[one][0] for one in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [one for one in group["params"] if _parted[one][1]]
    for one in [one for one in optimizer.state if not _parted[one][1]]:
        del optimizer.state[one]


def _state_of(old: torch.Tensor, new: Any, state: Any) -> Any:
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


def _latest(parameter: torch.Tensor) -> torch.Tensor:
    while parameter in _new:
        parameter = _new[parameter]
    return parameter


def _bare(name: str) -> str:
    for infix in _INFIXES:
        name = name.replace(infix, "")
    return name
