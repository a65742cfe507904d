"""Loading: everything is verified on all ranks before anything is changed on any."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError, RankMissing
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.manifest import Manifest
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.state import fit, rng, strategy_named
from orc.runtime.checkpoint.state.base import FULL, SHARDED, steps_parts
from orc.runtime.checkpoint.state.by_engine import engine_problem, own_state_of, without_engines
from orc.runtime.checkpoint.state.placing import placed, read_state, unmapped, unpickle
from orc.runtime.checkpoint.storage.copying import CopyQueue
from orc.runtime.checkpoint.verified import READ_PATIENCE_S, Verified, tell
from orc.runtime.collectives.tree import recursively_apply
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.data.plan import PositionError
from orc.runtime.data.position import next_epoch
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared

Hook = Callable[[list[torch.nn.Module], str], None]


def load(
    context: RunContext,
    barrier: Barrier,
    prepared: Prepared,
    checked: Verified,
    *,
    hooks: Sequence[Hook] = (),
    map_location: Any = None,
    model_options: Mapping[str, Any] | None = None,
    roll_over: bool = False,
) -> None:
    """Load the verified checkpoint into everything that is prepared or registered.

    With *roll_over* a loader that had yielded the last batch of an epoch is at the start of the next one.

    Raises:
        CheckpointError: on every rank, something prepared on any has no counterpart in the checkpoint, or does not fit
            it; everything is as it was before.
    """
    directory, manifest = checked.directory, checked.manifest
    options = dict(model_options or {})
    everything, prepared = prepared, without_engines(prepared)
    states: dict[str, Any] = {}
    random_states: Any = None
    error: str | None = None
    with _not_awaited(barrier, "load_state (reading)"):
        try:
            if (wrong := engine_problem(everything, manifest)) is not None:
                raise CheckpointError(f"{directory} does not fit what is prepared: {wrong}. Nothing was loaded")
            names = _names(prepared, manifest.files)
            _check_counterparts(directory, manifest, names)
            for name in names:
                # An optimizer's counts of steps would stay where they are read to, and be waited for at every step.
                placed_by_torch = name.startswith(layout.OPTIMIZER_NAME)
                states[name] = unpickle(directory / name, None if placed_by_torch else map_location)
            _check_states(directory, prepared, states, manifest.files)
            _check_shards(directory, manifest, prepared)
            if roll_over:
                for index in range(len(prepared.dataloaders)):
                    name = layout.numbered(layout.SAMPLER_NAME, index, "bin")
                    states[name] = next_epoch(states[name])
            _check_positions(context, directory, prepared, states)
            checked.bring({layout.random_states_file(context.topology.rng_source_rank)} & manifest.files.keys())
            random_states = _random_states(context, directory, manifest)
        except CheckpointError as failure:
            error = str(failure)
    # Hooks may load something by themselves: not before the rest is known to fit.
    barrier.hold("load_state (reading)", error, _agree, timeout_s=READ_PATIENCE_S)
    modules = list(everything.models)
    models: list[PreparedModel] = []
    with _not_awaited(barrier, "load_state (checking)"):
        for hook in hooks:
            hook(modules, str(directory))
        models = [record for record in records_of(prepared, modules) if record.layout is not Layout.OF_ENGINE]
        error = _error_of(lambda: _check_models(directory, manifest, models, options))
        if error is None and checked.source is not None:
            error = _error_of(lambda: checked.bring(_shards_read(directory, manifest, prepared, models), shared=True))
    tried = {
        index
        for index, model in enumerate(models)
        if not (model.spread or _in_shards(manifest, layout.model_shards(index))) and fit.decides_itself(model.bare)
    }
    # Until here nothing has changed anywhere; what can be known to fail has failed on all ranks.
    barrier.hold("load_state (checking)", error, _agree, timeout_s=READ_PATIENCE_S)
    with ExitStack() as undo:
        with _not_awaited(barrier, "load_state (trying)"):
            error = _error_of(lambda: _try(undo, context, checked, prepared, states, random_states))
            for index, model in enumerate(models):
                if error is None and index in tried:
                    load_it = partial(_load_model, directory, manifest, index, model, map_location, options)
                    name = _model_path(directory, manifest, index).name
                    error = _error_of(partial(fit.load_tentatively, undo, name, model.bare, load_it))
        barrier.hold("load_state (trying)", error, _agree, timeout_s=READ_PATIENCE_S)
        undo.pop_all()
    if (own := own_state_of(everything)) is not None:
        own.load(directory, modules, options)
    with CopyQueue() as copies:
        # What can be read straight into its place is, in threads; the rest goes the way of its kind.
        weights = _whole_weights(directory, manifest, models, map_location)
        copies.read_from(*weights, *(directory / name for name in states))
        ready = {}
        sharded = _sharded_optimizers(prepared)
        for name, optimizer in _optimizers(prepared, manifest.files).items():
            if name not in sharded:
                ready[name] = unmapped(states.pop(name), copies, optimizer.state_dict())
        if not options.get("assign"):
            for path, (state, model) in weights.items():
                weights[path] = placed(state, model.bare, copies), model
        for index, model in enumerate(models):
            if index not in tried and (model.spread or _in_shards(manifest, layout.model_shards(index))):
                _load_model(directory, manifest, index, model, map_location, options)
        _load_shards(directory, manifest, prepared)
        copies.wait()
        for path, (state, model) in weights.items():
            _load_weights(path, state, model, options)
        for name, target in _names(prepared, manifest.files).items():
            if name in sharded:
                strategy_named(FULL).load_optimizer(states.pop(name), target, records_of(prepared))
                continue
            state = ready.pop(name) if name in ready else unmapped(states.pop(name), copies)
            copies.wait()
            try:
                target.load_state_dict(state)
            except (ValueError, KeyError, RuntimeError) as failure:
                raise CheckpointError(f"{directory / name} does not fit what is prepared: {failure}") from failure
            del state
    if context.is_main and manifest.random_states is not None and context.world_size > 1:
        tell(
            f"{directory} was saved by rank 0 alone, with its random states: those of the other ranks are made anew, "
            "as for another number of processes"
        )
    if random_states is None:
        rng.reseed(manifest.id, context.topology.data_rank)
    else:
        rng.restore(random_states, context.device, context.compute)


def _try(
    undo: ExitStack,
    context: RunContext,
    checked: Verified,
    prepared: Prepared,
    states: Mapping[str, Any],
    random_states: Any,
) -> None:
    """Load what decides by itself whether a state fits, into its place; *undo* puts everything back."""
    if random_states is not None:
        undo.callback(rng.restore, rng.capture(context.compute, context.device), context.device, context.compute)
        rng.restore(random_states, context.device, context.compute)
    loaders = _loaders(prepared)
    for name, target in _names(prepared, checked.manifest.files).items():
        if name not in loaders and fit.decides_itself(target):
            # As it is mapped, in containers of its own: it needs no memory beside the copy of what it replaces.
            state = recursively_apply(lambda one: one, states[name])
            fit.load_tentatively(undo, str(checked.directory / name), target, partial(target.load_state_dict, state))


@contextmanager
def _not_awaited(barrier: Barrier, what: str) -> Iterator[None]:
    """At the barrier *what*, which follows, the others do not wait for a rank whose own code fails here."""
    try:
        yield
    except Exception as failure:
        with suppress(CheckpointError):
            barrier.hold(what, [f"{type(failure).__name__}: {failure}"], _agree, timeout_s=READ_PATIENCE_S)
        raise


def _agree(errors: list[Any]) -> None:
    """A verdict: as `agree_on_no_error`, but an error of a rank's own code is no fault of the checkpoint."""
    failed = [f"rank {rank} failed: {error[0]}" for rank, error in enumerate(errors) if isinstance(error, list)]
    if failed:
        raise RankMissing("load_state: " + "; ".join(failed))
    agree_on_no_error(errors)


