"""Verification: a checkpoint whose files are what was saved, for as long as it is read."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.manifest import (
    NAME,
    Manifest,
    content_problems,
    damaged,
    locate,
    read_manifest,
    size_problems,
)
from orc.runtime.checkpoint.replication.barrier import Barrier
from orc.runtime.checkpoint.replication.replicas import provide
from orc.runtime.checkpoint.replication.sites import Sites
from orc.runtime.checkpoint.storage import remote
from orc.runtime.checkpoint.storage.remote import Location, Remote

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

READ_PATIENCE_S = 3600.0


def verify(context: RunContext, barrier: Barrier, directory: Path) -> Manifest:
    """The manifest of *directory* when every file is as it was written. The ranks share out the reading.

    Raises:
        CheckpointError: on every rank, with everything that is missing, cut off or changed.
    """
    manifest: Manifest | None = None
    error: str | None = None
    try:
        manifest = read_manifest(directory)
        problems = size_problems(directory, manifest)
        if not problems:
            problems = content_problems(directory, manifest, sorted(manifest.files)[context.rank :: context.world_size])
        if problems:
            raise damaged(directory, problems)
    except CheckpointError as failure:
        error = str(failure)
    barrier.hold("load_state (verifying)", error, _first_text, timeout_s=max(barrier.timeout_s, READ_PATIENCE_S))
    assert manifest is not None
    return manifest


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose files are what was saved.

    directory:
        Where they can be read; of a checkpoint on an object store a local copy.
    """

    directory: Path
    manifest: Manifest


@contextmanager
def verified(
    context: RunContext, barrier: Barrier, where: Location, *, sites: Sites | None = None, identity: str | None = None
) -> Iterator[Verified]:
    """The checkpoint at *where*, verified, for as long as the block lasts. One rank per machine copies what is remote.

    On several *sites* each that lacks the one with this *identity* gets it from another.

    Raises:
        CheckpointError: on every rank, with everything that is missing, cut off or changed.
    """
    if isinstance(where, Path):
        if sites is not None and sites.several and identity is not None:
            yield Verified(*provide(barrier, sites, where, identity, tell))
        else:
            found = locate(where)
            yield Verified(found, verify(context, barrier, found))
        return
    mine: Path | None = None
    error: str | None = None
    try:
        if context.is_local_main:
            mine = Path(tempfile.mkdtemp(prefix="orc-checkpoint-"))
            error = _fetch(context, where, mine)
        copies = barrier.hold(
            "load_state (fetching)",
            [context.node_rank, None if mine is None else str(mine), error],
            _copies,
            timeout_s=max(barrier.timeout_s, READ_PATIENCE_S),
        )
        directory = Path(copies[str(context.node_rank)])
        yield Verified(directory, read_manifest(directory))
        # The copy may go when everybody on this machine has read it.
        barrier.hold("load_state (done)", None, len, timeout_s=max(barrier.timeout_s, READ_PATIENCE_S))
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def tell(text: str) -> None:
    """Write *text* to the log of the run."""
    print(f"orc: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the run


def _fetch(context: RunContext, where: Remote, target: Path) -> str | None:
    """Copy the checkpoint to *target*, verified on the way; what is wrong with it."""
    try:
        manifest = remote.read_manifest(where)
        lines = remote.problems(where, manifest)
        if not lines:
            lines = remote.fetch(where, manifest, manifest.files, target)
        if lines:
            raise damaged(where, lines)
        (target / NAME).write_bytes(manifest.to_json())
    except (CheckpointError, OSError) as failure:
        return str(failure) if isinstance(failure, CheckpointError) else f"{where}: {failure}"
    return None


def _copies(reports: list[Any]) -> dict[str, str]:
    _first_text([error for _, _, error in reports])
    return {str(node): directory for node, directory, _ in reports if directory is not None}


def _first_text(errors: list[Any]) -> None:
    texts = sorted({text for text in errors if text})
    if texts:
        raise CheckpointError("\n".join(texts))
