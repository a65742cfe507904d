"""Sites: the machines that see the same directory of checkpoints, and those that have one each.

A *site* is the machines that share a directory of checkpoints: all of them on a shared file system, each by itself with
local disks. A checkpoint is written once per site, whole; what is missing on one comes from another.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError, tell
from orc.runtime.checkpoint.format.layout import (
    MARK_PREFIX,
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
    from orc.runtime.core.context import RunContext

PATIENCE_S = 3600.0  # for the slowest disk and network


@dataclass(frozen=True)
class Sites:
    """The sites of a run, as one of its ranks sees them.

    Attributes:
        rank: this rank.
        of_rank: for every rank the site it belongs to: the lowest rank there, which leads it.
    """

    rank: int
    of_rank: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Not all ranks share a directory."""
        return len(set(self.of_rank)) > 1

    @property
    def mine(self) -> int:
        """The site of this rank."""
        return self.of_rank[self.rank]

    @property
    def leads(self) -> bool:
        """Return whether this rank leads its site: it does the work that is done once per site."""
        return self.mine == self.rank

    @property
    def leaders(self) -> list[int]:
        """The leading ranks of all sites, in order."""
        return sorted(set(self.of_rank))

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among the ranks of its site, and how many they are."""
        ranks = [rank for rank, site in enumerate(self.of_rank) if site == self.mine]
        return ranks.index(self.rank), len(ranks)


class Survey:
    """Survey of the sites, once for each directory. Collective.

    shared:
        ``1``: all machines share the directories. ``0``: none does. ``auto``: look.
    """

    def __init__(self, context: RunContext, barrier: Barrier, shared: str) -> None:
        self._context = context
        self._barrier = barrier
        self._shared = shared
        self._machines: Sites | None = None
        self._known: dict[Path, Sites] = {}

    def at(self, directory: Path, what: str) -> Sites:
        """The sites of *directory*, which is made where it is missing; *what* names the caller in errors.

        A machine that can neither write there nor sees that another did is a site of its own.
        """
        context = self._context
        if context.local_world_size == context.world_size or self._shared == "1":
            return Sites(context.rank, (0,) * context.world_size)
        if self._machines is None:
            # The number of a machine may be a guess of the launch environment; its name alone may be a container's.
            identity = [context.node_rank, socket.gethostname()]
            self._machines = Sites(context.rank, tuple(self._barrier.hold(what, identity, _first_alike)))
        if not self._machines.several or self._shared == "0":
            return self._machines
        if directory not in self._known:
            self._known[directory] = self._look(self._machines, directory, what)
        return self._known[directory]

    def _look(self, machines: Sites, directory: Path, what: str) -> Sites:
        # Each machine makes a file of a name that nobody has looked for: an answer from a cache is impossible.
        token = self._barrier.hold(what, None, lambda _: secrets.token_hex(8))
        marks = {leader: directory / f"{MARK_PREFIX}{token}-{leader}" for leader in machines.leaders}
        if machines.leads:
            with suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                marks[machines.rank].touch()
        self._barrier.hold(what, None, agree_on_no_error)
        seen = [leader for leader, mark in marks.items() if _exists(mark)] if machines.leads else []
        try:
            sites = self._barrier.hold(what, seen, lambda views: _joined(machines.leaders, views))
        finally:
            if machines.leads:
                with suppress(OSError):
                    marks[machines.rank].unlink()
        by_leader = dict(zip(machines.leaders, sites, strict=True))
        return Sites(machines.rank, tuple(by_leader[leader] for leader in machines.of_rank))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _first_alike(identities: list[Any]) -> list[int]:
    """For each rank the first one of the same machine."""
    return [identities.index(identity) for identity in identities]


def _joined(leaders: Sequence[int], views: list[list[int]]) -> list[int]:
    """For each of *leaders* the lowest that it shares with: one sees the mark of the other, directly or in a chain."""
    site = {leader: leader for leader in leaders}
    for leader in leaders:
        for other in views[leader]:
            low, high = sorted((site[leader], site[other]))
            site = {rank: low if place == high else place for rank, place in site.items()}
    return [site[leader] for leader in leaders]


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
