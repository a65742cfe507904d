"""The part of a checkpoint that the engine lays out by itself (`OwnState`), apart from everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from orc.runtime.core.libraries import libraries

if TYPE_CHECKING:
    from orc.runtime.checkpoint.format.manifest import Manifest
    from orc.runtime.checkpoint.storage.durable import Hashing
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.train.engine import OwnState


def own_state_of(prepared: Prepared) -> OwnState | None:
    """Return what the engine of *prepared* lays out by itself; `None` where that is nothing."""
    return None if prepared.engine is None else prepared.engine.own_state


def without_engines(prepared: Prepared) -> Prepared:
    """Return *prepared* without what its engine lays out by itself; the same object where that is nothing."""
    if (own := own_state_of(prepared)) is None:
        return prepared
    return dataclasses.replace(
        prepared,
        models=[model for model in prepared.models if not own.covers(model)],
        optimizers=[optimizer for optimizer in prepared.optimizers if not own.covers(optimizer)],
        schedulers=[scheduler for scheduler in prepared.schedulers if not own.covers(scheduler)],
    )


def engine_tasks(
    prepared: Prepared, options: Mapping[str, Any], pickle: Callable[[Any, Hashing], None], copied: bool = False
) -> dict[str, Callable[[Hashing], None]]:
    """Return what writes this rank's files of the engine, by name. Collective where there are any.

    Args:
        prepared: what the engine trains.
        options: of the engine's own function that saves.
        pickle: writes one state.
        copied: take copies, so that training may go on.
    """
    own = own_state_of(prepared)
    saved = {} if own is None else own.save(options)
    files = {name: content for name, content in saved.items() if isinstance(content, bytes)}
    states = {name: state for name, state in saved.items() if name not in files}
    if copied and states:
        from orc.runtime.checkpoint.state.staging import Stage

        states = Stage().take(states)  # memory of its own: the save's stage holds everything else
    tasks: dict[str, Callable[[Hashing], None]] = {
        name: partial(_write_bytes, content) for name, content in files.items()
    }
    return tasks | {name: partial(pickle, state) for name, state in states.items()}


def engine_problem(prepared: Prepared, manifest: Manifest) -> str | None:
    """Return why the engine of *prepared* cannot load its part of a checkpoint with this *manifest*."""
    own = own_state_of(prepared)
    if own is not None and own.trained():
        return own.problem(manifest.files, manifest.world_size)
    return next((why for library in libraries().values() if (why := library.problem(manifest.files)) is not None), None)


def _write_bytes(content: bytes, file: Hashing) -> None:
    file.write(content)
