"""Automatically named checkpoints: where they are, which is the newest, which may go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orc.runtime.checkpoint.format.layout import MARK, is_committed, locate
from orc.runtime.checkpoint.state.ownership import forget_dead
from orc.runtime.checkpoint.storage.durable import remove_tree, sync_directory

NUMBERED = re.compile(r"checkpoint_(\d+)")
_LEFT_OVER = re.compile(r"checkpoint_\d+(\.replaced|\.site-\d+)?\.(tmp|replaced)")


@dataclass(frozen=True)
class CheckpointRoot:
    """A directory of ``checkpoint_<n>``; *n* grows and is never used twice."""

    path: Path

    def committed(self) -> list[tuple[int, Path]]:
        """Complete checkpoints with their numbers, oldest first."""
        checkpoints = []
        for name in {entry.name.removesuffix(".replaced") for entry in self._entries()}:
            if match := NUMBERED.fullmatch(name):
                directory = locate(self.path / name)
                if is_committed(directory):
                    checkpoints.append((int(match[1]), directory))
        return sorted(checkpoints)

    def numbered(self, number: int) -> Path:
        """The directory of checkpoint *number*, there or not."""
        return self.path.absolute() / f"checkpoint_{number}"

    def next(self, at_least: int = 0) -> tuple[int, Path]:
        """Number and directory for the next checkpoint: after every one that is there, complete or not."""
        numbers = [int(match[1]) for entry in self._entries() if (match := NUMBERED.match(entry.name))]
        number = max([at_least, *(n + 1 for n in numbers)])
        return number, self.path / f"checkpoint_{number}"

    def retain(self, keep: int | None) -> list[Path]:
        """Remove complete checkpoints beyond the *keep* newest, and what interrupted saves left; what was removed.

        The newest is never removed.
        """
        removed = []
        checkpoints = self.committed()
        for _, directory in checkpoints[: max(0, len(checkpoints) - max(keep, 1))] if keep is not None else []:
            gone = directory.with_name(f"{directory.name}.tmp")
            remove_tree(gone)
            directory.rename(gone)  # in one step no longer a checkpoint, before its files go one by one
            removed.append(directory)
        for entry in self._entries():
            if _LEFT_OVER.fullmatch(entry.name) and locate(entry.with_suffix("")) != entry:
                remove_tree(entry)
            elif MARK.fullmatch(entry.name):
                entry.unlink()
        forget_dead(self.path.absolute())
        if removed:
            sync_directory(self.path)
        return removed

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.path.iterdir())
        except FileNotFoundError:
            return []


def number_of(directory: Any) -> int | None:
    """*n* of ``checkpoint_<n>``; `None` for another name."""
    match = NUMBERED.fullmatch(directory.name.removesuffix(".replaced"))
    return int(match[1]) if match else None
