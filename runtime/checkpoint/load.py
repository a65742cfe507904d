"""Loading: everything is verified on all ranks before anything is changed on any."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orc.runtime.checkpoint.errors import CheckpointError, RankMissing, tell
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import Manifest
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.replication.sites import PATIENCE_S
from orc.runtime.checkpoint.state import fit, rng
from orc.runtime.checkpoint.state.strategies import (
    FULL,
    SHARDED,
    Stepped,
    own_state_of,
    strategy_named,
    without_engines,
)
from orc.runtime.checkpoint.storage.copying import CopyQueue, placed, read_state, unmapped, unpickle
from orc.runtime.checkpoint.verified import Verified
from orc.runtime.collectives.tree import recursively_apply
from orc.runtime.core.libraries import libraries
from orc.runtime.core.prepared import Layout, PreparedModel
from orc.runtime.data.plan import PositionError
from orc.runtime.data.position import next_epoch
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared

Hook = Callable[[list[torch.nn.Module], str], None]


@dataclass(frozen=True)
class Entry:
    """What is prepared or registered (an ``optimizer``, a ``loader`` or another kind), and from where it is loaded.

    strategy:
        That loads it; with `None` it loads what the file holds by itself.
    """

    path: Path
    target: Any
    strategy: str | None = None
    kind: str = ""

    def source(self, states: Mapping[str, Any]) -> Any:
        """Return what the strategy takes: the folder, or of *states*, by file, its own."""
        return self.path if self.strategy == SHARDED else states[self.path.name]


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
    with _agreed(barrier, "load_state (reading)"):
        own = own_state_of(everything)
        if own is not None and own.trained():
            wrong = own.problem(manifest.files, manifest.world_size)
        else:
            wrong = next((why for library in libraries().values() if (why := library.problem(manifest.files))), None)
        if wrong is not None:
            raise CheckpointError(f"{directory} does not fit what is prepared: {wrong}. Nothing was loaded")
        entries = _entries(directory, prepared, manifest.files)
        _check_counterparts(directory, manifest, entries)
        for entry in entries:
            if entry.strategy != SHARDED:
                # An optimizer's counts of steps would stay where they are read to, and be waited for at each step.
                placed_by_torch = entry.path.name.startswith(layout.OPTIMIZER_NAME)
                states[entry.path.name] = unpickle(entry.path, None if placed_by_torch else map_location)
        _check_states(entries, states, records_of(prepared))
        loaders = [entry for entry in entries if entry.kind == "loader"]
        if roll_over:
            states |= {entry.path.name: next_epoch(states[entry.path.name]) for entry in loaders}
        _check_positions(context, loaders, states)
        checked.bring({layout.random_states_file(context.topology.rng_source_rank)} & manifest.files.keys())
        random_states = _random_states(context, directory, manifest)
    # Hooks may load something by themselves: not before the rest is known to fit.
    modules = list(everything.models)
    with _agreed(barrier, "load_state (checking)"):
        for hook in hooks:
            hook(modules, str(directory))
        records = [record for record in records_of(prepared, modules) if record.layout is not Layout.OF_ENGINE]
        models = _model_entries(directory, manifest, records)
        _check_models(directory, manifest, models, options.get("strict", True))
        if checked.source is not None:
            checked.bring(_shards_read(entries, models, records_of(prepared)), shared=True)
    tried = [entry for entry in models if entry.strategy is None and fit.decides_itself(entry.target.bare)]
    # Until here nothing has changed anywhere; what can be known to fail has failed on all ranks.
    with ExitStack() as undo:
        with _agreed(barrier, "load_state (trying)"):
            _try(undo, context, entries, states, random_states)
            for entry in tried:
                load_it = partial(_load_model, entry, map_location, options)
                fit.load_tentatively(undo, entry.path.name, entry.target.bare, load_it)
        undo.pop_all()
    if own is not None:
        own.load(directory, modules, options)
    with CopyQueue() as copies:
        # What can be read straight into its place is, in threads; the rest goes the way of its kind.
        # Models are read in one piece, and only now.
        weights = {
            entry.path: (read_state(entry.path, map_location), entry.target)
            for entry in models
            if entry.strategy is None and entry not in tried
        }
        copies.read_from(*weights, *(directory / name for name in states))
        ready = {}
        for entry in entries:
            if entry.strategy is None and entry.kind == "optimizer":
                name = entry.path.name
                ready[name] = unmapped(states.pop(name), copies, entry.target.state_dict())
        if not options.get("assign"):
            for path, (state, model) in weights.items():
                weights[path] = placed(state, model.bare, copies), model
        for entry in models:
            if entry.strategy is not None:
                _load_model(entry, map_location, options)
        for entry in entries:
            if entry.strategy == SHARDED:
                strategy_named(SHARDED).load_optimizer(entry.path, entry.target, records_of(prepared))
        copies.wait()
        for path, (state, model) in weights.items():
            _load_weights(path, state, model, options)
        for entry in entries:
            name = entry.path.name
            if entry.strategy == FULL:
                strategy_named(FULL).load_optimizer(states.pop(name), entry.target, records_of(prepared))
            elif entry.strategy is None:
                state = ready.pop(name) if name in ready else unmapped(states.pop(name), copies)
                copies.wait()
                try:
                    entry.target.load_state_dict(state)
                except (ValueError, KeyError, RuntimeError) as failure:
                    raise CheckpointError(f"{entry.path} does not fit what is prepared: {failure}") from failure
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
    undo: ExitStack, context: RunContext, entries: Sequence[Entry], states: Mapping[str, Any], random_states: Any
) -> None:
    """Load what decides by itself whether a state fits, into its place; *undo* puts everything back."""
    if random_states is not None:
        undo.callback(rng.restore, rng.capture(context.compute, context.device), context.device, context.compute)
        rng.restore(random_states, context.device, context.compute)
    for entry in entries:
        if entry.strategy != SHARDED and entry.kind != "loader" and fit.decides_itself(entry.target):
            # As it is mapped, in containers of its own: it needs no memory beside the copy of what it replaces.
            state = recursively_apply(lambda tensor: tensor, states[entry.path.name])
            load_it = partial(entry.target.load_state_dict, state)
            fit.load_tentatively(undo, str(entry.path), entry.target, load_it)


@contextmanager
def _agreed(barrier: Barrier, what: str) -> Iterator[None]:
    """Raise what is wrong in the block on every rank; for a rank whose own code fails the others do not wait."""
    error = None
    try:
        yield
    except CheckpointError as failure:
        error = str(failure)
    except Exception as failure:
        with suppress(CheckpointError):
            barrier.hold(what, [f"{type(failure).__name__}: {failure}"], _agree, timeout_s=PATIENCE_S)
        raise
    barrier.hold(what, error, _agree, timeout_s=PATIENCE_S)


def _agree(errors: list[Any]) -> None:
    """A verdict: as `agree_on_no_error`, but an error of a rank's own code is no fault of the checkpoint."""
    failed = [f"rank {rank} failed: {error[0]}" for rank, error in enumerate(errors) if isinstance(error, list)]
    if failed:
        raise RankMissing("load_state: " + "; ".join(failed))
    agree_on_no_error(errors)


