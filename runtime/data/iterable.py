"""Streams of samples: one rank's share, the mark on the end that repeats samples, and starting later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from orc.runtime.data.plan import PositionError
from orc.runtime.data.workers import Opened, open_stream

Round = tuple[list[Any], int | None]
START, OWN, SKIP = 0, 1, 2  # places in a `seek_tensor`


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, out of an iterable dataset that all ranks iterate alike.

    The stream is taken in rounds of ``batch_size * num_processes`` samples (``batch_size`` with ``split_batches``), of
    which each rank keeps its part. A last round that is not full is dropped with ``drop_last``, and otherwise filled up
    from the first round. Workers of a loader take turns by rounds, so that every sample is read by one of them;
    a dataset that shares its samples out to the workers itself is taken as it is (`open_stream`).

    *num_processes* is the number of ranks, *process_index* this one.

    Raises:
        ValueError: *split_batches*, and a batch size that the number of ranks does not divide.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"split_batches cuts each batch into {num_processes} equal parts: batch_size {batch_size} is not a "
                f"multiple of {num_processes}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    @property
    def rows(self) -> int:
        """Samples of this rank in one round."""
        return max(1, self.batch_size // self.num_processes) if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Pass *epoch* on to the dataset if it takes it."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        stride = self.rows * self.num_processes
        rounds, rest = divmod(len(self.dataset), stride)
        return (rounds + (1 if rest and not self.drop_last else 0)) * self.rows

    def __iter__(self) -> Iterator[Any]:
        for samples, _ in self.dealt(0, open_stream(self.dataset)):
            yield from samples

    def dealt(self, start: int, opened: Opened, skip: int = 0) -> Iterator[Round]:
        """Return the rounds of this worker out of those from round *start* on.

        Args:
            opened: the opened dataset and what this worker reads of it.
            skip: samples to leave out before the first round.
        """
        return islice(self.rounds(start, opened.samples, skip), opened.worker, None, opened.workers)

    def rounds(self, start: int, stream: Iterator[Any] | None = None, skip: int = 0) -> Iterator[Round]:
        """Yield this rank's samples round by round from round *start* on, with the number of samples of the whole round
        that are no repetitions where it was filled up. Rounds begin after the first *skip* samples.

        Args:
            stream: the samples, if they are open already.
        """
        stride = self.rows * self.num_processes
        mine = slice(self.process_index * self.rows, (self.process_index + 1) * self.rows)
        stream = islice(iter(self.dataset) if stream is None else stream, skip, None)
        first = list(islice(stream, stride)) if start else None
        if start > 1:
            next(islice(stream, (start - 1) * stride, (start - 1) * stride), None)
        while samples := list(islice(stream, stride)):
            if first is None:
                first = samples
            valid = len(samples)
            if valid == stride:
                yield samples[mine], None
                continue
            if self.drop_last:
                return
            while len(samples) < stride:
                samples = samples + first[: stride - len(samples)]
            yield samples[mine], valid


@dataclass(slots=True)
class Marked:
    """A sample, or a batch, of a last round that was filled up; ``valid`` counts the round's own samples."""

    content: Any
    valid: int


class Stream(IterableDataset[Any]):
    """The dataset that a prepared loader reads: a rank's share, from any round on, with the filled-up end marked.

    On one process it is the dataset itself, unfilled. Attributes that it lacks are the dataset's.
    """

    def __init__(self, shard: IterableDatasetShard) -> None:
        self.shard = shard
        self.start = 0  # rounds to leave out of the next iteration in this process
        self.skip = 0  # samples to leave out before its rounds begin
        self.seek_of_workers: torch.Tensor | None = None  # the same, for workers that are being started

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.shard.dataset

    @property
    def __orc_wrapped__(self) -> Any:
        return self.shard.dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "shard" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.shard.dataset, name)

    def __len__(self) -> int:
        return len(self.shard.dataset) if self.shard.num_processes == 1 else len(self.shard)

    def __iter__(self) -> Iterator[Any]:
        opened = open_stream(self.shard.dataset)
        start, skip = self._begin(opened)
        if self.shard.num_processes == 1:
            rows, worker, workers = self.shard.rows, opened.worker, opened.workers
            stream = islice(opened.samples, skip + start * rows, None)
            if workers == 1:
                yield from stream
            while workers > 1 and (samples := list(islice(stream, rows * workers))):
                yield from samples[worker * rows : (worker + 1) * rows]
            return
        for samples, valid in self.shard.dealt(start, opened, skip):
            if valid is None:
                yield from samples
            else:
                yield from (Marked(sample, valid) for sample in samples)

    def _begin(self, opened: Opened) -> tuple[int, int]:
        """The round to begin with, and the samples before the first round. A worker of a dataset that shares itself out
        says that it cannot seek.
        """
        if get_worker_info() is None:
            return self.start, self.skip
        if self.seek_of_workers is None:
            return 0, 0
        self.seek_of_workers[OWN] = int(opened.own)
        return (0, 0) if opened.own else (int(self.seek_of_workers[START]), int(self.seek_of_workers[SKIP]))


def seek_tensor(start: int, skip: int = 0) -> torch.Tensor:
    """Return the tensor in which a loader and its workers share the start of a pass.

    Its elements: the round that the pass begins with, whether the workers' streams began with their first instead, and
    the samples before the first round.

    It is memory of all of them, because workers that stay hear of nothing but that a new pass begins.
    """
    shared = torch.tensor([start, 0, skip])
    shared.share_memory_()
    return shared


def begin_at(source: Iterator[Any], start: int, seek: torch.Tensor) -> Iterator[Any]:
    """The batches of *source* from batch *start* on, whether its workers left out the ones before or could not.

    Raises:
        PositionError: the workers could not, and the batches before were of another size.
    """
    for batch in source:
        if not seek[OWN]:
            yield batch
        elif seek[SKIP]:
            raise PositionError(
                "saved in the middle of an epoch with another number of samples per step, of a stream that shares "
                "itself out to the worker processes of its loader: nobody knows how many samples each of them has "
                "had. Continue with the former batch size and number of processes, or without worker processes, or "
                "resume from a checkpoint taken at the end of an epoch"
            )
        else:
            next(islice(source, start - 1, start - 1), None)
        break
    yield from source


@dataclass
class MarkedCollate:
    """A collate function that carries the mark from samples to their batch; also through worker processes."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        """Collate *samples*; a marked last sample marks the batch."""
        if isinstance(samples, Marked):
            return Marked(self.collate(samples.content), samples.valid)
        if isinstance(samples, list) and samples and isinstance(samples[-1], Marked):
            return Marked(self.collate([sample.content for sample in samples]), samples[-1].valid)
        return self.collate(samples)
