"""Loaders of a run: every rank reads its share, keeps its position, and can go on from there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.runtime.data.adapter import DataLoaderAdapter
    from orc.runtime.data.dispatch import DataLoaderDispatcher
    from orc.runtime.data.iterable import IterableDatasetShard
    from orc.runtime.data.loader import DataLoaderShard
    from orc.runtime.data.prepare import prepare_data_loader, skip_first_batches
    from orc.runtime.data.samplers import BatchSamplerShard, SeedableRandomSampler

_HOMES = {
    "BatchSamplerShard": "samplers",
    "DataLoaderAdapter": "adapter",
    "DataLoaderDispatcher": "dispatch",
    "DataLoaderShard": "loader",
    "IterableDatasetShard": "iterable",
    "SeedableRandomSampler": "samplers",
    "prepare_data_loader": "prepare",
    "skip_first_batches": "prepare",
}

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "prepare_data_loader",
    "skip_first_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
