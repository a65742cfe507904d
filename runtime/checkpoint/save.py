"""Saving: what a rank has is collected, written into a temporary directory, and one rename makes that a checkpoint."""

from __future__ import annotations

import io
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from orc.runtime.checkpoint.errors import CheckpointError, RanksElsewhere
from orc.runtime.checkpoint.format import layout, state_file
from orc.runtime.checkpoint.format.layout import NAME, CheckpointRoot, Manifest, plain
from orc.runtime.checkpoint.format.state_file import without_aliases, write_tensors
from orc.runtime.checkpoint.replication.absence import Absence
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error, attempt
from orc.runtime.checkpoint.replication.sites import Sites, Survey, complete
from orc.runtime.checkpoint.state import rng
from orc.runtime.checkpoint.state.ownership import refuse_superseded
from orc.runtime.checkpoint.state.staging import Stage
from orc.runtime.checkpoint.state.strategies import (
    FULL,
    own_state_of,
    strategy_named,
    strategy_of,
    strategy_of_optimizer,
    without_engines,
)
from orc.runtime.checkpoint.storage.destination import Destination, LocalDestination, RemoteDestination
from orc.runtime.checkpoint.storage.durable import FileRecord, Hashing
from orc.runtime.checkpoint.storage.remote import Location, Remote, RemoteRoot
from orc.runtime.core.prepared import Layout
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.checkpoint.state.planning import ShardPlans
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared

WRITERS = 4  # files at a time
_COMMIT_PATIENCE_S = 3600.0  # a rank that has written waits for the slowest disk


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
    keep: int | None = None  # how many numbered checkpoints stay


Task = Callable[[Hashing], None]
# What a rank is going to write, by file name; or the error that keeps it from doing so.
Content = dict[str, Task] | str


@dataclass(frozen=True)
class Opened:
    """A save that is under way: where its files go, on which sites, and what makes it this save."""

    destination: Destination
    sites: Sites
    id: str
    created_at: float


def begin(
    context: RunContext,
    barrier: Barrier,
    survey: Survey,
    prepared: Prepared,
    request: SaveRequest,
    stage: Stage | None = None,
) -> tuple[Destination, Callable[[Barrier, int], None]]:
    """Collect what is to be saved; with *stage* copied, so that training may go on.

    Returns:
        Where it goes, and the function that writes and commits it, with a barrier and a number of files at a time.

    Raises:
        CheckpointError: nothing was changed; the text says which rank failed and how, or which rank did not come.
    """
    opened = open_destination(context, barrier, survey, request)
    with _undone(opened.destination):
        meet_before_gathering(barrier, prepared, request, opened.destination)
        shards = shard_plans(barrier, prepared, request)
        content = capture(context, prepared, request, opened.destination, stage, shards=shards)

    def finish(barrier: Barrier, writers: int) -> None:
        with _undone(opened.destination):
            write(context, barrier, request, opened, content, writers=writers, shards=shards)

    return opened.destination, finish


@contextmanager
def _undone(destination: Destination) -> Iterator[None]:
    """Where the block fails, *destination* is given up."""
    try:
        yield
    except BaseException:
        destination.abandon()
        raise


def open_destination(context: RunContext, barrier: Barrier, survey: Survey, request: SaveRequest) -> Opened:
    """Agree on the directory and make it ready; the first part of a save.

    Raises:
        RanksElsewhere: on rank 0, no other rank will come.
        CheckpointError: on every rank.
    """
    root = request.root
    asked = None if request.directory is None else str(request.directory)
    number: int | None = None
    error: str | None = None
    if request.directory is None and root is not None and looks(context, root):
        number, error = attempt(lambda: root.next(request.at_least))
    bid = [asked, number, error]
    number, token, created_at = barrier.hold(
        "save_state",
        bid,
        lambda bids: _choose(bids, request.directory),
        absence=None if request.alone else Absence.of(context),
    )
    where: Location
    if request.directory is not None:
        where = request.directory if isinstance(request.directory, Remote) else request.directory.absolute()
    else:
        assert root is not None
        where = root.numbered(number)
    destination: Destination
    if isinstance(where, Remote):
        sites = Sites(context.rank, (0,) * context.world_size)
        taken = barrier.hold("save_state", None, lambda _: where.size(NAME) is not None)
        destination = RemoteDestination(where, f".{token}-" if taken else "", context.is_main)
    else:
        sites = survey.at(where.parent, "save_state")
        destination = LocalDestination(
            where, token, sites.leads, sites.mine if sites.several else None, numbered=request.directory is None
        )
    with _undone(destination):
        error = attempt(destination.prepare)[1] if destination.leads else None
        barrier.hold("save_state (making the directory)", error, agree_on_no_error)
    return Opened(destination, sites, token, created_at)


