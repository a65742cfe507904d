"""The content of a save: what was asked for, the states of a rank, collected, and the files that it writes of them."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout, state_file
from orc.runtime.checkpoint.format.layout import CheckpointRoot, plain
from orc.runtime.checkpoint.format.state_file import without_aliases, write_tensors
from orc.runtime.checkpoint.replication.barrier import attempt
from orc.runtime.checkpoint.state import rng
from orc.runtime.checkpoint.state.staging import Stage
from orc.runtime.checkpoint.state.strategies import (
    FULL,
    engine_tasks,
    strategy_named,
    strategy_of,
    strategy_of_optimizer,
    without_engines,
)
from orc.runtime.checkpoint.storage.destination import Destination
from orc.runtime.checkpoint.storage.durable import Hashing
from orc.runtime.checkpoint.storage.remote import Location, RemoteRoot
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.checkpoint.state.planning import ShardPlans
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared

Hook = Callable[[list[torch.nn.Module], list[dict[str, Any]], str], None]


@dataclass(frozen=True)
class Progress:
    """Progress of training: optimizer steps, and the position of the loader that training reads.

    ``norms`` are the usual gradient norms by which updates are vetoed (`SpikeGuard.norms`).
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    norms: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of one save, as each rank passes them.

    directory:
        Where to; with `None` below *root*, numbered from *at_least* on and after what any machine has there.
    state:
        Name of the strategy that saves sharded models; with `None` each rank saves its shards.
    """

    directory: Location | None
    root: CheckpointRoot | RemoteRoot | None
    at_least: int
    progress: Progress
    safe: bool = True
    hooks: Sequence[Hook] = ()
    state: str | None = None  # strategy of sharded models
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # of engines that lay out their own part
    alone: bool = False  # rank 0 saves by itself


Task = Callable[[Hashing], None]
# What a rank is going to write, by file name; or the error that keeps it from doing so.
Content = dict[str, Task] | str


def capture(
    context: RunContext,
    prepared: Prepared,
    request: SaveRequest,
    destination: Destination,
    stage: Stage | None = None,
    *,
    shards: ShardPlans | None = None,
) -> Content:
    """Collect this rank's states, the second part of a save; with *stage* copied, so that training may go on.

    The hooks run on every rank, before; they may take weights off the list. The ranks agree on *shards*.

    Raises:
        CheckpointError: on every rank, they could not agree.
    """
    tasks: dict[str, Task] = {}
    collected: list[Collected] = []
    # First, while all ranks are sure to come: engines wait for each other.
    own, failure = attempt(lambda: engine_tasks(prepared, request.engine_options, _pickle, stage is not None))
    error = attempt(lambda: collected.append(_collect(context, prepared, request, destination)))[1] or failure
    if shards is not None:
        shards.agree(collected[0].sharded if collected else {}, error)
    if error is None:
        error = attempt(lambda: tasks.update(_tasks(context, request, destination, collected[0], stage, shards)))[1]
    return tasks | (own or {}) if error is None else error


@dataclass(frozen=True)
class Collected:
    """States that a rank is going to write: whole ones by file, and its part of sharded ones by folder."""

    weights: dict[str, dict[str, Any]]
    states: list[tuple[str, Any, bool]]
    sharded: dict[str, dict[str, Any]]


def _collect(context: RunContext, prepared: Prepared, request: SaveRequest, destination: Destination) -> Collected:
    destination.check_visible()
    all_models, prepared = prepared.models, without_engines(prepared)
    models = records_of(prepared)
    strategies = [strategy_named(strategy_of(model, request.state)) for model in models]
    weights = [
        strategy.model_state(model, keep=destination.leads) for strategy, model in zip(strategies, models, strict=True)
    ]
    in_shards = {id(weight) for weight, strategy in zip(weights, strategies, strict=True) if strategy.name != FULL}
    optimizers = [
        strategy_named(strategy_of_optimizer(optimizer, models, request.state)) for optimizer in prepared.optimizers
    ]
    optimizer_states = [
        strategy.optimizer_state(optimizer, models, keep=destination.leads)
        for strategy, optimizer in zip(optimizers, prepared.optimizers, strict=True)
    ]
    for hook in request.hooks:
        hook(list(all_models), weights, str(destination.hook_directory()))
    whole: dict[str, dict[str, Any]] = {}
    sharded: dict[str, dict[str, Any]] = {}
    for index, state in enumerate(weights):
        if id(state) in in_shards:
            sharded[layout.model_shards(index)] = {"model": state}
        elif destination.leads:
            whole[layout.model_file(index, request.safe)] = state
    states: list[tuple[str, Any, bool]] = []
    for index, (strategy, state) in enumerate(zip(optimizers, optimizer_states, strict=True)):
        if strategy.name != FULL:
            sharded[layout.optimizer_shards(index)] = {"optimizer": state}
        elif destination.leads:
            states.append((layout.numbered(layout.OPTIMIZER_NAME, index, "bin"), state, False))
    states += _states(prepared) if destination.leads else []
    return Collected(whole, states, sharded)


def _tasks(
    context: RunContext,
    request: SaveRequest,
    destination: Destination,
    collected: Collected,
    stage: Stage | None,
    shards: ShardPlans | None,
) -> dict[str, Task]:
    weights, states = collected.weights, collected.states
    weights, states = context.compute.to_cpu((weights, states))
    random_states = rng.capture(context.compute, context.device)
    mine = {} if shards is None else shards.values
    if stage is not None:
        weights, states, mine = stage.take((weights, states, mine))
    write_model = _write_weights if request.safe else _pickle
    tasks: dict[str, Task] = {name: partial(write_model, state) for name, state in weights.items()}
    if shards is not None:
        from orc.runtime.checkpoint.state.shard_files import write_shards

        for folder, values in mine.items():
            tasks[layout.shard_file(folder, context.rank)] = partial(write_shards, values, shards.lengths[folder])
        shards.values = {}
    for name, state, check in states:
        if check:
            _check_loadable(name, state)
        tasks[name] = partial(_pickle, state)
    tasks[layout.random_states_file(context.rank)] = partial(_pickle, random_states)
    return tasks


def _states(prepared: Prepared) -> list[tuple[str, Any, bool]]:
    """Return the name and state of all but models and optimizers, and whether it can hold objects of the user's own."""
    named: list[tuple[str, Any, bool]] = []
    for index, scheduler in enumerate(prepared.schedulers):
        named.append((layout.numbered(layout.SCHEDULER_NAME, index, "bin"), scheduler.state_dict(), True))
    for index, loader in enumerate(prepared.dataloaders):
        named.append((layout.numbered(layout.SAMPLER_NAME, index, "bin"), loader.state_dict(), False))
    if (scaler := prepared.current_scaler()) is not None:
        named.append((layout.SCALER_NAME, scaler.state_dict(), False))
    for index, registered in enumerate(prepared.custom):
        named.append((layout.custom_file(index), registered.state_dict(), True))
    return named


