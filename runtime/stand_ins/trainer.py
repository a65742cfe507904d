"""Transformers' `Trainer` in a job: a preempted run saves by the Trainer's own means, and the next attempt resumes it.

`equip` puts a callback among the Trainer's default ones, and has ``train`` look for a checkpoint where the script names
none. Outside of a job of orc neither does anything. A checkpoint counts when it is complete, all ranks having written
their parts, and of this job: `MARK` in it holds the job's id.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from orc.runtime.core.context import RunContext, current_context
from orc.runtime.preemption.preemption import Preempted, Preemption

MARK = "orc-job"


def job_of(context: RunContext) -> str | None:
    """Return the id of the job that *context* belongs to; `None` outside of one."""
    job = context.env.job
    return job.id or job.marker if job.attempt_dir is not None else None


def newest_checkpoint(folder: str, job: str) -> str | None:
    """Return the newest complete checkpoint of *job* among the ``checkpoint-<step>`` below *folder*, if any."""
    checkpoints = [
        (int(place.name.removeprefix("checkpoint-")), str(place))
        for place in Path(folder).glob("checkpoint-*")
        if place.name.removeprefix("checkpoint-").isdecimal() and _mark(place) == job
    ]
    return max(checkpoints)[1] if checkpoints else None


def _mark(place: Path) -> str | None:
    try:
        return (place / MARK).read_text()
    except OSError:
        return None


def equip(module: ModuleType) -> None:
    """Prepare *module*, ``transformers.trainer``."""
    module.DEFAULT_CALLBACKS.append(_callback())
    trainer: Any = module.Trainer
    original = trainer.train

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is None:
            resume_from_checkpoint = _resumable(self.args.output_dir)
        return original(self, resume_from_checkpoint, *args, **kwargs)

    trainer.train = train
    if hasattr(trainer, "get_sp_size"):
        trainer.set_initial_training_values = _counted(trainer.set_initial_training_values)


def _counted(original: Any) -> Any:
    """Return *original*, of the Trainer, for loaders of the runtime.

    It multiplies the batches of a loader by the processes along ``sp``, for loaders that give each of these another
    batch. Those of the runtime give all of them pieces of the same one, and count it as one.
    """

    @functools.wraps(original)
    def set_initial_training_values(self: Any, args: Any, dataloader: Any, *more: Any) -> Any:
        total = self.get_total_train_batch_size(args)
        instead = {"get_sp_size": lambda: 1, "get_total_train_batch_size": lambda args: total}
        vars(self).update(instead)
        try:
            return original(self, args, dataloader, *more)
        finally:
            for name in instead:
                del vars(self)[name]

    return set_initial_training_values


def _resumable(folder: str | None) -> str | None:
    """Return the checkpoint below *folder* to resume, as rank 0 sees it; `None` to begin anew."""
    from orc.runtime.collectives.objects import broadcast_object_list

    context = current_context()
    job = job_of(context)
    if job is None or folder is None or context.config.resume == "never":
        return None
    newest = [newest_checkpoint(folder, job) if context.is_main else None]
    broadcast_object_list(newest)
    if newest[0] is not None and context.is_main:
        print(f"orc: resuming {newest[0]}", file=sys.stderr, flush=True)  # noqa: T201
    return newest[0]


def _callback() -> type:
    from transformers.trainer_callback import TrainerCallback

    from orc.runtime.core.process_control import wait_for_everyone

    class JobCallback(TrainerCallback):  # type: ignore[misc]
        """Callback that has a run save and leave when it is preempted, and marks checkpoints that are complete."""

        def __init__(self) -> None:
            self.leaving = False

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Request a checkpoint, on all ranks after the same step, where the run is to stop."""
            context = current_context()
            if job_of(context) is not None and Preemption.of(context).due():
                self.leaving = control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Mark the checkpoint. Raises `Preempted` where the run is to stop."""
            context = current_context()
            job = job_of(context)
            if job is None:
                return
            wait_for_everyone()
            place = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if context.is_main and place.is_dir():
                temporary = place / f"{MARK}.tmp"
                temporary.write_text(job)
                temporary.replace(place / MARK)
            if self.leaving:
                wait_for_everyone()
                message = f"preempted after step {state.global_step}, saved to {place}"
                if context.is_main:
                    print(f"orc: {message}", file=sys.stderr, flush=True)  # noqa: T201
                Preemption.of(context).leaving = True
                raise Preempted(message)

    return JobCallback