def _error_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def _optimizers(prepared: Prepared, files: Collection[str] = ()) -> dict[str, Any]:
    """File names of the optimizers, but of those whose state lies in shards among *files*."""
    return {
        layout.numbered(layout.OPTIMIZER_NAME, index, "bin"): optimizer
        for index, optimizer in enumerate(prepared.optimizers)
        if layout.shard_metadata(layout.optimizer_shards(index)) not in files
    }


def _loaders(prepared: Prepared) -> dict[str, Any]:
    """File names of the loaders."""
    return {
        layout.numbered(layout.SAMPLER_NAME, index, "bin"): loader for index, loader in enumerate(prepared.dataloaders)
    }


def _names(prepared: Prepared, files: Collection[str] = ()) -> dict[str, Any]:
    """File names of everything but models, random states and what lies in shards among *files*, with its object."""
    named = _optimizers(prepared, files)
    for index, scheduler in enumerate(prepared.schedulers):
        named[layout.numbered(layout.SCHEDULER_NAME, index, "bin")] = scheduler
    named |= _loaders(prepared)
    if (scaler := prepared.current_scaler()) is not None:
        named[layout.SCALER_NAME] = scaler
    for index, registered in enumerate(prepared.custom):
        named[layout.custom_file(index)] = registered
    return named


