"""Prepared loaders that torchdata backs, by name: unpickling finds them here."""

from __future__ import annotations

from typing import Any

from orc.runtime.data.backed import backed
from orc.runtime.data.dispatch import DataLoaderDispatcher
from orc.runtime.data.loader import DataLoaderShard


def __getattr__(name: str) -> Any:
    """The classes by name, for unpickling."""
    if name == "StatefulDataLoaderShard":
        return backed(DataLoaderShard)
    if name == "StatefulDataLoaderDispatcher":
        return backed(DataLoaderDispatcher)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
