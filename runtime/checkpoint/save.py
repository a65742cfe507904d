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
Task = Callable[[Hashing], None]


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


class Save:
    """One save, in three steps that every rank takes: `open`, `collect`, `write`. One that fails leaves nothing behind.

    Attributes:
        destination: where it goes, from `open` on; so are the next two.
        sites: of the machines.
        id: of the checkpoint.
        tasks: what this rank is going to write, by file name, from `collect` on.
        error: what keeps this rank from doing so.
    """

    destination: Destination
    sites: Sites
    id: str
    _created_at: float

    def __init__(self, context: RunContext, barrier: Barrier, prepared: Prepared, request: SaveRequest) -> None:
        self.context = context
        self.request = request
        self.tasks: dict[str, Task] = {}
        self.error: str | None = None
        self._barrier = barrier
        self._everything = prepared
        self._prepared = without_engines(prepared)
        self._models = models = records_of(self._prepared)
        self._strategies = [strategy_of(model, request.state) for model in models]
        self._of_optimizers = [strategy_of_optimizer(one, models, request.state) for one in self._prepared.optimizers]
        self._shards: ShardPlans | None = None  # what the ranks agree on about shards
        if not {*self._strategies, *self._of_optimizers} <= {FULL}:
            from orc.runtime.checkpoint.state.planning import ShardPlans

            self._shards = barrier.kept.setdefault(ShardPlans, ShardPlans(barrier))

    def open(self, survey: Survey) -> None:
        """Agree on the directory and make it ready.

        Raises:
            RanksElsewhere: on rank 0, no other rank will come.
            CheckpointError: on every rank; the text says which rank failed and how, or which rank did not come.
        """
        context, request, root = self.context, self.request, self.request.root
        asked = None if request.directory is None else str(request.directory)
        number: int | None = None
        error: str | None = None
        if request.directory is None and root is not None and looks(context, root):
            number, error = attempt(lambda: root.next(request.at_least))
        number, self.id, self._created_at = self._barrier.hold(
            "save_state",
            [asked, number, error],
            lambda bids: _choose(bids, request.directory),
            absence=None if request.alone else Absence.of(context),
        )
        where: Location
        if request.directory is not None:
            where = request.directory if isinstance(request.directory, Remote) else request.directory.absolute()
        else:
            assert root is not None
            where = root.numbered(number)
        if isinstance(where, Remote):
            self.sites = Sites(context.rank, (0,) * context.world_size)
            taken = self._barrier.hold("save_state", None, lambda _: where.size(NAME) is not None)
            self.destination = RemoteDestination(where, f".{self.id}-" if taken else "", context.is_main)
        else:
            self.sites = sites = survey.at(where.parent, "save_state")
            site = sites.mine if sites.several else None
            self.destination = LocalDestination(where, self.id, sites.leads, site, numbered=request.directory is None)
        with self._undone():
            error = attempt(self.destination.prepare)[1] if self.destination.leads else None
            self._barrier.hold("save_state (making the directory)", error, agree_on_no_error)

    def collect(self, stage: Stage | None = None) -> None:
        """Collect this rank's states; with *stage* copied, so that training may go on.

        The hooks run on every rank, before; they may take weights off the list.

        Raises:
            CheckpointError: on every rank, one cannot see the destination, or they could not agree.
        """
        with self._undone():
            models = self._models
            gathers = [model.spread and how == FULL for model, how in zip(models, self._strategies, strict=True)]
            if any(gathers) or any(model.layout is Layout.GATHERED for model in models):
                # A rank that cannot save would be waited for where whole states are gathered.
                error = attempt(self.destination.check_visible)[1]
                self._barrier.hold("save_state (gathering)", error, agree_on_no_error)
            # First, while all ranks are sure to come: engines wait for each other.
            own, failure = attempt(lambda: self._engine_tasks(copied=stage is not None))
            states, error = attempt(self._states)
            error = error or failure
            if self._shards is not None:
                self._shards.agree({} if states is None else states[2], error)
            if error is None and states is not None:
                tasks, error = attempt(lambda: self._tasks(*states[:2], stage))
                self.tasks = {**(tasks or {}), **(own or {})}
            self.error = error

    def write(self, barrier: Barrier, writers: int = WRITERS) -> None:
        """Write and commit what was collected; old checkpoints go before any rank goes on.

        Args:
            barrier: in which the ranks agree from now on.
            writers: files at a time.

        Raises:
            CheckpointError: a rank could not; nothing has changed.
        """
        with self._undone():
            files, error = self._files(barrier, writers)
            self._commit(barrier, files, error)

    def _files(self, barrier: Barrier, writers: int) -> tuple[dict[str, FileRecord], str | None]:
        """Write the files; return those of this site, and what has failed since the ranks agreed on theirs."""
        destination, sites, shards = self.destination, self.sites, self._shards
        records: dict[str, FileRecord] | None = None
        error = self.error
        if error is None:
            records, error = attempt(lambda: _write(destination, self.tasks, writers) | destination.hook_files())
        if error is None:
            destination.hand_over()
        lengths: list[dict[str, str]] = []

        def verdict(reports: list[Any]) -> dict[str, Any]:
            destination.take_over(name for report in reports if report["error"] is None for name in report["files"])
            agree_on_no_error([report["error"] for report in reports])
            lengths.extend(report.get("lengths", {}) for report in reports)
            by_site: dict[str, Any] = {}
            for report in reports:
                by_site.setdefault(str(report["site"]), {}).update(report["files"])
            return by_site

        own = {name: asdict(record) for name, record in (records or {}).items()}
        report: dict[str, Any] = {"error": error, "site": sites.mine, "files": own}
        if shards is not None:
            report["lengths"] = shards.report()
        patience_s = max(barrier.timeout_s, _COMMIT_PATIENCE_S)
        written = barrier.hold("save_state (writing)", report, verdict, timeout_s=patience_s)[str(sites.mine)]
        files = {name: FileRecord(**record) for name, record in written.items()}
        if shards is not None and lengths:  # where the ranks have reported what they wrote, on rank 0
            error = attempt(lambda: files.update(_write(destination, _metadata(shards, lengths), 1)))[1]
        if sites.several and isinstance(destination, LocalDestination):
            failed = attempt(lambda: files.update(complete(barrier, sites, destination)))[1]
            error = error or failed
        return files, error

    def _commit(self, barrier: Barrier, files: dict[str, FileRecord], error: str | None) -> None:
        """Make *files* a checkpoint, unless something has failed anywhere."""
        destination, request, progress = self.destination, self.request, self.request.progress
        manifest = Manifest(
            self.id,
            progress.step,
            progress.epoch,
            progress.offset,
            self.context.world_size,
            self._created_at,
            files,
            random_states=(self.context.rank,) if request.alone else None,
            norms=progress.norms,
        )
        if destination.leads:
            error = error or attempt(lambda: destination.seal(manifest))[1]
        if self.sites.several:  # nothing appears anywhere before it is complete everywhere
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

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Where the block fails, the destination is given up."""
        try:
            yield
        except BaseException:
            self.destination.abandon()
            raise

    def _states(self) -> tuple[dict[str, Any], list[tuple[str, Any, bool]], dict[str, Any]]:
        """Return what this rank is going to write.

        Returns:
            Whole weights by file; other states with their files, and whether they can hold objects of the user's own;
            and by folder this rank's part of what is sharded.
        """
        destination, prepared, models = self.destination, self._prepared, self._models
        destination.check_visible()
        weights = [
            strategy_named(how).model_state(model, keep=destination.leads)
            for how, model in zip(self._strategies, models, strict=True)
        ]
        in_shards = {id(weight) for weight, how in zip(weights, self._strategies, strict=True) if how != FULL}
        optimizers = [
            strategy_named(how).optimizer_state(optimizer, models, keep=destination.leads)
            for how, optimizer in zip(self._of_optimizers, prepared.optimizers, strict=True)
        ]
        for hook in self.request.hooks:
            hook(list(self._everything.models), weights, str(destination.hook_directory()))
        whole: dict[str, dict[str, Any]] = {}
        sharded: dict[str, dict[str, Any]] = {}
        for index, state in enumerate(weights):
            if id(state) in in_shards:
                sharded[layout.model_shards(index)] = {"model": state}
            elif destination.leads:
                whole[layout.model_file(index, self.request.safe)] = state
        others: list[tuple[str, Any, bool]] = []
        for index, (how, state) in enumerate(zip(self._of_optimizers, optimizers, strict=True)):
            if how != FULL:
                sharded[layout.optimizer_shards(index)] = {"optimizer": state}
            else:
                others.append((layout.numbered(layout.OPTIMIZER_NAME, index, "bin"), state, False))
        if not destination.leads:
            return whole, [], sharded
        for name, target, kind in layout.files_of_rest(prepared):
            others.append((name, target.state_dict(), kind in ("scheduler", "custom")))
        return whole, others, sharded

    def _tasks(
        self, weights: dict[str, Any], states: list[tuple[str, Any, bool]], stage: Stage | None
    ) -> dict[str, Task]:
        context, shards = self.context, self._shards
        weights, states = context.compute.to_cpu((weights, states))
        random_states = rng.capture(context.compute, context.device)
        mine = {} if shards is None else shards.values
        if stage is not None:
            weights, states, mine = stage.take((weights, states, mine))
        write_model = _write_weights if self.request.safe else _pickle
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

    def _engine_tasks(self, *, copied: bool) -> dict[str, Task]:
        """Return what writes this rank's files of the engine, by name; *copied*, so that training may go on.

        Collective where there are any.
        """
        own = own_state_of(self._everything)
        saved = {} if own is None else own.save(self.request.engine_options)
        states = {name: state for name, state in saved.items() if not isinstance(state, bytes)}
        if copied and states:
            states = Stage().take(states)  # memory of its own: the save's stage holds everything else
        return {
            name: partial(_pickle, states[name]) if name in states else partial(_write_bytes, content)
            for name, content in saved.items()
        }


def _metadata(shards: ShardPlans, lengths: Sequence[Mapping[str, str]]) -> dict[str, Task]:
    return {
        layout.shard_metadata(folder): partial(_write_bytes, content)
        for folder, content in shards.metadata(lengths).items()
    }


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
