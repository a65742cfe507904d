"""Full state: one file per model and optimizer, as a single process without shards would write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state import fit
from orc.runtime.checkpoint.state.base import FULL, strategy_of_optimizer
from orc.runtime.checkpoint.state.sharding import (
    bare_optimizer,
    flattened,
    gathers_state,
    is_dtensor,
    models_of,
    names_by_position,
)
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.parallel.partition import Partition, part_of_optimizer, whole_model, whole_optimizer
from orc.runtime.parallel.shards import whole


class Full:
    """The strategy ``full``."""

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
            return dict(optimizer.state_dict()) if keep or gathers_state(optimizer) else {}
        bare = bare_optimizer(optimizer)
        if not flattened(stepped):
            return dict(whole(bare.state_dict(), keep=keep, on_cpu=True))
        from orc.runtime.checkpoint.state import fsdp1

        named = fsdp1.optimizer_state(bare, stepped, full=True)
        return fsdp1.numbered(named, stepped, keep)

    def model_problem(self, source: Mapping[str, Any], model: PreparedModel, *, strict: bool = True) -> str | None:
        """Return which names or sizes of *source* differ; under FSDP 1 loading alone shows it, on all ranks."""
        if model.layout is Layout.STAGED:
            source = _own(model, source)
        return None if model.layout is Layout.FLATTENED else fit.problem(model.bare, source, strict=strict)

    def optimizer_problem(
        self, source: Mapping[str, Any], optimizer: Any, models: Sequence[PreparedModel]
    ) -> str | None:
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

    def load_model(self, source: Mapping[str, Any], model: PreparedModel, *, strict: bool = True) -> None:
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

    def load_optimizer(self, source: Mapping[str, Any], optimizer: Any, models: Sequence[PreparedModel]) -> None:
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
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not is_dtensor(parameter):
        return value.clone() if isinstance(value, torch.Tensor) else value
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    alike = value.shape == parameter.shape
    placements = parameter.placements if alike else [Replicate()] * mesh.ndim  # type: ignore[attr-defined]
    # Every rank has the whole, so that cutting it needs no other.
    everywhere = DTensor.from_local(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, placements).clone()


STRATEGY = Full()