def _write_weights(state: Mapping[str, Any], file: Hashing) -> None:
    tensors, aliases = without_aliases(state)
    metadata = {"format": "pt"}
    if aliases:
        metadata["orc.aliases"] = json.dumps(aliases)
    write_tensors(file, tensors, metadata)


def _pickle(state: Any, file: Hashing) -> None:
    torch.save(plain(state), cast(IO[bytes], file))


def _check_loadable(name: str, state: Any) -> None:
    """Make sure that the safe loader will take *state*, without its tensors and arrays: those can always be loaded."""
    memory = io.BytesIO()
    torch.save(_without_tensors(plain(state)), memory)
    memory.seek(0)
    try:
        state_file.read(memory)
    except Exception as error:  # noqa: BLE001 - whatever the loader objects to
        reason = str(error).split("\n")[-1] or type(error).__name__
        raise CheckpointError(
            f"{name} could not be loaded again: its state_dict holds something else than tensors, arrays, "
            f"numbers, strings, lists and dictionaries ({reason.strip()}); return plain values, or allow the type with "
            "torch.serialization.add_safe_globals"
        ) from None


def _without_tensors(state: Any) -> Any:
    """*state* with dense tensors and arrays as `None`, in dictionaries, lists and tuples of the plain kinds."""
    if type(state) in (torch.Tensor, torch.nn.Parameter) or state_file.is_array(state):
        return None
    if type(state) in (dict, OrderedDict):
        return {key: _without_tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return [_without_tensors(value) for value in state]
    return state
