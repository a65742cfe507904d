"""Checkpoints to load: which of them the machines have, and one whose files are what was saved, while it is read."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import (
    NAME,
    CheckpointRoot,
    Manifest,
    damaged,
    locate,
    read_manifest,
)
from orc.runtime.checkpoint.replication.barrier import Barrier, agree_on_no_error
from orc.runtime.checkpoint.replication.sites import PATIENCE_S, Sites, provide
from orc.runtime.checkpoint.storage import remote
from orc.runtime.checkpoint.storage.remote import Location, Remote, RemoteRoot

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files are what was saved.

    directory:
        Where they can be read; of a checkpoint on an object store a local copy.
    source:
        The object store that still has the files of single ranks, which they `bring` when they know them.
    """

    directory: Path
    manifest: Manifest
    source: Remote | None = None

    def bring(self, names: Iterable[str], *, shared: bool = False) -> None:
        """Copy the files *names*, verified, if they are not here yet.

        Of *shared* ones, which several ranks of a machine name, each is copied by one rank: they are here when all
        ranks have met.

        Raises:
            CheckpointError: one cannot be copied, or does not hold what was saved.
        """
        if self.source is None:
            return
        names = [name for name in names if not (self.directory / name).exists()]
        try:
            mine = [name for name in names if self._claim(name)] if shared else names
            lines = remote.fetch(self.source, self.manifest, mine, self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.source}: {error}") from None
        if lines:
            raise damaged(self.source, lines)

    def _claim(self, name: str) -> bool:
        path = self.directory / f"{name}.claim"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@contextmanager
def verified(
    context: RunContext,
    barrier: Barrier,
    where: Location,
    *,
    sites: Sites | None = None,
    identity: str | None = None,
    whole: bool = True,
) -> Iterator[Verified]:
    """The checkpoint at *where*, verified, for as long as the block lasts. One rank per machine copies what is remote.

    On several *sites* each that lacks the one with this *identity* gets it from another. If no rank wants it *whole*,
    a remote one is copied without shards and random states: each rank has those that it needs brought.

    Raises:
        CheckpointError: on every rank, with everything that is missing, cut off or changed.
    """
    if isinstance(where, Path):
        sites = sites or Sites(context.rank, (0,) * context.world_size)
        yield Verified(*provide(barrier, sites, where, identity))
        return
    whole = barrier.hold("load_state (hooks)", whole, any)  # of any rank: they read the copy of their machine
    mine: Path | None = None
    error: str | None = None
    try:
        if context.is_local_main:
            mine = Path(tempfile.mkdtemp(prefix="orc-checkpoint-"))
            error = _fetch(where, mine, whole)
        copies = barrier.hold(
            "load_state (fetching)",
            [context.node_rank, None if mine is None else str(mine), error],
            _copies,
            timeout_s=max(barrier.timeout_s, PATIENCE_S),
        )
        directory = Path(copies[str(context.node_rank)])
        yield Verified(directory, read_manifest(directory), None if whole else where)
        # The copy may go when everybody on this machine has read it.
        barrier.hold("load_state (done)", None, len, timeout_s=max(barrier.timeout_s, PATIENCE_S))
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def _fetch(where: Remote, target: Path, whole: bool) -> str | None:
    """Copy the checkpoint to *target*, verified on the way; what is wrong with it."""
    try:
        manifest = remote.read_manifest(where)
        lines = remote.problems(where, manifest)
        if not lines:
            of_ranks = set() if whole else _of_ranks(manifest)
            lines = remote.fetch(where, manifest, manifest.files.keys() - of_ranks, target)
            if not lines:
                lines = remote.fetch(where, manifest, _with_plain_values(of_ranks, target), target)
        if lines:
            raise damaged(where, lines)
        (target / NAME).write_bytes(manifest.to_json())
    except (CheckpointError, OSError) as failure:
        return str(failure) if isinstance(failure, CheckpointError) else f"{where}: {failure}"
    return None


def _of_ranks(manifest: Manifest) -> set[str]:
    """Return the files of *manifest* of which a rank needs some alone: shards and random states."""
    shards = {name for name in manifest.files if (match := layout.SHARD.fullmatch(name)) and _listed(match, manifest)}
    return shards | {name for name in manifest.files if layout.RANDOM_STATES.fullmatch(name)}


def _listed(shard: re.Match[str], manifest: Manifest) -> bool:
    return layout.shard_metadata(shard[1]) in manifest.files


def _with_plain_values(names: Iterable[str], target: Path) -> set[str]:
    """Return the shards among *names* that hold more than tensors, which every rank reads."""
    folders = {match[1] for name in names if (match := layout.SHARD.fullmatch(name))}
    if not folders:
        return set()
    from orc.runtime.checkpoint.state.shard_files import files_of_values, read_metadata

    return {f"{folder}/{name}" for folder in folders for name in files_of_values(read_metadata(target / folder))}


def _copies(reports: list[Any]) -> dict[str, str]:
    agree_on_no_error([error for _, _, error in reports])
    return {str(node): directory for node, directory, _ in reports if directory is not None}


# Number, identity and time of a checkpoint that a machine has.
Offer = tuple[int, str, float]


def offers(root: CheckpointRoot | RemoteRoot) -> list[Offer]:
    """The complete checkpoints below *root* that can be seen from this machine."""
    known: list[Offer] = []
    for number, directory in root.committed():
        if isinstance(directory, Path):
            known += [(number, identity, created_at) for _, identity, created_at in offer(directory)]
        else:
            known.append((number, "", 0.0))
    return known


def offer(directory: Location) -> list[Offer]:
    """The checkpoint *directory*, if this machine has one there."""
    if isinstance(directory, Remote):
        return []
    try:
        manifest = read_manifest(locate(directory))
    except CheckpointError:
        return []  # why is said by whoever has to load it
    return [(0, manifest.id, manifest.created_at)]


def newest_first(bids: list[Any]) -> list[tuple[int, str]]:
    """Number and identity of all checkpoints that any machine has; of *bids*: offers, and an error or `None`."""
    agree_on_no_error([error for _, error in bids])
    offered: list[list[Offer] | None] = [some for some, _ in bids]
    every = {(number, created_at, identity) for some in offered for number, identity, created_at in some or ()}
    return [(number, identity) for number, _, identity in sorted(every, reverse=True)]
