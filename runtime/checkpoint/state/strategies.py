"""State of models and optimizers: how it lies in a checkpoint, whose parameters it is of, and the strategies for it."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError, RanksElsewhere
from orc.runtime.checkpoint.state import fit
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.parallel.partition import Partition, part_of_optimizer, whole_model, whole_optimizer
from orc.runtime.parallel.records import records_of
from orc.runtime.parallel.shards import replicated, whole

if TYPE_CHECKING:
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.train.engine import OwnState

FULL, SHARDED = "full", "dcp"


def strategy_named(name: str) -> Full:
    """Return the strategy *name*: ``full`` or ``dcp``, whose part of torch is imported when it is requested."""
    if name == FULL:
        return Full()
    sharded: Full = importlib.import_module("orc.runtime.checkpoint.state.dcp").Sharded()
    return sharded


def strategy_wanted(plugin: Any) -> str | None:
    """Return the name of the strategy that an FSDP *plugin* requests with its ``state_dict_type``; `None` without."""
    wanted = getattr(plugin, "state_dict_type", None)
    if wanted is None:
        return None
    return FULL if str(getattr(wanted, "name", wanted)).upper().startswith("FULL") else SHARDED


def strategy_of(model: PreparedModel, wanted: str | None = None) -> str:
    """Return the name of the strategy that saves *model*: what is *wanted* for sharded models, `dcp` if nothing is.

    Models of which each process has other parameters are saved whole.
    """
    return (wanted or SHARDED) if model.layout in (Layout.SHARDED, Layout.FLATTENED) else FULL


def strategy_of_optimizer(optimizer: Any, models: Sequence[PreparedModel], wanted: str | None = None) -> str:
    """Return the name of the strategy that saves *optimizer*: that of the *models* whose parameters it steps."""
    parts = any(model.layout is Layout.STAGED for model in models_of(optimizer, models))
    return (wanted or SHARDED) if not parts and steps_parts(optimizer, models) else FULL


def steps_parts(optimizer: Any, models: Sequence[PreparedModel]) -> bool:
    """Return whether *optimizer* steps parameters of which this process holds a part alone, those of *models*."""
    sharded = [model for model in models if model.spread]
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())  # an optimizer of the script may have none
    cut = any(hasattr(parameter, "full_tensor") for group in groups for parameter in group["params"])
    return cut or bool(sharded and models_of(optimizer, sharded))


# What compiling, checkpointing of activations and FSDP 1 put between a module's name and its children's.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def flattened(models: Sequence[PreparedModel]) -> bool:
    """Return whether only torch itself can name the parameters of one of *models*."""
    return any(model.layout is Layout.FLATTENED for model in models)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside a prepared one."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def models_of(optimizer: Any, models: Sequence[PreparedModel]) -> list[PreparedModel]:
    """Return those of *models* whose parameters *optimizer* steps, in their order."""
    groups = getattr(bare_optimizer(optimizer), "param_groups", ())  # an optimizer of the script may have none
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    return [model for model in models if any(id(parameter) in stepped for parameter in model.model.parameters())]


def parameter_names(models: Sequence[PreparedModel]) -> dict[int, str]:
    """Return the name of each parameter by its ``id``, as in the model that the script wrote.

    With several models their number stands before the name. A parameter that several modules share has its first name.
    """
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        for name, parameter in model.bare.named_parameters():
            names.setdefault(id(parameter), (f"{number}." if len(models) > 1 else "") + _WRAPPERS.sub("", name))
    return names


def named_state(optimizer: Any, models: Sequence[PreparedModel]) -> dict[str, Any]:
    """Return the state of *optimizer* by names of parameters instead of their positions.

    Raises:
        CheckpointError: a parameter is of none of *models*.
    """
    bare = bare_optimizer(optimizer)
    names = names_by_position(bare, models)
    state = bare.state_dict()
    return {
        "state": {names[position]: values for position, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[position] for position in group["params"]]} for group in state["param_groups"]
        ],
    }


def positioned_state(optimizer: Any, models: Sequence[PreparedModel], named: dict[str, Any]) -> dict[str, Any]:
    """Return what `named_state` has given as the optimizer's ``load_state_dict`` takes it.

    Raises:
        CheckpointError: the parameter groups are others.
    """
    bare = bare_optimizer(optimizer)
    names = names_by_position(bare, models)
    positions = {name: position for position, name in names.items()}
    groups, first = [], 0
    if len(named["param_groups"]) != len(bare.param_groups):
        raise CheckpointError(
            f"it has {len(named['param_groups'])} parameter groups, the optimizer here has {len(bare.param_groups)}"
        )
    for number, (saved, here) in enumerate(zip(named["param_groups"], bare.param_groups, strict=True)):
        mine = list(range(first, first + len(here["params"])))
        first += len(mine)
        if differing := {names[one] for one in mine} ^ set(saved["params"]):
            raise CheckpointError(f"parameter group {number} has other parameters: {', '.join(sorted(differing))}")
        groups.append({**saved, "params": mine})
    state = {positions[name]: values for name, values in named["state"].items()}
    return {"state": state, "param_groups": groups}


def names_by_position(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel]) -> dict[int, str]:
    """Return the names of the parameters of *optimizer* by their positions in its ``state_dict``."""
    names = parameter_names(models)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = [list(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} steps {len(unknown)} parameters of no prepared model (shapes "
            f"{', '.join(map(str, unknown[:4]))}): what it steps must be prepared with it, and after a model was "
            "sharded the optimizer needs its new parameters"
        )
    return {position: names[id(parameter)] for position, parameter in enumerate(parameters)}


def own_state_of(prepared: Prepared) -> OwnState | None:
    """Return what the engine of *prepared* lays out by itself; `None` where that is nothing."""
    return None if prepared.engine is None else prepared.engine.own_state


def without_engines(prepared: Prepared) -> Prepared:
    """Return *prepared* without what its engine lays out by itself; the same object where that is nothing."""
    if (own := own_state_of(prepared)) is None:
        return prepared
    return dataclasses.replace(
        prepared,
        models=[model for model in prepared.models if not own.covers(model)],
        optimizers=[optimizer for optimizer in prepared.optimizers if not own.covers(optimizer)],
        schedulers=[scheduler for scheduler in prepared.schedulers if not own.covers(scheduler)],
    )


class Full:
    """The strategy ``full``.

    ``..._state`` and ``load_...`` are called on every rank, and may exchange tensors; ``..._problem`` changes nothing
    and needs no other rank. A source is what was read from the file; that of the strategy ``dcp``, which has the same
    methods, the folder of shards.
    """

    name = FULL

    def model_state(self, model: PreparedModel, *, keep: bool = True) -> dict[str, Any]:
        """Return all weights under the names of the model that the script wrote; of a sharded model on the CPU.

        Empty on ranks that are not to *keep* those of a sharded model, which take part in gathering them.
        """
        if model.layout is Layout.STAGED:
            return whole_model(model.partition, model.bare.state_dict(), keep=keep)
        if not model.spread:
            return dict(model.bare.state_dict())
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if model.layout is Layout.FLATTENED:
            from orc.runtime.checkpoint.state import fsdp1

            state = get_model_state_dict(model.model, options=fsdp1.whole([model]))
            return dict(state) if keep else {}
        return dict(whole(get_model_state_dict(model.model), keep=keep, on_cpu=True))

    def optimizer_state(self, optimizer: Any, models: Sequence[PreparedModel], *, keep: bool = True) -> dict[str, Any]:
        """Return the state by positions of parameters, as the optimizer's ``state_dict`` does."""
        stepped = models_of(optimizer, models)
        if (partition := _parts(stepped)) is not None:
            bare = bare_optimizer(optimizer)
            with _fitting():
                return whole_optimizer(partition, bare, names_by_position(bare, stepped), keep=keep)
        if strategy_of_optimizer(optimizer, models) == FULL:
            # One that gathers its state from all processes is asked on all of them.
            return dict(optimizer.state_dict()) if keep or getattr(optimizer, "gathers_state", False) else {}
        bare = bare_optimizer(optimizer)
        if not flattened(stepped):
            return dict(whole(bare.state_dict(), keep=keep, on_cpu=True))
        from orc.runtime.checkpoint.state import fsdp1

        named = fsdp1.optimizer_state(bare, stepped, full=True)
        return fsdp1.numbered(named, stepped, keep)

    def model_problem(self, source: Any, model: PreparedModel, *, strict: bool = True) -> str | None:
        """Return which names or sizes of *source* differ; under FSDP 1 loading alone shows it, on all ranks."""
        if model.layout is Layout.STAGED:
            source = _own(model, source)
        return None if model.layout is Layout.FLATTENED else fit.problem(model.bare, source, strict=strict)

    def optimizer_problem(self, source: Any, optimizer: Any, models: Sequence[PreparedModel]) -> str | None:
        """Return which groups or sizes of *source* differ from those of *optimizer*."""
        stepped = models_of(optimizer, models)
        if _parts(stepped) is not None:
            bare = bare_optimizer(optimizer)
            try:
                source = part_of_optimizer(bare, names_by_position(bare, stepped), source)
            except ValueError as error:
                return str(error)
        if not flattened(stepped):
            return fit.problem(optimizer, source)
        saved, here = len(source["param_groups"]), len(optimizer.param_groups)
        return None if saved == here else f"it has {saved} parameter groups, the optimizer here has {here}"

    def load_model(self, source: Any, model: PreparedModel, *, strict: bool = True) -> None:
        """Load the whole *source*, which every rank has, into a sharded *model*.

        Raises:
            CheckpointError: it does not fit.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, strict=strict)
        staged = model.layout is Layout.STAGED
        target, source = (model.bare, _own(model, source)) if staged else (model.model, source)
        try:
            set_model_state_dict(target, dict(source), options=options)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"it does not fit the prepared model: {error}") from error

    def load_optimizer(self, source: Any, optimizer: Any, models: Sequence[PreparedModel]) -> None:
        """Load the whole *source* by positions, which every rank has, into an *optimizer* of sharded parameters."""
        bare, stepped = bare_optimizer(optimizer), models_of(optimizer, models)
        try:
            if flattened(stepped):
                from orc.runtime.checkpoint.state import fsdp1

                fsdp1.load_numbered(bare, stepped, source)
            else:
                if _parts(stepped) is not None:
                    source = part_of_optimizer(bare, names_by_position(bare, stepped), source)
                bare.load_state_dict(_sharded_like(source, bare))
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the state does not fit the prepared optimizer: {error}") from error


def _parts(models: Sequence[PreparedModel]) -> Partition | None:
    """Return where the parameters of *models* lie, of which processes have different ones."""
    return next((model.partition for model in models if model.partition is not None), None)


def _own(model: PreparedModel, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return *source* without what other processes have of *model*."""
    own, others = model.bare.state_dict().keys(), set(model.partition.names)
    return {name: value for name, value in source.items() if name in own or name not in others}


@contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _sharded_like(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return *state* with this rank's parts in the place of tensors that have the shape of a sharded parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    by_place = dict(zip(places, parameters, strict=True))
    return {
        "state": {
            place: {key: _part(value, by_place[place]) for key, value in values.items()}
            for place, values in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def _part(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not hasattr(parameter, "full_tensor"):
        return value.clone() if isinstance(value, torch.Tensor) else value
    from torch.distributed.tensor import Replicate

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    alike = value.shape == parameter.shape
    placements = parameter.placements if alike else [Replicate()] * mesh.ndim  # type: ignore[attr-defined]
    # Every rank has the whole, so that cutting it needs no other.
    return replicated(value.to(mesh.device_type), mesh).redistribute(mesh, placements).clone()


def check_savable_alone(prepared: Prepared, elsewhere: RanksElsewhere) -> None:
    """Refuse what rank 0 does not have whole.

    Raises:
        CheckpointError: a model or optimizer is spread over the ranks.
    """
    models, optimizers = records_of(prepared), prepared.optimizers
    spread = [type(model.model).__name__ for model in models if model.layout is not Layout.WHOLE]
    spread += [type(optimizer).__name__ for optimizer in optimizers if steps_parts(optimizer, models)]
    spread += [
        type(inner).__name__
        for optimizer in optimizers
        if hasattr(inner := getattr(optimizer, "optimizer", optimizer), "consolidate_state_dict")
    ]
    if spread:
        raise CheckpointError(
            f"save_state: rank 0 cannot save alone, each rank holds a part of {', '.join(dict.fromkeys(spread))}, and "
            f"{elsewhere}. Call save_state on every rank: take it out of `if accelerator.is_main_process`"
        )
