"""A loader like another one, with batches of another size."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from orc.runtime.data.prepare import KEPT


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return a loader like *loader* with batches of *batch_size* samples.

    Raises:
        ValueError: its batches are made by a sampler of the script's own, or it has none.
    """
    if loader.batch_size == batch_size:
        return loader
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ValueError(
            "the batches of this loader are made by a sampler of their own, so that their size cannot be changed to "
            f"{batch_size}: give the DataLoader a batch_size instead of a batch_sampler"
        )
    known = inspect.signature(DataLoader.__init__).parameters
    kept: dict[str, Any] = {name: getattr(loader, name) for name in KEPT if name in known and hasattr(loader, name)}
    if not isinstance(loader.dataset, IterableDataset):
        kept["sampler"] = loader.sampler
    return DataLoader(loader.dataset, batch_size=batch_size, drop_last=loader.drop_last, **kept)
