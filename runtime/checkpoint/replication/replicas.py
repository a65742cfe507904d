"""Complete checkpoints on every site: what is missing on one comes from another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import (
    NAME,
    Manifest,
    content_problems,
    damaged,
    foreign_entries,
    locate,
    read_manifest,
    size_problems,
    trouble,
)
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.replication.sites import Sites
from orc.runtime.checkpoint.storage.durable import (
    FileRecord,
    Hashing,
    HashingFile,
    keep_entries,
    publish,
    remove_tree,
    temporary_name,
)
from orc.runtime.core.names import safe_relative_name

if TYPE_CHECKING:
    from orc.runtime.checkpoint.storage.destination import Destination

_PATIENCE_S = 3600.0  # for the slowest disk and network


def complete(barrier: Barrier, sites: Sites, destination: Destination) -> dict[str, FileRecord]:
    """Give every site the files of this save that only others have; those that came here, on the leading rank.

    They are what each rank writes for itself (its random states), and files of hooks.

    Raises:
        CheckpointError: a site could not send or receive.
        OSError: the same, on this one.
    """
    here = destination.present() if sites.leads else []
    plan = barrier.hold("save_state (exchanging)", here, lambda present: _transfers(sites, present))
    mine = set(here)

    def create(name: str) -> Hashing | None:
        return None if name in mine else destination.create(name)

    received: dict[str, FileRecord] = {}
    failure: Exception | None = None
    for sender, names, readers in plan:
        relay = barrier.relay()
        try:
            if sites.rank == sender:
                relay.send(destination.path(), names, len(readers))
            elif sites.rank in readers:
                received |= relay.receive(names, create)
        except (OSError, CheckpointError) as error:
            failure = failure or error  # the other transfers go on: their ranks wait for us
    if failure is not None:
        raise failure
    return received


def _transfers(sites: Sites, present: list[list[str]]) -> list[tuple[int, list[str], list[int]]]:
    """Return sender, files and readers per transfer: the first with a file sends to all that lack one of its files."""
    have = {leader: set(present[leader]) for leader in sites.leaders}
    plan: dict[int, tuple[list[str], set[int]]] = {}
    for name in sorted(set().union(*have.values())):
        lacking = {leader for leader, names in have.items() if name not in names}
        if lacking:
            sender = min(leader for leader, names in have.items() if name in names)
            names, readers = plan.setdefault(sender, ([], set()))
            names.append(name)
            readers |= lacking
    return [(sender, names, sorted(readers)) for sender, (names, readers) in sorted(plan.items())]


def provide(
    barrier: Barrier, sites: Sites, directory: Path, identity: str, tell: Callable[[str], None]
) -> tuple[Path, Manifest]:
    """The checkpoint *directory*, verified on every site; sites that lack it, or whose copy is damaged, get another's.

    Args:
        barrier: where the ranks agree.
        sites: those of the directory, more than one.
        directory: may be another path on every machine.
        identity: of the manifest.
        tell: is called on rank 0 with what was damaged.

    Raises:
        CheckpointError: on every rank; no site has it whole, or it could not be copied.
    """
    holders, texts = barrier.hold(
        "load_state (verifying)",
        trouble(locate(directory), *sites.share, identity),
        lambda troubles: _holders(sites, troubles),
        timeout_s=max(barrier.timeout_s, _PATIENCE_S),
    )
    if sites.rank == 0:
        for text in texts:
            tell(text)
    lacking = [leader for leader in sites.leaders if leader not in holders]
    if lacking:
        error: str | None = None
        source = holders[0]
        names: list[str] = []
        if sites.rank == source:
            try:
                names = [NAME, *sorted(read_manifest(locate(directory)).files)]
            except CheckpointError as failure:
                error = str(failure)
        reports = [error, names]
        names = barrier.hold("load_state (copying)", reports, lambda values: _names_of(values, source))
        relay = barrier.relay()
        try:
            if sites.rank == source:
                relay.send(locate(directory), names, len(lacking))
            elif sites.rank in lacking:
                _receive(lambda create: relay.receive(names, create), directory, sites.mine)
        except (OSError, CheckpointError) as failure:
            error = f"{directory} cannot be copied: {failure}"
        barrier.hold("load_state (copying)", error, agree_on_no_error, timeout_s=max(barrier.timeout_s, _PATIENCE_S))
    local = locate(directory)
    return local, read_manifest(local)


def _holders(sites: Sites, troubles: list[Any]) -> tuple[list[int], list[str]]:
    without = {site for site, trouble in zip(sites.of_rank, troubles, strict=True) if trouble}
    holders = [leader for leader in sites.leaders if leader not in without]
    bad = {f"rank {rank}: {trouble[1]}" for rank, trouble in enumerate(troubles) if trouble and trouble[0] == "damaged"}
    if not holders:
        raise CheckpointError("\n".join(sorted(bad or {trouble[1] for trouble in troubles if trouble})))
    return holders, [f"{text} (copied from the machine of rank {holders[0]})" for text in sorted(bad)]


def _names_of(values: list[Any], source: int) -> list[str]:
    agree_on_no_error([error for error, _ in values])
    names: list[str] = values[source][1]
    return names


def _receive(
    transfer: Callable[[Callable[[str], Hashing | None]], dict[str, FileRecord]], directory: Path, site: int
) -> None:
    """Put what *transfer* brings together beside *directory*, and in its place when it matches its manifest."""
    temporary = temporary_name(directory, f"site-{site}")
    failure: OSError | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove_tree(temporary)
        temporary.mkdir()
    except OSError as error:
        failure = error

    def create(name: str) -> Hashing | None:
        try:
            path = temporary / safe_relative_name(name)
            if failure is not None:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            return HashingFile(path)
        except ValueError as error:
            raise CheckpointError(f"what another machine sends is no checkpoint: {error}") from None

    try:
        transfer(create)  # also after a failure: the sender waits for its readers
        if failure is not None:
            raise failure
        manifest = read_manifest(temporary)
        problems = size_problems(temporary, manifest) or content_problems(temporary, manifest, manifest.files)
        if problems:
            raise damaged(temporary, problems)
        current = locate(directory)
        if current.exists():
            keep_entries(current, temporary, foreign_entries(current))
        publish(temporary, directory)
    except BaseException:
        with suppress(OSError):
            remove_tree(temporary)
        raise
