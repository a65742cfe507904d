"""The Accelerator's part of watching a run: binds what is configured when objects are prepared, and nothing else."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orc.runtime.checkpoint.run import RunCheckpoints
    from orc.runtime.core.context import Prepared, RunContext
    from orc.runtime.engine import NativeEngine
    from orc.runtime.observe.meter import Meter
    from orc.runtime.observe.spikes import SpikeGuard
    from orc.runtime.observe.watch import Watch
    from orc.runtime.train.optimizer import AcceleratedOptimizer


class Watching:
    """The part of the Accelerator that watches: stalls, spikes, measurements, notices of the platform."""

    ctx: RunContext
    _prepared: Prepared
    _engine: NativeEngine
    _checkpoints: RunCheckpoints

    @cached_property
    def _watch(self) -> Watch | None:
        from orc.runtime.observe.watch import Watch
        from orc.runtime.preemption.notices import Notices

        Notices.of(self.ctx)
        watch = Watch.of(self.ctx)
        if watch is not None:
            watch.add(self._prepared, lambda: self._checkpoints.base_step)
            if watch.reporter is not None:
                watch.reporter.bind(self._prepared, self._engine)
        return watch

    @cached_property
    def _meter(self) -> Meter | None:
        watch = self._watch
        return watch.reporter.meter if watch is not None and watch.reporter is not None else None

    @cached_property
    def _spikes(self) -> SpikeGuard | None:
        config = self.ctx.config
        if config.spike_action == "off":
            return None
        from orc.runtime.observe.spikes import SpikeGuard

        guard = SpikeGuard(
            self.ctx,
            config.spike_action,
            config.spike_factor,
            config.spike_every,
            lambda: self._checkpoints.base_step,
        )
        guard.bind_engine(self._engine)
        if self._watch is not None and self._watch.reporter is not None:
            self._watch.reporter.extra = lambda: guard.latest
        return guard

    def _watch_optimizer(self, prepared: AcceleratedOptimizer) -> None:
        """Called once for each optimizer that is prepared."""
        guard = self._spikes
        if guard is not None:
            guard.bind_optimizer(prepared)
        _ = self._watch  # scripts that prepare no loader are watched too

    def _stop_watching(self) -> None:
        if self.__dict__.get("_spikes") is not None:
            self._spikes.flush()  # type: ignore[union-attr]
        if "_watch" in self.__dict__:
            from orc.runtime.observe.watch import Watch
            from orc.runtime.preemption.notices import Notices

            Notices.forget(self.ctx)
            Watch.forget(self.ctx)

    def count_tokens(self, count: int) -> None:
        """Tell the metrics that this process's batch has *count* tokens, where ``input_ids`` does not say it.

        Call it in the body of the training loop, before the optimizer's step. Costs nothing when metrics are off.
        """
        if self._meter is not None:
            self._meter.count_tokens(count)
