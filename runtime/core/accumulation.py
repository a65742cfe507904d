"""Gradient accumulation: when a batch's gradients are synchronised and applied. All of a process read one record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.handlers import GradientAccumulationPlugin

NoSync: TypeAlias = "Callable[[nn.Module], AbstractContextManager[Any]]"


class PreparedLoader(Protocol):
    """Interface of a prepared loader: the attributes that the core reads, and the calls that the loader makes.

    On the start of a pass it calls ``ctx.gradient.begin(self)``, on every batch it sets
    ``ctx.gradient.current = self``, and when the pass ends ``ctx.gradient.end(self, exhausted=...)`` with
    ``exhausted=False`` when the iterator was closed early.
    """

    end_of_dataloader: bool  # the batch just yielded is the last of this pass
    remainder: int  # samples in the global batch just yielded that are no duplicates; -1: all of them
    total_batch_size: int  # samples per step over all ranks


@dataclass(slots=True, repr=False, eq=False)
class GradientRecord:
    """Accumulation and synchronisation of gradients: what `GradientState` shows.

    ``sync_gradients`` says whether this step's gradients are synchronised and applied. ``active`` holds the loaders
    being iterated, innermost last. ``current`` is the loader that yielded last: it survives an iterator that was
    dropped after one batch, so that ``gather_for_metrics(next(iter(loader)))`` still knows the batch. It is not kept
    alive for that: a loader may have worker processes, which end with it.

    The settings are those of one Accelerator at a time, `owner`: the one that was made or trained last.
    """

    num_steps: int = 1
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    adjust_scheduler: bool = True
    sync_gradients: bool = True
    active: list[PreparedLoader] = field(default_factory=list)
    _current: weakref.ref[PreparedLoader] | None = None
    _remainder: int = -1  # of the current loader's last batch
    _owner: weakref.ref[Accumulation] | None = None

    @property
    def owner(self) -> Accumulation | None:
        """What counts for the Accelerator whose settings these are."""
        return None if self._owner is None else self._owner()

    def serve(self, owner: Accumulation | None) -> None:
        """Put settings and decision of *owner* in force, for `None` the defaults and what was decided last.

        The owner before keeps its own.
        """
        if (before := self.owner) is not None:
            before.settings, before.sync_gradients = self.settings(), self.sync_gradients
        self._owner = None if owner is None else owner._reference
        self.sync_gradients = self.sync_gradients if owner is None else owner.sync_gradients
        for name, value in (GradientRecord().settings() if owner is None else owner.settings).items():
            setattr(self, name, value)

    def take_over(self) -> GradientRecord:
        """Return the record as it is: where no Accelerator decides, as `Accumulation.take_over` where one does."""
        return self

    @property
    def current(self) -> PreparedLoader | None:
        """The loader that yielded last."""
        return None if self._current is None else self._current()

    @current.setter
    def current(self, loader: PreparedLoader | None) -> None:
        if loader is None:
            self._current, self._remainder = None, -1
        else:
            self._current, self._remainder = weakref.ref(loader), loader.remainder

    def follow(self, plugin: GradientAccumulationPlugin) -> None:
        """Put the settings of *plugin* in force."""
        if plugin.num_steps is not None:
            self.num_steps = plugin.num_steps
        self.sync_with_dataloader = plugin.sync_with_dataloader
        self.sync_each_batch = plugin.sync_each_batch
        self.adjust_scheduler = plugin.adjust_scheduler

    def settings(self) -> dict[str, Any]:
        """Return the settings of gradient accumulation, without the state of a loop."""
        names = ("num_steps", "sync_with_dataloader", "sync_each_batch", "adjust_scheduler")
        return {name: getattr(self, name) for name in names}

    def reset(self) -> None:
        """Back to no accumulation and no loader."""
        self._owner = None
        self.num_steps, self.sync_gradients, self.current = 1, True, None
        self.sync_with_dataloader, self.sync_each_batch, self.adjust_scheduler = True, False, True
        self.active.clear()

    def begin(self, loader: PreparedLoader) -> None:
        """*loader* starts a pass; a pass it had not finished is over."""
        self._drop(loader)
        self.active.append(loader)
        self.current = loader

    def end(self, loader: PreparedLoader, *, exhausted: bool = True) -> None:
        """*loader*'s pass is over: it yielded everything (*exhausted*) or its iterator was closed before."""
        self._drop(loader)
        if self.current is loader and (exhausted or self.active):
            self.current = self.active[-1] if self.active else None

    def _drop(self, loader: PreparedLoader) -> None:
        # By identity: a loader may define __eq__.
        self.active[:] = [other for other in self.active if other is not loader]

    @property
    def end_of_dataloader(self) -> bool:
        """`True` if the innermost loader being iterated has just yielded its last batch."""
        return bool(self.active) and self.active[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the current global batch that are no duplicates, where it was filled up; otherwise -1."""
        loader = self.current
        return loader.remainder if loader is not None else self._remainder


class Accumulation:
    """Counts batches and decides; ``step`` counts since the last forced synchronisation.

    Args:
        gradient: what it decides, for all to read.
        no_sync: makes a block in which the gradients of a model stay local; nothing with one process.
    """

    __slots__ = ("__weakref__", "_gradient", "_no_sync", "_reference", "settings", "step", "sync_gradients")

    def __init__(self, gradient: GradientRecord, no_sync: NoSync | None) -> None:
        self._gradient = gradient
        self._no_sync = no_sync
        self._reference = weakref.ref(self)  # there is one: to compare it needs no call
        self.step = 0
        self.settings, self.sync_gradients = gradient.settings(), gradient.sync_gradients
        gradient.serve(self)

    def take_over(self) -> GradientRecord:
        """Put the settings of this Accelerator in force; return the record."""
        gradient = self._gradient
        if gradient._owner is not self._reference:
            gradient.serve(self)
        return gradient

    def advance(self) -> bool:
        """Count one batch; whether its gradients are to be synchronised."""
        gradient = self.take_over()
        active = gradient.active
        if active and gradient.sync_with_dataloader and active[-1].end_of_dataloader:
            self.step = 0
            gradient.sync_gradients = True
            return True
        self.step += 1
        gradient.sync_gradients = sync = self.step % gradient.num_steps == 0
        return sync

    def _local(self, models: tuple[nn.Module, ...]) -> Sequence[AbstractContextManager[Any]]:
        if self._no_sync is None or self._gradient.sync_each_batch:
            return ()
        return [self._no_sync(model) for model in models]


class AccumulateBlock:
    """Context manager that ``accelerator.accumulate(model)`` returns; a class, because a generator costs more."""

    __slots__ = ("_accumulation", "_entered", "_models")

    def __init__(self, accumulation: Accumulation, models: tuple[nn.Module, ...]) -> None:
        self._accumulation = accumulation
        self._models = models

    def __enter__(self) -> None:
        if self._accumulation.advance():
            self._entered: Sequence[AbstractContextManager[Any]] = ()
            return
        self._entered = self._accumulation._local(self._models)
        for context in self._entered:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self._entered:
            for context in reversed(self._entered):
                context.__exit__(*exc)