def _entries(directory: Path, prepared: Prepared, files: Collection[str] = ()) -> list[Entry]:
    """Return everything but models and random states, with its place among the *files* of a checkpoint."""
    models = records_of(prepared)
    entries = []
    for index, optimizer in enumerate(prepared.optimizers):
        folder = layout.optimizer_shards(index)
        if layout.shard_metadata(folder) in files:
            entries.append(Entry(directory / folder, optimizer, SHARDED, "optimizer"))
        else:
            file = directory / layout.numbered(layout.OPTIMIZER_NAME, index, "bin")
            entries.append(Entry(file, optimizer, FULL if Stepped(optimizer, models).in_parts else None, "optimizer"))
    rest = layout.files_of_rest(prepared)
    return entries + [Entry(directory / name, target, kind=kind) for name, target, kind in rest]


def _model_entries(directory: Path, manifest: Manifest, models: Sequence[PreparedModel]) -> list[Entry]:
    entries = []
    for index, model in enumerate(models):
        folder, safe, other = layout.model_shards(index), layout.model_file(index), layout.model_file(index, False)
        if layout.shard_metadata(folder) in manifest.files:
            entries.append(Entry(directory / folder, model, SHARDED))
        else:
            name = other if other in manifest.files and safe not in manifest.files else safe
            entries.append(Entry(directory / name, model, FULL if model.spread else None))
    return entries


