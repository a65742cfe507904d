"""Re-exports under a documented path: ``from orc.runtime.data_loader import prepare_data_loader``."""

from __future__ import annotations

from orc.runtime.data.adapter import DataLoaderAdapter
from orc.runtime.data.dispatch import DataLoaderDispatcher
from orc.runtime.data.iterable import IterableDatasetShard
from orc.runtime.data.loader import DataLoaderShard
from orc.runtime.data.prepare import prepare_data_loader, skip_first_batches
from orc.runtime.data.samplers import BatchSamplerShard, SeedableRandomSampler

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
