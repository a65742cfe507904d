"""Request of a save: its arguments, and the progress that it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from orc.runtime.checkpoint.format.naming import CheckpointRoot
from orc.runtime.checkpoint.storage.remote import Location, RemoteRoot

Hook = Callable[[list[torch.nn.Module], list[dict[str, Any]], str], None]


@dataclass(frozen=True)
class Progress:
    """Progress of training: optimizer steps, and the position of the loader that training reads.

    ``norms`` are the usual gradient norms by which updates are vetoed (`SpikeGuard.norms`).
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    norms: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of one save, as each rank passes them.

    directory:
        Where to; with `None` below *root*, numbered from *at_least* on and after what any machine has there.
    state:
        Name of the strategy that saves sharded models; with `None` each rank saves its shards.
    """

    directory: Location | None
    root: CheckpointRoot | RemoteRoot | None
    at_least: int
    progress: Progress
    safe: bool = True
    hooks: Sequence[Hook] = ()
    state: str | None = None  # strategy of sharded models
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # of engines that lay out their own part
    alone: bool = False  # rank 0 saves by itself
