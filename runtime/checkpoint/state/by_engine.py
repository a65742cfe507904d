"""Models whose engine lays out its own part of a checkpoint (DeepSpeed): apart from everything else that is prepared.

Such a model brings its optimizer and the schedule that the engine made along; no file of ours holds these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.core.prepared import Layout
from orc.runtime.parallel.records import records_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from orc.runtime.checkpoint.format.manifest import Manifest
    from orc.runtime.checkpoint.storage.durable import Hashing
    from orc.runtime.core.prepared import Prepared


def without_engines(prepared: Prepared) -> Prepared:
    """Return *prepared* without such models and what they bring along; the same object where there is none."""
    records = records_of(prepared)
    if all(one.layout is not Layout.OF_ENGINE for one in records):
        return prepared
    from orc.runtime.engine.deepspeed.wrappers import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

    return dataclasses.replace(
        prepared,
        models=[one.model for one in records if one.layout is not Layout.OF_ENGINE],
        optimizers=[one for one in prepared.optimizers if not isinstance(one, DeepSpeedOptimizerWrapper)],
        schedulers=[one for one in prepared.schedulers if not isinstance(one, DeepSpeedSchedulerWrapper)],
    )


def trained_engines(prepared: Prepared) -> list[Any]:
    """Return the engines that train, in the order of *prepared*; one for inference has nothing to save."""
    engines = [one.model for one in records_of(prepared) if one.layout is Layout.OF_ENGINE]
    if not engines:
        return []
    from orc.runtime.engine.deepspeed.wrappers import DeepSpeedOptimizerWrapper

    ours = [one.deepspeed_engine for one in prepared.optimizers if isinstance(one, DeepSpeedOptimizerWrapper)]
    return [one for one in engines if any(one is other for other in ours)]


def engine_tasks(
    engines: Sequence[Any],
    options: Mapping[str, Any],
    pickle: Callable[[Any, Hashing], None],
    copied: bool = False,
) -> dict[str, Callable[[Hashing], None]]:
    """Return what writes this rank's files of *engines*, by name. Collective where there are any.

    Args:
        engines: those that train.
        options: of the engine's own ``save_checkpoint``.
        pickle: writes one state.
        copied: take copies, so that training may go on.
    """
    if not engines:
        return {}
    from orc.runtime.engine.deepspeed.states import captured

    states: dict[str, Any] = {}
    tasks: dict[str, Callable[[Hashing], None]] = {}
    for index, engine in enumerate(engines):
        parts = captured(engine, index, **options)
        states.update(parts.states)
        tasks.update({name: partial(_write_bytes, content) for name, content in parts.files.items()})
    if copied:
        from orc.runtime.checkpoint.state.staging import Stage

        states = Stage().take(states)  # memory of its own: the save's stage holds everything else
    return tasks | {name: partial(pickle, state) for name, state in states.items()}


def engine_problem(engines: Sequence[Any], manifest: Manifest, ranks: int) -> str | None:
    """Return why *engines*, those that train, cannot load a checkpoint with this *manifest* on so many *ranks*."""
    if not engines:
        if any(name.startswith("pytorch_model/") and name.endswith("_states.pt") for name in manifest.files):
            return "it was saved by a run with DeepSpeed; convert its weights with zero_to_fp32.py, which is in it"
        return None
    from orc.runtime.engine.deepspeed.states import problem

    found = (problem(one, manifest.files, index, manifest.world_size, ranks) for index, one in enumerate(engines))
    return next((text for text in found if text is not None), None)


def load_engines(engines: Sequence[Any], directory: Path, options: Mapping[str, Any]) -> None:
    """Load *engines* from *directory*. Collective where there are any. Raises `CheckpointError`."""
    if not engines:
        return
    from orc.runtime.engine.deepspeed.states import restore

    for index, engine in enumerate(engines):
        restore(engine, directory, index, **options)


def _write_bytes(content: bytes, file: Hashing) -> None:
    file.write(content)
