"""Saving: every rank writes its files into a temporary directory, and one rename makes them a checkpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.content import Content, SaveRequest, Task, capture
from orc.runtime.checkpoint.errors import CheckpointError, RanksElsewhere
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import NAME, CheckpointRoot, Manifest
from orc.runtime.checkpoint.replication.absence import Absence
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error, attempt
from orc.runtime.checkpoint.replication.replicas import complete
from orc.runtime.checkpoint.replication.sites import Sites, Survey
from orc.runtime.checkpoint.state.ownership import refuse_superseded
from orc.runtime.checkpoint.state.strategies import FULL, strategy_of, strategy_of_optimizer, without_engines
from orc.runtime.checkpoint.storage.destination import Destination, LocalDestination, RemoteDestination
from orc.runtime.checkpoint.storage.durable import FileRecord, Hashing
from orc.runtime.checkpoint.storage.remote import Location, Remote, RemoteRoot
from orc.runtime.core.prepared import Layout
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from orc.runtime.checkpoint.state.planning import ShardPlans
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.prepared import Prepared

_WRITERS = 4  # files at a time
_COMMIT_PATIENCE_S = 3600.0  # a rank that has written waits for the slowest disk


@dataclass(frozen=True)
class Opened:
    """A save that is under way: where its files go, on which sites, and what makes it this save."""

    destination: Destination
    sites: Sites
    id: str
    created_at: float


def save(
    context: RunContext,
    barrier: Barrier,
    survey: Survey,
    prepared: Prepared,
    request: SaveRequest,
    retain: Callable[[Destination], None],
) -> Destination:
    """Write a checkpoint; its destination when it is complete and durable.

    Raises:
        CheckpointError: nothing was changed; the text says which rank failed and how, or which rank did not come.
    """
    opened = open_destination(context, barrier, survey, request)
    destination = opened.destination
    try:
        meet_before_gathering(barrier, prepared, request, destination)
        shards = shard_plans(barrier, prepared, request)
        content = capture(context, prepared, request, destination, shards=shards)
        write(context, barrier, request, opened, content, retain, shards=shards)
    except BaseException:
        destination.abandon()
        raise
    return destination


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
        number, error = attempt(lambda: root.next(request.at_least)[0])
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
    try:
        error = attempt(destination.prepare)[1] if destination.leads else None
        barrier.hold("save_state (making the directory)", error, agree_on_no_error)
    except BaseException:
        destination.abandon()
        raise
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
    retain: Callable[[Destination], None],
    *,
    writers: int = _WRITERS,
    shards: ShardPlans | None = None,
) -> None:
    """Write and commit what `capture` collected, the last part of a save. *retain* removes what it takes the place of,
    before any rank goes on.

    Raises:
        CheckpointError: a rank could not; nothing has changed.
    """
    destination, sites = opened.destination, opened.sites
    records: dict[str, FileRecord] = {}
    if isinstance(content, str):
        error: str | None = content
    else:
        tasks = content
        error = attempt(lambda: records.update(_write(destination, tasks, writers)))[1]
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
    if shards is not None and lengths:
        contents = partial(shards.metadata, lengths)
        error = attempt(lambda: files.update(_write_metadata(destination, contents())))[1]
    if sites.several:
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
    if request.directory is None:
        error = error or attempt(lambda: retain(destination))[1]
    if error is not None:
        error = f"{destination.target} is complete, but older checkpoints could not be removed: {error}"
    barrier.hold("save_state (retention)", error, agree_on_no_error, timeout_s=_COMMIT_PATIENCE_S)


def _write_metadata(destination: Destination, contents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write the metadata of each folder of shards; where the ranks have reported what they wrote, on rank 0."""
    tasks: dict[str, Task] = {}
    for folder, content in contents.items():
        tasks[layout.shard_metadata(folder)] = partial(_write_bytes, content)
    return _write_files(destination, tasks, 1)


def _write_bytes(content: bytes, file: Hashing) -> None:
    file.write(content)


def _write(destination: Destination, tasks: Mapping[str, Task], writers: int) -> dict[str, FileRecord]:
    return _write_files(destination, tasks, writers) | destination.hook_files()


def _write_files(destination: Destination, tasks: Mapping[str, Task], writers: int) -> dict[str, FileRecord]:
    def put(name: str) -> FileRecord:
        file = destination.create(name)
        try:
            tasks[name](file)
        except BaseException:
            file.abandon()
            raise
        return file.close()

    # One file is checksummed and written while the disk works on another.
    if writers > 1:
        with ThreadPoolExecutor(writers) as pool:
            records = dict(zip(tasks, pool.map(put, tasks), strict=True))
    else:  # no pool may be started while the interpreter waits for its last threads
        records = {name: put(name) for name in tasks}
    return records


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
