"""Complete checkpoints on every site: what is missing on one comes from another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError, tell
from orc.runtime.checkpoint.format.layout import (
    NAME,
    Manifest,
    content_problems,
    damaged,
    examined,
    foreign_entries,
    locate,
    read_manifest,
    size_problems,
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
    from orc.runtime.checkpoint.storage.destination import LocalDestination

PATIENCE_S = 3600.0  # for the slowest disk and network


def complete(barrier: Barrier, sites: Sites, destination: LocalDestination) -> dict[str, FileRecord]:
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


def provide(barrier: Barrier, sites: Sites, directory: Path, identity: str | None) -> tuple[Path, Manifest]:
    """The checkpoint *directory*, verified; its ranks share out the reading.

    Of several sites those that lack it, or whose copy is damaged, get another's.

    Args:
        barrier: where the ranks agree.
        sites: those of the directory.
        directory: may be another path on every machine.
        identity: of the manifest; `None` for any.

    Raises:
        CheckpointError: on every rank, with all that is missing, cut off or changed; no site has it whole, or it could
            not be copied.
    """
    local = locate(directory)
    manifest, trouble = examined(local, *sites.share, identity)
    patience_s = max(barrier.timeout_s, PATIENCE_S)
    holders, texts = barrier.hold(
        "load_state (verifying)", trouble, lambda troubles: _holders(sites, troubles), timeout_s=patience_s
    )
    if sites.rank == 0:
        for text in texts:
            tell(text)
    lacking = [leader for leader in sites.leaders if leader not in holders]
    if lacking:
        source, error = holders[0], None
        names = [NAME, *sorted(manifest.files)] if manifest is not None and sites.rank == source else None
        names = barrier.hold("load_state (copying)", names, lambda values: values[source])
        relay = barrier.relay()
        try:
            if sites.rank == source:
                relay.send(local, names, len(lacking))
            elif sites.rank in lacking:
                _receive(lambda create: relay.receive(names, create), directory, sites.mine)
        except (OSError, CheckpointError) as failure:
            error = f"{directory} cannot be copied: {failure}"
        barrier.hold("load_state (copying)", error, agree_on_no_error, timeout_s=patience_s)
    if manifest is None or sites.mine in lacking:
        local = locate(directory)
        manifest = read_manifest(local)
    return local, manifest


def _holders(sites: Sites, troubles: list[Any]) -> tuple[list[int], list[str]]:
    without = {site for site, trouble in zip(sites.of_rank, troubles, strict=True) if trouble}
    holders = [leader for leader in sites.leaders if leader not in without]
    told = [(f"rank {rank}: " if sites.several else "", *trouble) for rank, trouble in enumerate(troubles) if trouble]
    bad = {f"{rank}{text}" for rank, kind, text in told if kind == "damaged"}
    if not holders:
        raise CheckpointError("\n".join(sorted(bad or {text for _, _, text in told})))
    return holders, [f"{text} (copied from the machine of rank {holders[0]})" for text in sorted(bad)]


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
