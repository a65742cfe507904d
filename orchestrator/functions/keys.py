"""Keys that sign what function jobs leave behind: one for each snapshot of calls, in the state directory alone."""

from __future__ import annotations

import secrets
from pathlib import Path

from orc.launchers.errors import LaunchError
from orc.launchers.remote.files import write_file
from orc.launchers.snapshot.tree_store import fsync_directory
from orc.orchestrator.functions.node import KEY_VARIABLE

_BYTES = 32


def new_key(state_dir: Path, digest: str) -> dict[str, str]:
    """Make the key of the snapshot *digest*; return it as the secret that its jobs get."""
    path = _file(state_dir, digest)
    try:
        write_file(str(path), secrets.token_hex(_BYTES).encode(), 0o600, new=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise LaunchError(f"cannot keep the key of the function: {error.strerror or error}", where=str(path)) from error
    return key_of(state_dir, digest)


def key_of(state_dir: Path, digest: str) -> dict[str, str]:
    """Return what `new_key` has made; nothing for other snapshots, and in other state directories."""
    try:
        key = _file(state_dir, digest).read_text()
    except FileNotFoundError:
        return {}
    return {KEY_VARIABLE: key} if len(key) == 2 * _BYTES else {}  # an empty one would sign for everybody


def _file(state_dir: Path, digest: str) -> Path:
    return state_dir / "functions" / f"{digest}.key"
