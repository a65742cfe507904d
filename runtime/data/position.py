"""Where a loader is: passes over it while they run, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch

Key = dict[str, Any]
Share = Callable[[torch.Tensor], torch.Tensor]


class Position(TypedDict):
    """What a checkpoint stores of a loader; plain values and tensors only.

    ``offset`` and ``global_batch`` count samples over all ranks; ``rounds`` counts batches of one rank. ``key`` and the
    two counts are meaningful only when ``live``: saved while a pass was running. It is ``finished`` when the last batch
    had been yielded.
    """

    epoch: int
    live: bool
    rounds: int
    offset: int
    global_batch: int
    length: int
    key: Key | None
    generator: torch.Tensor | None
    finished: NotRequired[bool]


def next_epoch(position: Position) -> Position:
    """*position*, or where nothing but the end of its epoch is left, the start of the next."""
    if not (position["live"] and position.get("finished")):
        return position
    return {
        **position,
        "epoch": position["epoch"] + 1,
        "live": False,
        "rounds": 0,
        "offset": 0,
        "key": None,
        "finished": False,
    }


@dataclass(slots=True)
class Pass:
    """One iteration over a loader. ``done`` counts this rank's batches of the epoch, skipped ones included."""

    epoch: int = 0
    done: int = 0
    key: Key | None = None
    restored: bool = False  # continues a pass of another process: draws nothing anew
    began_at: int = 0  # optimizer steps when it began
    steps: int = 0  # optimizer steps when the loop last asked for a batch
    finished: bool = False  # the last batch is out


@dataclass(slots=True)
class Cursor:
    """A loader's place over its passes; shared with the views that `skip_first_batches` makes of it.

    ``pending`` is a restored position that the next pass continues from.
    """

    epoch: int = 0
    live: Pass | None = None
    pending: Position | None = None
    trained: bool = False  # an optimizer step was taken while a pass was running

    def set_epoch(self, epoch: int) -> None:
        """The next pass is number *epoch*; a restored position of another epoch is given up."""
        self.epoch = epoch
        if self.pending is not None and self.pending["epoch"] != epoch:
            self.pending = None