def meet_before_gathering(barrier: Barrier, prepared: Prepared, request: SaveRequest, destination: Destination) -> None:
    """Meet where whole states of sharded models are to be gathered: a rank that cannot save would be waited for there.

    Raises:
        CheckpointError: on every rank, one cannot see the destination.
    """
    models = records_of(without_engines(prepared))
    whole = [model for model in models if model.spread and strategy_of(model, request.state) == FULL]
    if whole or any(model.layout is Layout.GATHERED for model in models):
        error = attempt(destination.check_visible)[1]
        barrier.hold("save_state (gathering)", error, agree_on_no_error)


def shard_plans(barrier: Barrier, prepared: Prepared, request: SaveRequest) -> ShardPlans | None:
    """Return what the ranks will agree on about shards; `None` where nothing is saved as shards."""
    prepared = without_engines(prepared)
    models = records_of(prepared)
    names = {strategy_of(model, request.state) for model in models}
    names |= {strategy_of_optimizer(optimizer, models, request.state) for optimizer in prepared.optimizers}
    if names <= {FULL}:
        return None
    from orc.runtime.checkpoint.state.planning import ShardPlans

    plans: ShardPlans = barrier.kept.setdefault(ShardPlans, ShardPlans(barrier))
    return plans


def write(
    context: RunContext,
    barrier: Barrier,
    request: SaveRequest,
    opened: Opened,
    content: Content,
    *,
    writers: int = WRITERS,
    shards: ShardPlans | None = None,
) -> None:
    """Write and commit what `capture` collected, the last part of a save; old checkpoints go before any rank goes on.

    Raises:
        CheckpointError: a rank could not; nothing has changed.
    """
    destination, sites = opened.destination, opened.sites
    records: dict[str, FileRecord] = {}
    if isinstance(content, str):
        error: str | None = content
    else:
        tasks = content
        error = attempt(lambda: records.update(_write(destination, tasks, writers) | destination.hook_files()))[1]
    lengths: list[dict[str, str]] = []
    if error is None:
        destination.hand_over()

    def verdict(reports: list[Any]) -> dict[str, Any]:
        destination.take_over(name for report in reports if report["error"] is None for name in report["files"])
        files = _files_by_site(reports)
        lengths.extend(report.get("lengths", {}) for report in reports)
        return files

    written = barrier.hold(
        "save_state (writing)",
        {
            "error": error,
            "site": sites.mine,
            "files": {n: asdict(r) for n, r in records.items()},
            **({} if shards is None else {"lengths": shards.report()}),
        },
        verdict,
        timeout_s=max(barrier.timeout_s, _COMMIT_PATIENCE_S),
    )
    mine = written[str(sites.mine)]
    files = {name: FileRecord(**record) for name, record in mine.items()}
    error = None
    if shards is not None and lengths:  # where the ranks have reported what they wrote, on rank 0
        metadata = partial(shards.metadata, lengths)
        error = attempt(lambda: files.update(_write(destination, _metadata_tasks(metadata()), 1)))[1]
    if sites.several and isinstance(destination, LocalDestination):
        failed = attempt(lambda: files.update(complete(barrier, sites, destination)))[1]
        error = error or failed
    progress = request.progress
    manifest = Manifest(
        opened.id,
        progress.step,
        progress.epoch,
        progress.offset,
        context.world_size,
        opened.created_at,
        files,
        random_states=(context.rank,) if request.alone else None,
        norms=progress.norms,
    )
    if destination.leads:
        error = error or attempt(lambda: destination.seal(manifest))[1]
    if sites.several:
        # Nothing appears anywhere before it is complete everywhere.
        barrier.hold("save_state (sealing)", error, agree_on_no_error, timeout_s=_COMMIT_PATIENCE_S)
    if destination.leads:
        error = error or attempt(refuse_superseded)[1] or attempt(lambda: destination.commit(manifest))[1]
    barrier.hold("save_state (committing)", error, agree_on_no_error, timeout_s=_COMMIT_PATIENCE_S)
    error = attempt(destination.clear)[1] if destination.leads else None
    if (root := request.root) is not None and request.directory is None and destination.leads:
        error = error or attempt(lambda: root.retain(request.keep))[1]
    if error is not None:
        error = f"{destination.target} is complete, but older checkpoints could not be removed: {error}"
    barrier.hold("save_state (retention)", error, agree_on_no_error, timeout_s=_COMMIT_PATIENCE_S)


