"""Gradient accumulation: when a batch's gradients are synchronised and applied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import GradientRecord
    from orc.runtime.train.engine import Engine


class Accumulation:
    """Counts batches and decides; ``step`` counts since the last forced synchronisation."""

    __slots__ = ("_alone", "_engine", "_gradient", "step")

    def __init__(self, gradient: GradientRecord, engine: Engine) -> None:
        self._gradient = gradient
        self._engine = engine
        self._alone = not engine.ctx.distributed  # nobody to synchronise with
        self.step = 0

    def advance(self) -> bool:
        """Count one batch; whether its gradients are to be synchronised."""
        gradient = self._gradient
        active = gradient.active
        if active and gradient.sync_with_dataloader and active[-1].end_of_dataloader:
            self.step = 0
            gradient.sync_gradients = True
            return True
        self.step += 1
        gradient.sync_gradients = sync = self.step % gradient.num_steps == 0
        return sync

    def block(self, models: tuple[nn.Module, ...]) -> AccumulateBlock:
        """The context around one batch's forward, backward and step."""
        return AccumulateBlock(self, models)

    def _local(self, models: tuple[nn.Module, ...]) -> Sequence[AbstractContextManager[Any]]:
        if self._alone or self._gradient.sync_each_batch:
            return ()
        return [self._engine.no_sync(model) for model in models]


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
