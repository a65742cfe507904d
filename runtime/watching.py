"""The Accelerator's part that watches a run: makes what is configured when objects are prepared, and lets it listen."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.runtime.boundary import Boundary
    from orc.runtime.checkpointing import Checkpointing
    from orc.runtime.observe.meter import Meter
    from orc.runtime.observe.spikes import SpikeGuard
    from orc.runtime.observe.watch import Watch
    from orc.runtime.train.engine import Engine


class Watching:
    """Stalls, spikes, measurements, notices of the platform, and what happens between steps, of one Accelerator.

    Nothing of it exists before the first optimizer or loader is prepared; what is not configured never does.

    Args:
        engine: whose events they listen to.
        checkpointing: saves automatically, and knows the step that the run was resumed at.
    """

    def __init__(self, engine: Engine, checkpointing: Checkpointing) -> None:
        self.ctx = engine.ctx
        self._engine = engine
        self._checkpointing = checkpointing
        if self.ctx.device.type == "cuda":
            from orc.runtime.observe.device import announce
            from orc.runtime.observe.out_of_memory import explain_out_of_memory

            announce(self.ctx)
            explain_out_of_memory(self.ctx.device)

    @cached_property
    def watch(self) -> Watch | None:
        """The background thread that looks after the run, if there is one."""
        from orc.runtime.observe.watch import Watch
        from orc.runtime.preemption.notices import Notices

        Notices.of(self.ctx)
        if self.ctx.world_size > 1:
            from orc.runtime.checkpoint.replication.absence import Responder

            Responder.of(self.ctx, self._engine.prepared)
        watch = Watch.of(self.ctx)
        if watch is not None:
            watch.add(self._engine.prepared, self._checkpointing.base_step)
            self._engine.events.subscribe("on_save", lambda place: watch.touch())
            if watch.reporter is not None:
                watch.reporter.listen(self._engine)
        return watch

    @cached_property
    def meter(self) -> Meter | None:
        """The measurements of this process's steps, if they are taken."""
        watch = self.watch
        return watch.reporter.meter if watch is not None and watch.reporter is not None else None

    @cached_property
    def spikes(self) -> SpikeGuard | None:
        """The spike guard, if there is one."""
        config = self.ctx.config
        if config.spike_action == "off":
            return None
        from orc.runtime.observe.spikes import SpikeGuard

        guard = SpikeGuard(
            self.ctx,
            config.spike_action,
            config.spike_factor,
            config.spike_every,
            self._checkpointing.base_step,
        )
        guard.listen(self._engine.events)
        self._engine.prepared.guard = guard
        if self.watch is not None and self.watch.reporter is not None:
            self.watch.reporter.extra = lambda: guard.latest
        return guard

    @cached_property
    def boundary(self) -> Boundary:
        """The moment between two steps, where checkpoints are taken and a preempted run stops."""
        from orc.runtime.boundary import Boundary

        boundary = Boundary.of(self._checkpointing, self.meter)
        self._engine.events.subscribe("on_batch", boundary)
        return boundary

    def begin(self) -> None:
        """Watch from now on: an optimizer is prepared. Scripts that prepare no loader are watched too."""
        _ = self.spikes, self.watch

    def attach(self, loader: Any) -> None:
        """Connect the prepared *loader* to the events, metrics and steps of the run."""
        _ = self.boundary
        loader.events, loader.meter, loader.attempts = self._engine.events, self.meter, self._engine.prepared.attempts

    def count_tokens(self, count: int) -> None:
        """Count *count* tokens of this process's batch for the metrics, where it has no ``input_ids``.

        Call it in the body of the training loop, before the optimizer's step. Costs nothing when metrics are off.
        """
        if self.meter is not None:
            self.meter.count_tokens(count)

    def close(self) -> None:
        """End the watch: deliver what is left, end threads, restore signal handlers."""
        made = self.__dict__
        try:
            if made.get("spikes") is not None:
                made["spikes"].flush()
            if "watch" in made:
                from orc.runtime.observe.watch import Watch
                from orc.runtime.preemption.notices import Notices

                Notices.forget(self.ctx)
                Watch.forget(self.ctx)
        finally:
            try:
                self._checkpointing.close()
            finally:
                if "boundary" in made:
                    made["boundary"].close()