def _metadata_tasks(contents: Mapping[str, bytes]) -> dict[str, Task]:
    return {layout.shard_metadata(folder): partial(_write_bytes, content) for folder, content in contents.items()}


def _write_bytes(content: bytes, file: Hashing) -> None:
    file.write(content)


def _write(destination: Destination, tasks: Mapping[str, Task], writers: int) -> dict[str, FileRecord]:
    def put(name: str) -> FileRecord:
        return destination.create(name).fill(tasks[name])

    if writers == 1:  # no pool may be started while the interpreter waits for its last threads
        return {name: put(name) for name in tasks}
    # One file is checksummed and written while the disk works on another.
    with ThreadPoolExecutor(writers) as pool:
        return dict(zip(tasks, pool.map(put, tasks), strict=True))


def looks(context: RunContext, root: CheckpointRoot | RemoteRoot) -> bool:
    """Return whether this rank lists *root*: one per machine, which may have its own disk; rank 0 if it is remote."""
    return context.is_main if isinstance(root, RemoteRoot) else context.is_local_main


def _choose(bids: list[Any], directory: Location | None) -> tuple[int | None, str, float]:
    """The number after all that are taken, an identity of this one save, and its time."""
    asked = [given for given, _, _ in bids]
    if directory is not None and len(asked) > 1 and set(asked[1:]) == {None}:
        # Between steps the others save by themselves already; rank 0 will come there too.
        raise RanksElsewhere(dict.fromkeys(range(1, len(asked)), "saves to the next numbered checkpoint"))
    if len(set(asked)) > 1:
        raise CheckpointError(f"save_state was called with different directories on different ranks: {asked}")
    agree_on_no_error([error for _, _, error in bids])
    numbers = [number for _, number, _ in bids if number is not None]
    return max(numbers) if directory is None else None, secrets.token_hex(8), time.time()


def _files_by_site(reports: list[Any]) -> dict[str, Any]:
    agree_on_no_error([report["error"] for report in reports])
    files: dict[str, Any] = {}
    for report in reports:
        files.setdefault(str(report["site"]), {}).update(report["files"])
    return files


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
    own, failure = attempt(lambda: _engine_tasks(prepared, request.engine_options, stage is not None))
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


def _engine_tasks(prepared: Prepared, options: Mapping[str, Any], copied: bool) -> dict[str, Task]:
    """Return what writes this rank's files of the engine, by name. Collective where there are any.

    Args:
        prepared: what the engine trains.
        options: of the engine's own function that saves.
        copied: take copies, so that training may go on.
    """
    own = own_state_of(prepared)
    saved = {} if own is None else own.save(options)
    files = {name: content for name, content in saved.items() if isinstance(content, bytes)}
    states = {name: state for name, state in saved.items() if name not in files}
    if copied and states:
        states = Stage().take(states)  # memory of its own: the save's stage holds everything else
    tasks: dict[str, Task] = {name: partial(_write_bytes, content) for name, content in files.items()}
    return tasks | {name: partial(_pickle, state) for name, state in states.items()}


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
