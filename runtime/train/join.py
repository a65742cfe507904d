"""Training on inputs that end at different times on different processes."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import Accumulation
    from orc.runtime.core.context import RunContext
    from orc.runtime.train.normalize import LossNormalizer


@contextlib.contextmanager
def join_uneven_inputs(
    ctx: RunContext,
    accumulation: Accumulation,
    joinables: Sequence[Any],
    even_batches: bool | None,
    configured: bool,
    loaders: Sequence[Any],
    normalizer: LossNormalizer,
) -> Iterator[None]:
    """See `Accelerator.join_uneven_inputs`; *configured* is the Accelerator's own ``even_batches``."""
    if not ctx.distributed:
        yield
        return
    from torch.distributed.algorithms.join import Join, Joinable

    inner = [_bare(joinable) for joinable in joinables]
    if not all(isinstance(one, Joinable) for one in inner):
        kinds = ", ".join(type(one).__name__ for one in inner if not isinstance(one, Joinable))
        warnings.warn(
            f"join_uneven_inputs has no effect: only models in DistributedDataParallel can join, not {kinds}",
            stacklevel=3,
        )
        yield
        return
    each_batch = accumulation.take_over().sync_each_batch
    even = configured if even_batches is None else even_batches
    restore = [] if even_batches is None else _override(loaders, even_batches)
    if not even:
        # A process ends its window with its last batch. Where the others go on they would be waited for in vain, so all
        # answer every batch; what is averaged is the same.
        accumulation.take_over().sync_each_batch = normalizer.uneven = True
    try:
        with Join(inner, enable=not even, throw_on_early_termination=False):
            yield
    finally:
        accumulation.take_over().sync_each_batch, normalizer.uneven = each_batch, False
        for undo in restore:
            undo()


def _bare(joinable: Any) -> Any:
    """Return the model or optimizer inside the wrapper that prepare or torch.compile made, or *joinable* itself."""
    return getattr(joinable, "_orig_mod", None) or getattr(joinable, "optimizer", None) or joinable


def _override(loaders: Sequence[Any], even_batches: bool) -> list[Callable[[], None]]:
    """Set ``even_batches`` of all map-style *loaders*; the returned functions set it back."""
    restore: list[Callable[[], None]] = []
    fixed = False
    for loader in loaders:
        sampler = loader._passes()
        if (plan := getattr(sampler, "plan", None)) is not None:
            holder, name, value = sampler, "plan", dataclasses.replace(plan, even_batches=even_batches)
        elif (shard := getattr(sampler, "shard", None)) is not None:
            holder, name, value = shard, "even_batches", even_batches
        else:
            fixed = True
            continue
        restore.append(_setter(holder, name, getattr(holder, name)))
        setattr(holder, name, value)
    if fixed:
        warnings.warn(
            "join_uneven_inputs: even_batches is overridden for map-style datasets only; a prepared loader reads an "
            "iterable one",
            stacklevel=4,
        )
    return restore


def _setter(holder: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(holder, name, value)