def _check_counterparts(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    missing = [name for name in names if name not in manifest.files]
    if missing:
        raise CheckpointError(
            f"{directory} holds no {', '.join(missing)}: more is prepared or registered here than when it was saved; "
            "load into the same script's objects"
        )


def _check_states(directory: Path, prepared: Prepared, states: Mapping[str, Any], files: Collection[str] = ()) -> None:
    loaders, sharded = _loaders(prepared), _sharded_optimizers(prepared)
    for name, target in _names(prepared, files).items():
        if name in sharded:
            wrong = strategy_named(FULL).optimizer_problem(states[name], target, records_of(prepared))
        else:
            wrong = fit.position_problem(states[name]) if name in loaders else fit.problem(target, states[name])
        if wrong is not None:
            kind = "is no position of a loader" if name in loaders else "does not fit what is prepared"
            raise CheckpointError(f"{directory / name} {kind}: {wrong}. Nothing was loaded")


def _check_models(
    directory: Path, manifest: Manifest, models: Sequence[PreparedModel], options: Mapping[str, Any]
) -> None:
    by_shards = _sharded_models(manifest, models)
    paths = [_model_path(directory, manifest, index) for index in range(len(models))]
    _check_counterparts(directory, manifest, [path.name for index, path in enumerate(paths) if index not in by_shards])
    for index, (path, model) in enumerate(zip(paths, models, strict=True)):
        strict = options.get("strict", True)
        if index in by_shards:
            path = directory / layout.model_shards(index)
            wrong = strategy_named(SHARDED).model_problem(path, model, strict=strict)
        else:
            wrong = strategy_named(FULL).model_problem(read_state(path), model, strict=strict)
        if wrong is not None:
            raise CheckpointError(f"{path} does not fit the prepared model: {wrong}. Nothing was loaded")


def _in_shards(manifest: Manifest, folder: str) -> bool:
    return layout.shard_metadata(folder) in manifest.files


def _sharded_models(manifest: Manifest, models: Sequence[PreparedModel]) -> set[int]:
    """Return the numbers of the *models* whose state lies in shards."""
    return {index for index in range(len(models)) if _in_shards(manifest, layout.model_shards(index))}


def _sharded_optimizers(prepared: Prepared) -> set[str]:
    """Return the file names of the optimizers that step sharded parameters."""
    models = records_of(prepared)
    return {
        layout.numbered(layout.OPTIMIZER_NAME, index, "bin")
        for index, optimizer in enumerate(prepared.optimizers)
        if steps_parts(optimizer, models)
    }


def _shards_of_optimizers(directory: Path, manifest: Manifest, prepared: Prepared) -> list[tuple[Path, Any]]:
    """Return the folders of shards of optimizers, with the optimizer that each belongs to."""
    return [
        (directory / layout.optimizer_shards(index), optimizer)
        for index, optimizer in enumerate(prepared.optimizers)
        if _in_shards(manifest, layout.optimizer_shards(index))
    ]


def _check_shards(directory: Path, manifest: Manifest, prepared: Prepared) -> None:
    for folder, optimizer in _shards_of_optimizers(directory, manifest, prepared):
        wrong = strategy_named(SHARDED).optimizer_problem(folder, optimizer, records_of(prepared))
        if wrong is not None:
            raise CheckpointError(f"{folder} does not fit what is prepared: {wrong}. Nothing was loaded")


def _shards_read(directory: Path, manifest: Manifest, prepared: Prepared, models: Sequence[PreparedModel]) -> set[str]:
    """Return the names of the shards that this rank reads."""
    from orc.runtime.checkpoint.state.dcp import model_files, optimizer_files

    read: set[str] = set()
    for index in _sharded_models(manifest, models):
        folder = layout.model_shards(index)
        read |= {f"{folder}/{name}" for name in model_files(directory / folder, models[index])}
    for path, optimizer in _shards_of_optimizers(directory, manifest, prepared):
        read |= {f"{path.name}/{name}" for name in optimizer_files(path, optimizer, records_of(prepared))}
    return read


def _load_shards(directory: Path, manifest: Manifest, prepared: Prepared) -> None:
    for folder, optimizer in _shards_of_optimizers(directory, manifest, prepared):
        strategy_named(SHARDED).load_optimizer(folder, optimizer, records_of(prepared))


def _model_path(directory: Path, manifest: Manifest, index: int) -> Path:
    safe, other = layout.model_file(index), layout.model_file(index, False)
    return directory / (other if other in manifest.files and safe not in manifest.files else safe)


def _check_positions(context: RunContext, directory: Path, prepared: Prepared, states: Mapping[str, Any]) -> None:
    for index, loader in enumerate(prepared.dataloaders):
        name = layout.numbered(layout.SAMPLER_NAME, index, "bin")
        try:
            cut = loader.check_position(states[name])
        except PositionError as error:
            raise CheckpointError(f"{directory / name}: {error}") from error
        if cut.rounds and context.is_main and not states[name].get("finished"):
            tell(
                f"epoch {states[name]['epoch']} goes on after {cut.samples} samples, with {loader.total_batch_size} "
                f"samples per step; it was {states[name]['global_batch']}"
            )


def _whole_weights(
    directory: Path, manifest: Manifest, models: Sequence[PreparedModel], map_location: Any
) -> dict[Path, tuple[Any, PreparedModel]]:
    """Return the states of *models* that are loaded in one piece and only now, by file, with their models."""
    by_shards = _sharded_models(manifest, models)
    return {
        (path := _model_path(directory, manifest, index)): (read_state(path, map_location), model)
        for index, model in enumerate(models)
        if index not in by_shards and not model.spread and not fit.decides_itself(model.bare)
    }


def _load_model(
    directory: Path, manifest: Manifest, index: int, model: PreparedModel, map_location: Any, options: dict[str, Any]
) -> None:
    if _in_shards(manifest, layout.model_shards(index)):
        folder = directory / layout.model_shards(index)
        strategy_named(SHARDED).load_model(folder, model, strict=options.get("strict", True))
        return
    path = _model_path(directory, manifest, index)
    state = read_state(path, map_location)
    if model.spread:
        strategy_named(FULL).load_model(state, model, strict=options.get("strict", True))
    else:
        _load_weights(path, state, model, options)


def _load_weights(path: Path, state: Mapping[str, Any], model: PreparedModel, options: dict[str, Any]) -> None:
    try:
        # A tensor that is in its place already is not copied again.
        model.bare.load_state_dict(state, **options)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the prepared model: {error}") from error


def _random_states(context: RunContext, directory: Path, manifest: Manifest) -> Any:
    """Return the saved generators that this rank goes on with; `None` where there were none, or they took no part."""
    rank = context.topology.rng_source_rank
    name = layout.random_states_file(rank)
    if name in manifest.files:
        return unpickle(directory / name)
    if manifest.random_states is not None and rank not in manifest.random_states:
        return None
    if rank < manifest.world_size:
        raise CheckpointError(f"{directory} holds no {name}: the random numbers of this rank cannot be continued")
    return None
