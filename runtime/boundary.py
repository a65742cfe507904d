"""The moment between two steps: everything of the last is done, nothing of the next has begun.

It listens to the training loop asking a prepared loader for its next batch. Here checkpoints are taken automatically, a
preempted run stops, and progress is told; the script needs no line for any of it.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import ConfigError
from orc.runtime.observe.progress import ProgressFile
from orc.runtime.preemption.preemption import Preempted, Preemption

if TYPE_CHECKING:
    from orc.runtime.checkpointing import Checkpointing
    from orc.runtime.observe.meter import Meter


class Boundary:
    """Actions between steps of one Accelerator: progress, metrics, preemption and automatic checkpoints.

    Args:
        checkpointing: saves the run.
        preemption: of the process.
        progress: where to tell, if anywhere.
        every: optimizer steps between automatic checkpoints; `None` for none.
        meter: measures the steps, if anybody does.
    """

    def __init__(
        self,
        checkpointing: Checkpointing,
        preemption: Preemption,
        progress: ProgressFile | None = None,
        every: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._checkpointing = checkpointing
        self._prepared = checkpointing.prepared
        self._preemption = preemption
        self._progress = progress
        self._every = every
        self._meter = meter
        # Several ranks would learn of an error at different steps; they raise it at the next call, all together.
        self._alone = checkpointing.ctx.world_size == 1
        self._seen = self._prepared.steps()

    @classmethod
    def of(cls, checkpointing: Checkpointing, meter: Meter | None = None) -> Boundary:
        """From the configuration. Raises `ConfigError` when checkpoints are wanted but there is no place for them."""
        context = checkpointing.ctx
        every = context.config.checkpoint_every
        if every is not None and checkpointing.checkpoints.root is None:
            raise ConfigError(
                f"checkpoint_every = {every} (from {context.config.source('checkpoint_every')}) needs a place: set "
                "ORC_CHECKPOINT_DIR, or pass Accelerator(project_dir=...)"
            )
        progress = ProgressFile.of(context)
        if progress is not None:
            atexit.register(progress.flush)
        return cls(checkpointing, Preemption.of(context), progress, every, meter)

    @property
    def preempted(self) -> bool:
        """Return whether the run is to stop at the next boundary."""
        return self._preemption.due()

    def __call__(self, loader: Any) -> None:
        """Count the next batch of *loader*. Raises `Preempted` where the run is to stop."""
        attempts = self._prepared.attempts()
        live = loader.cursor.live
        if attempts == live.attempts:
            return  # evaluation, or gradients still accumulating: no step was taken in this loop
        live.attempts = attempts
        steps = self._prepared.steps()
        if steps == self._seen:
            return  # another loader of the same loop was first, or the step was skipped
        self._seen = steps
        loader.cursor.trained = True
        if self._meter is not None:
            self._meter.step(loader)
        if self._progress is not None:
            loss = self._meter.told_loss if self._meter is not None else None
            self._progress.update(self._step(), loader.epoch, loader.samples_seen, of=_length(loader), loss=loss)
        if self._alone:
            self._checkpointing.raise_failed()
        if self._preemption.tick():
            self._leave(self._step())
        # A multiple may lie between two boundaries: several updates of one batch, or updates outside of the loop.
        if self._every is not None:
            saved = self._checkpointing.checkpoints.saved_step
            if self._step() // self._every > saved // self._every:
                self._checkpointing.save_checkpoint()

    def _step(self) -> int:
        """Return the step of the run at this boundary."""
        return self._checkpointing.base_step() + self._seen

    def close(self) -> None:
        """End the training: report the last progress, give signals and connections back."""
        if self._progress is not None:
            self._progress.flush()
        self._preemption.forget(self._checkpointing.ctx)

    def _leave(self, step: int) -> None:
        from orc.runtime.checkpoint.errors import CheckpointError, tell

        checkpoints = self._checkpointing.checkpoints
        if self._progress is not None:
            self._progress.flush()
        try:
            checkpoints.finish()
        except CheckpointError as error:  # what follows saves this step anyway
            tell(error)
        if checkpoints.root is None:
            message = f"preempted after step {step}; nothing was saved: there is no checkpoint directory"
        elif checkpoints.saved_step == step:
            message = f"preempted after step {step}, which is saved already"
        else:
            message = f"preempted after step {step}, saved to {self._checkpointing.save_checkpoint()}"
        if checkpoints.context.is_main:
            tell(message)
        self._preemption.leaving = True
        raise Preempted(message)


def _length(loader: Any) -> int | None:
    """Return the samples of an epoch of *loader*; `None` where its dataset does not know."""
    try:
        return int(loader.total_dataset_length)
    except (AttributeError, NotImplementedError, TypeError):
        return None
