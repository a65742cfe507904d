"""Keys that sign what function jobs leave behind: one for each snapshot of calls, in the state directory alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from orc.orchestrator.functions.node import KEY_VARIABLE


def new_key(state_dir: Path, digest: str) -> dict[str, str]:
    """Make the key of the snapshot *digest*; return it as the secret that its jobs get."""
    path = _file(state_dir, digest)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return key_of(state_dir, digest)


def key_of(state_dir: Path, digest: str) -> dict[str, str]:
    """Return what `new_key` has made; nothing for other snapshots, and in other state directories."""
    try:
        return {KEY_VARIABLE: _file(state_dir, digest).read_text()}
    except FileNotFoundError:
        return {}


def _file(state_dir: Path, digest: str) -> Path:
    return state_dir / "functions" / f"{digest}.key"
