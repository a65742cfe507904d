"""Arithmetic of the samples of an epoch that a rank reads: a plan describes the cut, positions in it are numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace


class PositionError(ValueError):
    """A saved position that cannot be continued here; the message has what differs and what would fit."""


@dataclass(frozen=True)
class IndexPlan:
    """The cut of one epoch's order of samples into batches over ranks.

    The order (a permutation or simply 0, 1, 2, ...) is consumed in *rounds* of `global_batch` samples; in each round
    rank ``r`` takes rows ``r * rows`` to ``(r + 1) * rows``. Nothing here depends on the rank that asks, so a plan is
    the same object on every rank, and any position in it is found without walking to it.

    length:
        Samples in the order.
    batch_size:
        As given to the `DataLoader`: rows per rank, or rows of all ranks together with ``split_batches``.
    even_batches:
        With several ranks and without ``drop_last``, the last round is filled up from the start of the order, so that
        every rank gets equally many batches of equal size.
    start:
        Samples of the order that were taken before; rounds are counted from there.
    """

    length: int
    batch_size: int
    world_size: int = 1
    split_batches: bool = False
    drop_last: bool = False
    even_batches: bool = True
    start: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1 or self.length < 0:
            raise ValueError(f"no such plan: {self}")
        if self.split_batches and self.batch_size % self.world_size:
            raise ValueError(
                f"split_batches cuts each batch into {self.world_size} equal parts: batch_size {self.batch_size} is "
                f"not a multiple of {self.world_size}"
            )

    @property
    def rows(self) -> int:
        """Rows of one rank's full batch."""
        return self.batch_size // self.world_size if self.split_batches else self.batch_size

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together take in one round."""
        return self.rows * self.world_size

    @property
    def full_rounds(self) -> int:
        """Rounds that need no filling up."""
        return (self.length - self.start) // self.global_batch

    @property
    def remainder(self) -> int:
        """Samples of the last, incomplete round; 0 when there is none or when it is dropped."""
        return 0 if self.drop_last else (self.length - self.start) % self.global_batch

    @property
    def rounds(self) -> int:
        """Rounds of what is left of the epoch, an incomplete last one included."""
        return self.full_rounds + (1 if self.remainder else 0)

    @property
    def fills_up(self) -> bool:
        """Return whether the incomplete last round is completed from the start of the order."""
        return self.even_batches and self.world_size > 1 and self.remainder > 0

    def batches(self, rank: int) -> int:
        """Batches that *rank* gets of what is left of the epoch."""
        if not self.remainder or self.fills_up:
            return self.rounds
        return self.full_rounds + (1 if self.remainder > rank * self.rows else 0)

    def last_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Ranges ``[start, stop)`` of the order that make up *rank*'s batch of the incomplete last round.

        More than one range when the start of the order fills the batch up; none when the rank gets nothing.
        """
        if not self.remainder:
            return []
        begin = self.start + self.full_rounds * self.global_batch + rank * self.rows
        end = begin + self.rows
        ranges = [(begin, min(end, self.length))] if begin < self.length else []
        if self.fills_up:
            at = max(begin, self.length)
            while at < end:
                start = (at - self.length) % self.length
                stop = min(self.length, start + end - at)
                ranges.append((start, stop))
                at += stop - start
        return ranges

    def offset(self, rounds: int) -> int:
        """Samples of the order that are consumed after *rounds* rounds; `length` when the epoch is complete."""
        return self.length if rounds >= self.rounds else self.start + rounds * self.global_batch

    def rest(self, offset: int) -> IndexPlan:
        """Return the plan of what is left of the order after *offset* samples, however those were cut."""
        return replace(self, start=min(offset, self.length))
