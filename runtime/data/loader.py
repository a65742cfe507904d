"""The prepared loader of which every rank reads its own share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime.collectives.batch import rows_of
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.core.events import Events
from orc.runtime.data.adapter import DataLoaderAdapter
from orc.runtime.data.index_batches import CustomBatches, PassSampler
from orc.runtime.data.iterable import SKIP, START, Marked, Stream, begin_at, seek_tensor
from orc.runtime.data.lane import Arriving, one_ahead
from orc.runtime.data.position import Cursor, Key, Pass
from orc.runtime.data.samplers import BatchSamplerShard

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank


class DataLoaderShard(DataLoaderAdapter, DataLoader[Any]):
    """A `DataLoader` whose batches are this rank's share, on the right device.

    Args:
        dataset: of torch's kind, map-style or iterable.
        device: where batches are put; `None` leaves them.
        rng_types: generators to align over the ranks at the start of each pass (``torch``, ``cuda``, ``generator``).
        synchronized_generator: what ``generator`` in *rng_types* means.
        skip_batches: batches to leave out at the start of each pass.
        use_stateful_dataloader: be a torchdata `StatefulDataLoader` as well, see `orc.runtime.data.backed`.
        non_blocking: copy batches to the device without waiting for the copy; those in pinned memory always are.
        prefetch_to_device: copy them to a CUDA device on a stream of its own, and where worker processes or a stream
            read ahead anyway the next one already while the loop has the one before.
        context: the run; the current one unless given.
        world_size: the number of ranks that share the data; all of the run unless given.
        total_batch_size: samples of a round over all ranks; derived from the batch size unless given.
        kwargs: of `torch.utils.data.DataLoader`.
    """

    def __new__(cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> Self:
        """An instance of the subclass that torchdata backs, where that is requested."""
        if use_stateful_dataloader:
            from orc.runtime.data.backed import Backed, backed

            if not issubclass(cls, Backed):
                return cast("Self", super().__new__(backed(cast(Any, cls))))
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        non_blocking: bool = False,
        *,
        context: RunContext | None = None,
        world_size: int | None = None,
        total_batch_size: int | None = None,
        prefetch_to_device: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        given = None if is_stream(self) else self.batch_sampler
        if isinstance(given, Iterable) and not isinstance(given, PassSampler):
            shard = BatchSamplerShard(given, even_batches=False)
            # torch forbids replacing it through the attribute
            self.__dict__["batch_sampler"] = CustomBatches(shard, lambda tensor: tensor, 1)
        self.context = context = context or current_context()
        self.gradient = context.gradient
        self.device = None if device is None else torch.device(device)
        self.non_blocking = non_blocking
        self.prefetch_to_device = prefetch_to_device
        self.rng_types = tuple(str(kind) for kind in rng_types or ())
        self.synchronized_generator = synchronized_generator
        self.skip_batches, self.skips = skip_batches, skip_batches > 0
        self.world_size = context.topology.pin_data_share()[1] if world_size is None else world_size
        self.cursor = Cursor()
        self.events = Events()
        rows = self.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        self.total_batch_size = total_batch_size or rows * self.world_size
        self.__dict__["batch_size"] = rows if self.batch_sampler is not None else None
        sampler = self.batch_sampler if self.batch_sampler is not None else self.sampler
        self._pass_sampler = sampler if isinstance(sampler, PassSampler) else None
        if isinstance(sampler, CustomBatches) and sampler is self.batch_sampler:
            self.__dict__["batch_sampler"] = sampler.given  # scripts look for their own object there

    @property
    def _index_sampler(self) -> Any:  # what torch iterates
        return super()._index_sampler if self._pass_sampler is None else self._pass_sampler

    def _stateful(self) -> Any:
        """The dataset, if it is a stream that can save its position and go on from there in this process."""
        if not isinstance(self.dataset, Stream) or self.num_workers or self.own_share:
            return None
        inner = self.dataset.dataset
        return inner if hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict") else None

    def _reader_key(self, done: int) -> Key | None:
        """The state of what reads the stream, after *done* batches; `None` where it has none."""
        stateful = self._stateful()
        if stateful is None:
            return None
        state = copy.deepcopy(stateful.state_dict())  # before it reads on
        return {"kind": getattr(stateful, "kind", "stateful"), "rounds": done, "state": state}

    def _go_on(self, current: Pass) -> bool:
        """Let what reads the stream go on from the state in the key of *current*; `False` where that is impossible."""
        stateful, key = self._stateful(), current.key
        if not current.restored or stateful is None or key is None or key.get("rounds") != current.done:
            return False
        kind = getattr(stateful, "kind", "stateful")
        if key["kind"] != kind or not getattr(stateful, "takes", _always)(key["state"]):
            return False
        stateful.load_state_dict(copy.deepcopy(key["state"]))
        return True

    def _source(self, current: Pass) -> Iterator[Any]:
        """torch's iterator over the batches of *current*."""
        sampler, late, seek = self._passes(), 0, None
        if sampler is not None:
            sampler.begin(current)
        elif isinstance(self.dataset, Stream) and self._go_on(current):
            self.dataset.start = self.dataset.skip = 0
        elif isinstance(self.dataset, Stream) and self.num_workers == 0:
            self.dataset.start, self.dataset.skip = current.rounds, current.cut.samples
        elif isinstance(self.dataset, Stream):
            seek = self._seek_workers(current)
        else:
            late = current.done
        generators = [torch.default_generator] + ([self.generator] if self.generator is not None else [])
        states = [generator.get_state() for generator in generators] if current.restored else []
        source = super().__iter__()
        # Making the iterator draws a seed for workers. The pass that is continued has drawn it already.
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        for _ in range(late):
            next(source, None)
        if seek is None:
            return source
        self.dataset.seek_of_workers = None  # the workers have it
        return begin_at(source, current.done, seek) if current.done else source

    def _seek_workers(self, current: Pass) -> torch.Tensor | None:
        """Let the workers leave out what *current* leaves out, so that nothing of it is collated or sent."""
        start, skip = current.rounds, current.cut.samples
        if self._iterator is not None and self.seek is not None:  # workers that stayed
            self.seek[START], self.seek[SKIP] = start, skip
        else:  # each set of workers has its own: passes of a loader and its views may overlap
            self.seek = seek_tensor(start, skip) if start or skip or self.persistent_workers else None
            self.dataset.seek_of_workers = self.seek
        return self.seek

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        current = self._open()
        gradient, events = self.gradient, self.events
        begin, place = self._ways()
        mark = self.context.compute.mark
        gradient.begin(self)
        exhausted = False
        try:
            sampler = self._passes()
            total = sampler.batches(current) if sampler is not None else None
            source = self._source(current)
            if total is None:
                source = self._ahead(source, current, begin)
            elif begin is not None:
                # Where this process reads by itself, reading ahead would only move the work before the step.
                source = one_ahead(source, begin) if self.num_workers else map(begin, source)
            if self.meter is not None:
                source = self.meter.timed(self, source)
            if current.restored:
                source = self._watched(source, current)
            for batch in source:
                if total is not None:
                    current.done += 1
                    if current.done == total and sampler is not None:
                        self.end_of_dataloader, self.remainder = True, self._rows(sampler.tail(current), batch)
                        current.finished = True
                gradient.current = self
                yield batch if place is None else place(batch)
                mark()
                if events.on_batch:
                    for tell in events.on_batch:
                        tell(self)
            exhausted = True
        finally:
            if not exhausted:
                mark()
            self._close(current, exhausted)

    def _ahead(self, source: Iterator[Any], current: Pass, begin: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """Yield the batches of a pass of unknown length: the next one is read ahead to recognize the last.

        *begin* is called with each when it was read, and what it returns is yielded.
        """
        nothing = object()

        def read() -> tuple[Any, int, Any]:
            batch, valid = next(source, nothing), -1
            if isinstance(batch, Marked):
                batch, valid = batch.content, batch.valid
            return batch, valid, batch if begin is None or batch is nothing else begin(batch)

        batch, valid, given = read()
        while batch is not nothing:
            key = self._reader_key(current.done + 1)
            following = read()
            # Of streams that share themselves out to workers, the end of any worker's part may be filled up.
            self.remainder = self._rows(valid, batch)
            if following[0] is nothing:
                self.end_of_dataloader = current.finished = True
                sampler = self._passes()
                if sampler is not None:
                    self.remainder = self._rows(sampler.tail(current), batch)
            current.done += 1
            if key is not None:
                current.key = key
            yield given
            batch, valid, given = following

    def _rows(self, valid: int, batch: Any) -> int:
        """*valid* samples of the last round as rows: without ``batch_size`` what is counted are whole batches."""
        if valid < 0 or self.batch_size is not None:
            return valid
        return valid * (rows_of(batch.content if isinstance(batch, Arriving) else batch) or 1)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def _always(state: Any) -> bool:
    return True


def shares_itself(dataset: Any) -> bool:
    """Return whether *dataset* yields the samples of one rank only.

    It says so with a true ``__orc_sharded__``, or is what `datasets.distributed.split_dataset_by_node` has made of a
    stream.
    """
    split = getattr(dataset, "_distributed", None)
    return bool(getattr(dataset, "__orc_sharded__", False)) or getattr(split, "world_size", 1) > 1


def is_stream(loader: DataLoader[Any]) -> bool:
    """Return whether *loader* reads an iterable dataset."""
    return isinstance(loader.dataset, IterableDataset)
