"""Comparison of two snapshots, and the files of a snapshot that a host lacks. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from orc.launchers.snapshot.manifest import SYMLINK, Bundle, Entry


@dataclass(frozen=True)
class Comparison:
    """Differences of a snapshot from an earlier one. Entries are those of the newer, but for the removed ones."""

    new: tuple[Entry, ...]
    changed: tuple[Entry, ...]  # in content, mode or link target
    removed: tuple[Entry, ...]
    unchanged: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form."""
        return {
            "new": [entry.path for entry in self.new],
            "changed": [entry.path for entry in self.changed],
            "removed": [entry.path for entry in self.removed],
            "unchanged": self.unchanged,
        }


def compare(old: Bundle | None, new: Bundle) -> Comparison:
    """Return the differences of *new* from *old*; without one everything is new."""
    before = old.by_path if old else {}
    added = tuple(entry for entry in new.entries if entry.path not in before)
    changed = tuple(entry for entry in new.entries if entry.path in before and entry != before[entry.path])
    removed = tuple(entry for path, entry in before.items() if path not in new)
    return Comparison(added, changed, removed, len(new.entries) - len(added) - len(changed))


def lacking(bundle: Bundle, missing: Collection[str]) -> list[Entry]:
    """Return the files of *bundle* whose contents are *missing* (hashes)."""
    return [entry for entry in bundle.entries if entry.mode != SYMLINK and entry.sha256 in missing]
