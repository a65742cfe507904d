"""Positions of a loader: its passes while they run, and the position that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch

if TYPE_CHECKING:
    from typing import NotRequired  # newer than the oldest Python of a rank

Key = dict[str, Any]
Share = Callable[[torch.Tensor], torch.Tensor]


class Position(TypedDict):
    """Position of a loader, as a checkpoint stores it; plain values and tensors only.

    ``offset`` and ``global_batch`` count samples over all ranks; ``rounds`` counts batches of one rank. ``key`` and the
    counts are meaningful only when ``live``: saved while a pass was running. It is ``finished`` when the last batch
    had been yielded.

    ``batches`` and ``batch_size`` are those of a batch sampler of the user's own, ``ranks`` the number of shares of
    data that shares itself out.
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
    batches: NotRequired[int]
    batch_size: NotRequired[int | None]
    ranks: NotRequired[int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The point of an epoch from which on its samples are cut into the present rounds.

    It is the start, unless the epoch was continued with another number of samples per step.

    ``rounds`` and ``samples`` were taken before; ``batches`` those of a batch sampler of the user's own.
    """

    rounds: int = 0
    samples: int = 0
    batches: int = 0


def offset_of(position: Position) -> int:
    """Return the samples of the epoch that all ranks had taken at *position*."""
    return position["offset"] or position["rounds"] * position["global_batch"]


def cut_at(position: Position, global_batch: int) -> Cut:
    """Return the cut for continuing *position* in rounds of *global_batch* samples.

    Rounds that lie as they would without the interruption need no new one.
    """
    offset = offset_of(position)
    return Cut() if offset == position["rounds"] * global_batch else Cut(position["rounds"], offset)


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
    """An iteration over a loader. ``done`` counts this rank's batches of the epoch, skipped ones included."""

    epoch: int = 0
    done: int = 0
    key: Key | None = None
    restored: bool = False  # continues a pass of another process: draws nothing anew
    began_at: int = 0  # optimizer steps taken or skipped when it began
    attempts: int = 0  # ... when the loop last asked for a batch
    finished: bool = False  # the last batch is out
    cut: Cut = Cut()

    @property
    def rounds(self) -> int:
        """Batches since the present cut."""
        return self.done - self.cut.rounds

    def samples(self, global_batch: int) -> int:
        """Samples of the epoch that rounds of *global_batch* have taken, those before the cut included."""
        return self.cut.samples + self.rounds * global_batch


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


def training_loader(loaders: Sequence[Any]) -> Any | None:
    """The loader that training reads: one that ran while the optimizer stepped, else one that runs, else the first."""

    def rank(loader: Any) -> tuple[bool, bool]:
        cursor = loader.cursor
        return cursor.trained, cursor.live is not None

    return max(loaders, key=rank) if loaders else None
