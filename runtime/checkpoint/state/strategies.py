"""State of models and optimizers: how it lies in a checkpoint, whose parameters it is of, and the strategies for it."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
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
    stepped = Stepped(optimizer, models)
    staged = any(model.layout is Layout.STAGED for model in stepped.models)
    return (wanted or SHARDED) if stepped.in_parts and not staged else FULL


# What compiling, checkpointing of activations and FSDP 1 put between a module's name and its children's.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


class Stepped:
    """What an optimizer steps.

    Attributes:
        optimizer: torch's, inside a prepared one.
        parameters: its parameters, by their positions in its ``state_dict``.
        models: those of the given ones whose parameters they are, in their order.
        partition: where the parameters lie, of which processes have different ones.
        flattened: only torch itself can name the parameters of one of the models.
    """

    def __init__(self, optimizer: Any, models: Sequence[PreparedModel]) -> None:
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        groups = getattr(self.optimizer, "param_groups", ())  # an optimizer of the script may have none
        self.parameters: list[torch.Tensor] = [parameter for group in groups for parameter in group["params"]]
        known = {id(parameter) for parameter in self.parameters}
        self.models = [model for model in models if any(id(one) in known for one in model.model.parameters())]
        partitions = (model.partition for model in self.models if model.partition is not None)
        self.partition: Partition | None = next(partitions, None)
        self.flattened = any(model.layout is Layout.FLATTENED for model in self.models)

    @property
    def in_parts(self) -> bool:
        """Whether this process holds a part of the parameters alone."""
        cut = any(hasattr(parameter, "full_tensor") for parameter in self.parameters)
        return cut or any(model.spread for model in self.models)

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the parameters by their positions, as in the models that the script wrote.

        With several models their number stands before the name. A parameter that several modules share has its first
        name.

        Raises:
            CheckpointError: a parameter is of none of the models.
        """
        known: dict[int, str] = {}
        for number, model in enumerate(self.models):
            prefix = f"{number}." if len(self.models) > 1 else ""
            for name, parameter in model.bare.named_parameters():
                known.setdefault(id(parameter), prefix + _WRAPPERS.sub("", name))
        unknown = [list(parameter.shape) for parameter in self.parameters if id(parameter) not in known]
        if unknown:
            raise CheckpointError(
                f"{type(self.optimizer).__name__} steps {len(unknown)} parameters of no prepared model (shapes "
                f"{', '.join(map(str, unknown[:4]))}): what it steps must be prepared with it, and after a model was "
                "sharded the optimizer needs its new parameters"
            )
        return {position: known[id(parameter)] for position, parameter in enumerate(self.parameters)}

    def named_state(self) -> dict[str, Any]:
        """Return the state of the optimizer by names of parameters instead of their positions."""
        names, state = self.names, self.optimizer.state_dict()
        return {
            "state": {names[position]: values for position, values in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[position] for position in group["params"]]}
                for group in state["param_groups"]
            ],
        }

    def positioned(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return what `named_state` has given as the optimizer's ``load_state_dict`` takes it.

        Raises:
            CheckpointError: the parameter groups are others.
        """
        here, positions = self.optimizer.param_groups, {name: position for position, name in self.names.items()}
        groups, first = [], 0
        if len(named["param_groups"]) != len(here):
            raise CheckpointError(
                f"it has {len(named['param_groups'])} parameter groups, the optimizer here has {len(here)}"
            )
        for number, (saved, group) in enumerate(zip(named["param_groups"], here, strict=True)):
            mine = list(range(first, first + len(group["params"])))
            first += len(mine)
            if differing := {self.names[position] for position in mine} ^ set(saved["params"]):
                raise CheckpointError(f"parameter group {number} has other parameters: {', '.join(sorted(differing))}")
            groups.append({**saved, "params": mine})
        state = {positions[name]: values for name, values in named["state"].items()}
        return {"state": state, "param_groups": groups}


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
        stepped = Stepped(optimizer, models)
        if stepped.partition is not None:
            with _fitting():
                return whole_optimizer(stepped.partition, stepped.optimizer, stepped.names, keep=keep)
        if not stepped.in_parts:
            # One that gathers its state from all processes is asked on all of them.
            return dict(optimizer.state_dict()) if keep or getattr(optimizer, "gathers_state", False) else {}
        if not stepped.flattened:
            return dict(whole(stepped.optimizer.state_dict(), keep=keep, on_cpu=True))
        from orc.runtime.checkpoint.state import fsdp1

        named = fsdp1.optimizer_state(stepped.optimizer, stepped.models, full=True)
        return fsdp1.numbered(named, stepped.models, keep)

    def model_problem(self, source: Any, model: PreparedModel, *, strict: bool = True) -> str | None:
        """Return which names or sizes of *source* differ; under FSDP 1 loading alone shows it, on all ranks."""
        if model.layout is Layout.STAGED:
            source = _own(model, source)
        return None if model.layout is Layout.FLATTENED else fit.problem(model.bare, source, strict=strict)

    def optimizer_problem(self, source: Any, optimizer: Any, models: Sequence[PreparedModel]) -> str | None:
        """Return which groups or sizes of *source* differ from those of *optimizer*."""
        stepped = Stepped(optimizer, models)
        if stepped.partition is not None:
            try:
                source = part_of_optimizer(stepped.optimizer, stepped.names, source)
            except ValueError as error:
                return str(error)
        if not stepped.flattened:
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
        stepped = Stepped(optimizer, models)
        try:
            if stepped.flattened:
                from orc.runtime.checkpoint.state import fsdp1

                fsdp1.load_numbered(stepped.optimizer, stepped.models, source)
            else:
                if stepped.partition is not None:
                    source = part_of_optimizer(stepped.optimizer, stepped.names, source)
                stepped.optimizer.load_state_dict(_sharded_like(source, stepped.parameters))
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the state does not fit the prepared optimizer: {error}") from error


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


def _sharded_like(state: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return *state* with this rank's parts in the place of tensors that have the shape of a sharded parameter."""
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
    models = records_of(prepared)
    spread = [type(model.model).__name__ for model in models if model.layout is not Layout.WHOLE]
    for optimizer in prepared.optimizers:
        stepped = Stepped(optimizer, models)
        if stepped.in_parts:
            spread.append(type(optimizer).__name__)
        if hasattr(stepped.optimizer, "consolidate_state_dict"):
            spread.append(type(stepped.optimizer).__name__)
    if spread:
        raise CheckpointError(
            f"save_state: rank 0 cannot save alone, each rank holds a part of {', '.join(dict.fromkeys(spread))}, and "
            f"{elsewhere}. Call save_state on every rank: take it out of `if accelerator.is_main_process`"
        )
