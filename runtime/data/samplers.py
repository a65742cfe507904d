"""Samplers: what the seeds of a shuffle are, and how batches of any batch sampler are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends on nothing but its seed and the epoch.

    Epoch ``e`` is ``torch.randperm`` under the seed ``initial_seed + e``. A finished pass moves to the next epoch;
    `set_epoch` goes to any.

    data_seed:
        The seed; by default the current seed of torch, also with a *generator*, which is seeded anew for each pass.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        if self.generator is None:
            self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to *epoch*; the next pass has its order."""
        self.epoch = epoch


def fixed_batch_size(batch_sampler: Any) -> int | None:
    """Return the samples in each batch but perhaps the last, which may have fewer; `None` where they vary."""
    if not isinstance(batch_sampler, (list, tuple)):
        return getattr(batch_sampler, "batch_size", None)
    sizes = [len(batch) for batch in batch_sampler]
    same = len(set(sizes[:-1])) <= 1
    return sizes[0] if sizes and same and 0 < sizes[-1] <= sizes[0] else None


class BatchSamplerShard(Sampler[list[Any]]):
    """The batches of one rank, out of a batch sampler that all ranks iterate alike.

    With ``split_batches=False`` rank ``r`` of ``n`` gets whole batches ``r``, ``r + n``, ``r + 2n``, ...; with ``True``
    it gets the ``r``-th of ``n`` equal pieces of every batch. With ``even_batches=True`` and unless the batch sampler
    drops its last batch, the end is filled up from the first samples, so that all ranks get equally many batches of
    one size. Batches before the end are dealt out as they are, and those of a batch sampler without ``batch_size``
    also at the end, where ranks without one get the first ones again. To be cut, batches that vary need
    ``even_batches=False``. The size of batches in a list or tuple is seen.

    Args:
        batch_sampler: yields lists of indices.
        num_processes: ``n``, the number of ranks.
        process_index: ``r``, this rank.
        split_batches: whether each batch is cut, or whole ones are dealt out.
        even_batches: whether the end is filled up.

    Raises:
        ValueError: batches that cannot be split evenly.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = fixed_batch_size(batch_sampler)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        # Samples of the last round that are no repetitions; known when the last batch has been yielded.
        self.tail: int | None = None
        if split_batches and self.batch_size is None and even_batches:
            raise ValueError(
                f"split_batches cuts each batch into {num_processes} equal parts, and {type(batch_sampler).__name__} "
                "has no batch_size, so its batches may vary: pass even_batches=False for parts that vary as well"
            )
        if split_batches and self.batch_size is not None and self.batch_size % num_processes:
            raise ValueError(
                f"split_batches cuts each batch into {num_processes} equal parts: batch_size {self.batch_size} is not "
                f"a multiple of {num_processes}"
            )

    @property
    def sampler(self) -> Any:
        """The sampler under the batch sampler, when it has one."""
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def total_length(self) -> int | None:
        """Number of batches of the batch sampler, `None` where it has no length."""
        try:
            return len(self.batch_sampler)
        except TypeError:  # no __len__, or one that needs the length of a sampler without
            return None

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.num_processes == 1:
            return total
        if self.split_batches:
            return total - (1 if self._misses_last_piece() else 0)
        rounds, rest = divmod(total, self.num_processes)
        if rest == 0 or self.drop_last:
            return rounds
        return rounds + (1 if self.even_batches or self.process_index < rest else 0)

    def _misses_last_piece(self) -> bool:
        """Return whether the last batch is too short for a piece for this rank.

        `False` for a batch sampler of the user's own, whose last batch cannot be foreseen.
        """
        if self.even_batches or self.drop_last or type(self.batch_sampler) is not BatchSampler:
            return False
        rows = self.batch_sampler.batch_size // self.num_processes
        rest = len(cast(Sized, self.batch_sampler.sampler)) % self.batch_sampler.batch_size
        return 0 < rest <= self.process_index * rows

    def __iter__(self) -> Iterator[list[Any]]:
        return self.batches_from(0)

    def batches_from(self, start: int, batches: Iterable[Any] | None = None) -> Iterator[list[Any]]:
        """Yield this rank's batches without its first *start*, of *batches* or the batch sampler; nothing is built
        for those.
        """
        self.tail = None
        whole = self.batch_sampler if batches is None else batches
        return self._pieces(start, whole) if self.split_batches else self._whole(start, whole)

    def _pieces(self, start: int, batches: Iterable[Any]) -> Iterator[list[Any]]:
        first: list[Any] = []
        for number, (batch, ends) in enumerate(self._with_end(batches)):
            size = -(-len(batch) // self.num_processes) * self.num_processes
            if ends and self.batch_size:
                size = self.batch_size
            elif self.even_batches and len(batch) != self.batch_size:
                raise ValueError(
                    f"split_batches cuts batches of {self.batch_size} into {self.num_processes} equal parts, and "
                    f"{type(self.batch_sampler).__name__} yields one of {len(batch)} that is not a short last one: "
                    "pass even_batches=False for parts that vary as well"
                )
            rows = size // self.num_processes
            first = first or batch
            begin = self.process_index * rows
            if ends and self.drop_last:
                return
            if ends and self.even_batches:
                self.tail = len(batch)
                batch = _fill(batch, first, size)
            piece = batch[begin : begin + rows]
            if piece and number >= start:
                yield piece

    def _whole(self, start: int, batches: Iterable[Any]) -> Iterator[list[Any]]:
        n, size = self.num_processes, self.batch_size
        first: list[list[Any]] = []  # the first round, to fill up the last one
        whole = size is None  # the end is filled up by batches, not by samples
        number = 0
        dealt = self._with_end(batches)
        while round_of := list(islice(dealt, n)):
            group = [batch for batch, _ in round_of]
            first = first or group
            whole = whole or any(len(batch) > cast(int, size) for batch in group)
            if len(group) < n or round_of[-1][1]:
                if self.drop_last:
                    return
                if self.even_batches:
                    rest = [sample for batch in group for sample in batch]
                    self.tail = len(rest)
                    if whole:
                        group = _fill(group, first, n)
                    else:
                        assert size is not None
                        rest = _fill(rest, [sample for batch in first for sample in batch], n * size)
                        group = [rest[i * size : (i + 1) * size] for i in range(n)]
            if number >= start and self.process_index < len(group):
                yield group[self.process_index]
            number += 1

    def _with_end(self, batches: Iterable[Any]) -> Iterator[tuple[list[Any], bool]]:
        """Yield each batch, and whether it is a last one that is short. The batch behind one is drawn
        to see it."""
        size, odd = self.batch_size, None
        for whole in batches:
            if odd is not None:
                yield odd, False
            batch = list(whole)
            odd = None if size is None or len(batch) == size else batch
            if odd is None:
                yield batch, False
        if odd is not None:
            yield odd, len(odd) < cast(int, size)

    def set_epoch(self, epoch: int) -> None:
        """Pass *epoch* on to whatever below takes it."""
        for inner in (self.batch_sampler, self.sampler):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)


def _fill(batch: list[Any], source: list[Any], size: int) -> list[Any]:
    filled = list(batch)
    while len(filled) < size:
        filled += source[: size - len(filled)]
    return filled
