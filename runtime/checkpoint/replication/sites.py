"""Detection of the machines that see the same directory and of those that have one each.

A *site* is the machines that share a directory of checkpoints: all of them on a shared file system, each by itself with
local disks. A checkpoint is written once per site, whole.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


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
        marks = {leader: directory / f"{layout.MARK_PREFIX}{token}-{leader}" for leader in machines.leaders}
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
