"""Plugins by kind: the folders and modules of this package, and what other packages announce as entry points.

A backend is a folder below ``orc/launchers/backends`` with a ``BACKEND`` attribute, or an entry point of the group
``orc.backends``; a command is a module below ``orc/launchers/commands`` with a ``COMMAND`` attribute, or an entry point
of the group ``orc.commands``. Entry points are read when a kind is not one of ours: most starts never pay for them.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.launchers.errors import LaunchError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class PluginGroup:
    """The plugins of one sort: ``orc.launchers.<name>`` and the entry points ``orc.<name>``."""

    name: str
    attribute: str  # of the module that is a plugin
    folders: bool  # plugins of ours are folders; files beside them are shared
    shared: frozenset[str] = frozenset()  # else modules that are no plugins

    def kinds(self) -> list[str]:
        """Return the known kinds in alphabetical order; imports none of them."""
        import pkgutil

        package = importlib.util.find_spec(f"orc.launchers.{self.name}")
        assert package is not None
        modules = pkgutil.iter_modules(package.submodule_search_locations)
        ours = {m.name for m in modules if m.name not in self.shared and m.ispkg >= self.folders}
        return sorted(ours | self._entry_points().keys())

    def has(self, kind: str) -> bool:
        """Return True for a kind that this installation can load; imports none."""
        return kind.isidentifier() and (self._is_ours(kind) or kind in self._entry_points())

    def load(self, kind: str) -> Any:
        """Import the plugin of *kind*. Raises `LaunchError` for an unknown kind, or one that cannot be imported."""
        if self._is_ours(kind):
            return getattr(importlib.import_module(f"orc.launchers.{self.name}.{kind}"), self.attribute)
        entry = self._entry_points().get(kind)
        if entry is None:
            raise LaunchError(f"unknown kind {kind!r}", hint=f"known kinds: {', '.join(self.kinds())}")
        try:
            return entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise LaunchError(
                f"the kind {kind} of the package {package} cannot be loaded: {type(error).__name__}: {error}",
                where=f"entry point orc.{self.name}: {entry.value}",
                hint=f"Update or remove {package}.",
            ) from error

    def _is_ours(self, kind: str) -> bool:
        if kind in self.shared or not kind.isidentifier():
            return False
        found = importlib.util.find_spec(f"orc.launchers.{self.name}.{kind}")
        return found is not None and (found.submodule_search_locations is not None) >= self.folders

    def _entry_points(self) -> dict[str, EntryPoint]:
        import importlib.metadata

        return {entry.name: entry for entry in importlib.metadata.entry_points(group=f"orc.{self.name}")}


BACKENDS = PluginGroup("backends", "BACKEND", folders=True)
COMMANDS = PluginGroup("commands", "COMMAND", folders=False, shared=frozenset({"base", "options"}))