def _check_counterparts(directory: Path, manifest: Manifest, entries: Iterable[Entry]) -> None:
    names = [entry.path.name for entry in entries if entry.strategy != SHARDED]
    if missing := [name for name in names if name not in manifest.files]:
        raise CheckpointError(
            f"{directory} holds no {', '.join(missing)}: more is prepared or registered here than when it was saved; "
            "load into the same script's objects"
        )


def _check_states(entries: Sequence[Entry], states: Mapping[str, Any], models: Sequence[PreparedModel]) -> None:
    for entry in entries:
        source, kind = entry.source(states), "does not fit what is prepared"
        if entry.strategy is not None:
            wrong = strategy_named(entry.strategy).optimizer_problem(source, entry.target, models)
        elif entry.kind == "loader":
            wrong, kind = fit.position_problem(source), "is no position of a loader"
        else:
            wrong = fit.problem(entry.target, source)
        if wrong is not None:
            raise CheckpointError(f"{entry.path} {kind}: {wrong}. Nothing was loaded")


def _check_models(directory: Path, manifest: Manifest, models: Sequence[Entry], strict: bool = True) -> None:
    _check_counterparts(directory, manifest, models)
    for entry in models:
        source = entry.path if entry.strategy == SHARDED else read_state(entry.path)
        wrong = strategy_named(entry.strategy or FULL).model_problem(source, entry.target, strict=strict)
        if wrong is not None:
            raise CheckpointError(f"{entry.path} does not fit the prepared model: {wrong}. Nothing was loaded")


def _shards_read(entries: Sequence[Entry], models: Sequence[Entry], records: Sequence[PreparedModel]) -> set[str]:
    """Return the names of the shards that this rank reads."""
    from orc.runtime.checkpoint.state.dcp import model_files, optimizer_files

    read: set[str] = set()
    for entry in models:
        if entry.strategy == SHARDED:
            read |= {f"{entry.path.name}/{name}" for name in model_files(entry.path, entry.target)}
    for entry in entries:
        if entry.strategy == SHARDED:
            read |= {f"{entry.path.name}/{name}" for name in optimizer_files(entry.path, entry.target, records)}
    return read


def _check_positions(context: RunContext, loaders: Sequence[Entry], states: Mapping[str, Any]) -> None:
    for entry in loaders:
        state, loader = states[entry.path.name], entry.target
        try:
            cut = loader.check_position(state)
        except PositionError as error:
            raise CheckpointError(f"{entry.path}: {error}") from error
        if cut.rounds and context.is_main and not state.get("finished"):
            tell(
                f"epoch {state['epoch']} goes on after {cut.samples} samples, with {loader.total_batch_size} "
                f"samples per step; it was {state['global_batch']}"
            )


def _load_model(entry: Entry, map_location: Any, options: dict[str, Any]) -> None:
    source: Any = entry.path if entry.strategy == SHARDED else read_state(entry.path, map_location)
    if entry.strategy is None:
        _load_weights(entry.path, source, entry.target, options)
    else:
        strategy_named(entry.strategy).load_model(source, entry.target, strict=options.get("strict", True))


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
