"""The Accelerator's methods around checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.checkpoint.saving import StateSaving
from orc.runtime.core.prepared import Layout
from orc.runtime.parallel.records import record_of

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.checkpoint.run import Resumed, RunCheckpoints
    from orc.runtime.checkpoint.storage.remote import Location


class Checkpointing(StateSaving):
    """The part of the Accelerator that saves, loads and resumes whole runs."""

    _made: RunCheckpoints | None = None  # most runs load the code for them with their first checkpoint

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of this run; connections to the other ranks are opened when they are first needed."""
        if self._made is None:
            from orc.runtime.checkpoint.run import RunCheckpoints

            options = self.options
            self._made = RunCheckpoints(self.ctx, self.prepared, options.project, timeout=options.process_group.timeout)
        return self._made

    def base_step(self) -> int:
        """Return the step that the run was resumed at."""
        return 0 if self._made is None else self._made.base_step

    def raise_failed(self) -> None:
        """Raise what a checkpoint in the background has failed with."""
        if self._made is not None and self._made.background.failed:
            self._made.finish()

    def close(self) -> None:
        """Wait for what is written in the background, and close connections."""
        if self._made is not None:
            self._made.close()

    def _aside(self) -> AbstractContextManager[None]:
        """Around work that is no training step, for those who watch the run."""
        from orc.runtime.observe.watch import aside

        return aside(self.ctx)

    def save_state(
        self,
        /,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write models, optimizers, schedulers, positions of loaders, scaler, random states and registered objects.

        The directory appears complete or not at all, whatever happens meanwhile; what it replaces stays until then.
        Every process must call it. Machines that share no directory each get a whole checkpoint.

        Args:
            output_dir: where to. Without it, or with automatic naming, the next ``checkpoint_<n>`` below the project's
                ``checkpoints`` folder or ORC_CHECKPOINT_DIR. URLs name object stores (``s3://bucket/run``).
            safe_serialization: weights as safetensors, otherwise as pickle.
            block: return when the checkpoint is complete and durable. With `False` return when the state is copied to
                host memory, and write that in a thread; an error is raised by the next `save_state`, `load_state`,
                `resume`, `wait_for_checkpoint` or `end_training`, which wait for the thread, as the end of the process
                does.
            save_model_func_kwargs: of DeepSpeed's ``save_checkpoint``; with other engines unused, with a warning.

        Returns:
            The directory.

        Raises:
            CheckpointError: it could not be written, or a process did not call it within the time-out of collectives
                (`InitProcessGroupKwargs`, ORC_TIMEOUT_S, otherwise ten minutes); nothing has changed.
            ValueError: there is no directory to write to.
        """
        if all(record.layout is not Layout.OF_ENGINE for record in self.prepared.records):
            _warn_of_unused("save_state", save_model_func_kwargs)
        place = self.save_checkpoint(_place(output_dir), safe_serialization, block, save_model_func_kwargs)
        return str(place)

    def save_checkpoint(
        self,
        directory: Location | None = None,
        safe: bool = True,
        block: bool = True,
        engine_options: Mapping[str, Any] | None = None,
    ) -> Location:
        """`save_state` to a place; without one, the next automatically named checkpoint."""
        with self._aside():
            hooks = tuple(self.save_hooks.values())
            place = self.checkpoints.save(directory, safe=safe, hooks=hooks, block=block, engine_options=engine_options)
        for tell in self.engine.events.on_save:
            tell(place)
        return place

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that is written in the background (``block=False``) is complete; on all processes.

        Raises:
            CheckpointError: it could not be written.
        """
        with self._aside():
            self.checkpoints.finish()

    def load_state(
        self,
        /,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Read what `save_state` wrote, into the same objects prepared in the same order.

        All files are verified on all processes before anything is changed. Loaders continue where they were with their
        next pass; `skip_first_batches` takes the place of that. Where machines share no directory, all load the newest
        that any of them has whole; those without it get a copy.

        Args:
            input_dir: the directory; without it the newest complete checkpoint.
            load_kwargs: ``map_location`` for everything that is loaded: as for ``torch.load``, or ``on_device``, this
                process's device. Anything else of ``torch.load`` has no effect, with a warning: files are mapped into
                memory, and read as ``weights_only=True`` does.
            load_model_func_kwargs: ``map_location``, and arguments of the models' ``load_state_dict`` (``strict``).

        Raises:
            CheckpointError: there is no such checkpoint, it is incomplete or damaged, or it does not fit.
        """
        options, loading = dict(load_model_func_kwargs), dict(load_kwargs or {})
        location = options.pop("map_location", loading.pop("map_location", None))
        if location == "on_device":
            location = self.ctx.device
        if loading.get("weights_only"):
            del loading["weights_only"]
        _warn_of_unused("load_state", loading)
        with self._aside():
            self.checkpoints.load(
                _place(input_dir),
                hooks=tuple(self.load_hooks.values()),
                map_location=location,
                model_options=options,
            )

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint of this run; return `None` where there is none.

        Call it after `prepare`, and start the loop at its ``epoch``: the prepared loader goes on in the middle of that
        epoch, with the next batch. With ``resume: never`` (ORC_RESUME=never) it does nothing.

        Raises:
            CheckpointError: the newest checkpoint does not fit, or all are damaged.
        """
        return self.checkpoints.resume(hooks=tuple(self.load_hooks.values()))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of *model* for `load_checkpoint_in_model` or other programs, on the main process.

        A sharded model is gathered there first: every process calls it.

        Args:
            model: prepared or not.
            save_directory: created if needed.
            max_shard_size: bytes, or digits and a unit (``5MB``, ``1GiB``); larger models are cut into several files
                with an index. A weight that is larger by itself gets a file of its own.
            safe_serialization: safetensors, otherwise pickle.

        Raises:
            ValueError: *max_shard_size* cannot be read.
            CheckpointError: the weights cannot be stored this way.
        """
        from orc.runtime.checkpoint.state.strategies import FULL, strategy_named
        from orc.runtime.weights.loading import save_model
        from orc.runtime.weights.quantization.scheme import refuse_to_save

        refuse_to_save(model)  # on all processes
        each_node = self.options.project.save_on_each_node
        writes = self.ctx.is_local_main if each_node else self.ctx.is_main
        record = record_of(self.prepared, model)
        if record.spread:
            state = strategy_named(FULL).model_state(record, keep=writes)
        else:
            state = self.ctx.compute.to_cpu(self.engine.model_state(model))  # on all processes
        if writes:
            save_model(model, save_directory, max_shard_size, safe_serialization, state)


def _warn_of_unused(method: str, options: Mapping[str, Any]) -> None:
    if options:
        warnings.warn(f"{method}: {', '.join(sorted(options))} has no effect with the engine in use", stacklevel=4)


def _place(given: str | os.PathLike[str] | None) -> Location | None:
    if given is None or "://" not in (name := os.fspath(given)):
        return None if given is None else Path(given)
    from orc.runtime.checkpoint.storage.remote import place

    return place(name)
