"""The loader whose batches are read on rank 0 alone and handed out: for data that cannot be read everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from orc.runtime.collectives.batch import cut, fit, join, repeat, rows_of
from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.data.loader import DataLoaderShard
from orc.runtime.data.position import Pass, Position
from orc.runtime.data.wire import CONTENT, END, ERROR, LAST, Message, Receiver, Sender

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

RankBatches = tuple[list[Any], int]
SliceFunction = Callable[..., Any]


class DispatchError(OrcRuntimeError):
    """Rank 0 could not read the next batch, or a batch cannot be cut into parts."""


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that rank 0 iterates for all: each rank gets its part of every global batch in one message.

    A round is one batch per rank, or with ``split_batches`` one batch cut into equal parts. What does not fill the
    last round is dealt out evenly; rows from the start of the data make it divisible (`remainder` tells how many rows
    are real), unless ``drop_last``. Batches of different shapes are not joined for that: ranks get whole ones.
    A process by itself reads as any other loader does.

    Args:
        split_batches: cut each batch of the given loader instead of handing out whole ones.
        skip_batches: rounds to leave out at the start of each pass.
        slice_fn: cuts a batch, called as ``slice_fn(batch, slice, process_index=..., num_processes=...)``.
        drops_last: leave out a last round that is not full.
        dataset, use_stateful_dataloader, non_blocking, prefetch_to_device, device, rng_types, synchronized_generator,
            context, kwargs: of `DataLoaderShard`.

    Raises:
        ValueError: *split_batches*, and a batch size that the number of ranks does not divide.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        non_blocking: bool = False,
        slice_fn: SliceFunction | None = None,
        *,
        prefetch_to_device: bool = True,
        device: torch.device | str | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        context: RunContext | None = None,
        drops_last: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            device,
            rng_types,
            synchronized_generator,
            skip_batches,
            use_stateful_dataloader,
            non_blocking,
            context=context,
            world_size=1,
            prefetch_to_device=prefetch_to_device,
            **kwargs,
        )
        self.split_batches = split_batches
        self.slice_fn = slice_fn
        self.drops_last = drops_last or self.drop_last
        self.ranks = self.context.topology.pin_data_share()[1]  # shares of a round; peers get the same one
        self.per_round = 1 if split_batches else self.ranks  # batches of the given loader in one round
        self.read_batch_size = self.total_batch_size
        self.total_batch_size = self.read_batch_size * self.per_round
        if split_batches and self.read_batch_size % self.ranks:
            raise ValueError(
                f"split_batches cuts each batch into {self.ranks} equal parts: batch_size {self.read_batch_size} is "
                f"not a multiple of {self.ranks}"
            )
        self._senders: list[Sender] = []
        self._receiver: Receiver | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_senders": [], "_receiver": None}

    def __len__(self) -> int:
        batches = DataLoader.__len__(self)
        rounds = batches // self.per_round if self.drops_last else -(-batches // self.per_round)
        return max(0, rounds - self.skip_batches)

    def state_dict(self) -> Position:
        """Counted in rounds, and in samples of whole rounds."""
        state = super().state_dict()
        live = self.cursor.live
        if live is not None and self.context.distributed:
            state["offset"], state["global_batch"] = live.samples(self.total_batch_size), self.total_batch_size
            if "batches" in state:
                state["batches"] = live.cut.batches + live.rounds * self.per_round
        return state

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._dispatched() if self.context.distributed else super().__iter__()

    def _dispatched(self) -> Iterator[Any]:
        current = self._open()
        self.gradient.begin(self)
        exhausted = False
        begin, place = self._ways()
        rounds = self._read(current) if self.context.rank == 0 else self._listen(current)
        if self.meter is not None:
            rounds = self.meter.timed(self, rounds)
        if current.restored:
            rounds = self._watched(rounds, current)
        try:
            for message in rounds:
                current.done += 1
                self.end_of_dataloader, self.remainder = message.kind == LAST, message.remainder
                current.finished = self.end_of_dataloader
                self.gradient.current = self
                content = message.content if begin is None else begin(message.content)
                yield content if place is None else place(content)
                self.context.compute.mark()
                for tell in self.events.on_batch:
                    tell(self)
            exhausted = True
        finally:
            if not exhausted:
                self.context.compute.mark()
            for sender in self._senders:
                sender.wait()
            self._close(current, exhausted)

    def _listen(self, current: Pass) -> Iterator[Message]:
        if not current.restored:
            torch.empty((), dtype=torch.int64).random_()  # the seed of workers that rank 0 draws: generators stay equal
        if self._receiver is None:
            self._receiver = Receiver(self.context.control_group("a dispatching loader"), self.context.key)
        kind = CONTENT
        while kind == CONTENT:
            message = self._receiver.receive()
            kind = message.kind
            if kind == ERROR:
                raise DispatchError(f"rank 0 could not read the next batch: {message.content}")
            if kind != END:
                yield message

    def _read(self, current: Pass) -> Iterator[Message]:
        if not self._senders:
            group = self.context.control_group("a dispatching loader")
            self._senders = [Sender(rank, group, self.context.key) for rank in range(1, self.context.world_size)]
        try:
            rounds = self._parts(self._first_batch(current))
            following = next(rounds, None)
        except Exception as error:
            self._fail(error)
            raise
        if following is None:
            self._hand_out(END, [None] * self.ranks, -1)
        while following is not None:
            parts, remainder = following
            try:
                key = self._reader_key(current.done + 1)  # where the stream is before it reads on
                following = next(rounds, None)
            except Exception as error:
                self._fail(error)
                raise
            kind = CONTENT if following is not None else LAST
            self._hand_out(kind, parts, remainder)
            if key is not None:
                current.key = key
            yield Message(kind, parts[0], remainder)

    def _first_batch(self, current: Pass) -> Iterator[Any]:
        key = current.key
        if key is not None and "rounds" in key:
            key = {**key, "rounds": key["rounds"] * self.per_round}
        cut = replace(current.cut, rounds=current.cut.rounds * self.per_round)
        inner = Pass(current.epoch, current.done * self.per_round, key, current.restored, cut=cut)
        stateful = self._stateful() is not None
        for batch in self._source(inner):
            if not stateful:
                current.key = inner.key
            yield batch

    def _hand_out(self, kind: int, parts: list[Any], remainder: int) -> None:
        try:
            shares = self.context.topology.data_ranks
            for sender in self._senders:
                sender.send(Message(kind, parts[shares[sender.rank]], remainder))
        except Exception as error:  # something that cannot be pickled
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        for sender in self._senders:
            sender.send(Message(ERROR, f"{type(error).__name__}: {error}"))

    def _parts(self, batches: Iterator[Any]) -> Iterator[RankBatches]:
        """Rounds as one part per rank, and the rows that are no repetitions (-1: all)."""
        first: Any = None
        size: int | None = None
        while True:
            group = []
            for batch in batches:
                group.append(batch)
                if len(group) == self.per_round:
                    break
            if not group:
                return
            if self.ranks == 1:
                yield group, -1
                continue
            rows = [rows_of(batch) for batch in group]
            if first is None:
                first, size = group[0], rows[0]
            whole = len(group) == self.per_round and all(count == size for count in rows)
            if whole and not self.split_batches and self.slice_fn is None:
                yield group, -1
            elif len(group) < self.per_round and self.drops_last:
                return
            elif self.slice_fn is None and not fit(group):
                yield self._whole(group, rows, size)
            else:
                yield self._cut(group, rows, first)

    def _whole(self, group: list[Any], rows: list[int | None], size: int | None) -> RankBatches:
        """Batches that cannot be joined (padded to different lengths): one each, ranks without one repeat the last."""
        parts = [*group, *[group[-1]] * (self.ranks - len(group))]
        counts = [count or 0 for count in rows]
        if size and all(count == size for count in counts[:-1]) and counts[-1] <= size:
            parts[len(group) - 1 :] = [repeat(part, counts[-1], size) for part in parts[len(group) - 1 :]]
        have = sum(counts)
        repeated = len(group) < self.ranks or counts[-1] != (rows_of(parts[-1]) or 0)
        return parts, have if repeated else -1

    def _cut(self, group: list[Any], rows: list[int | None], first: Any) -> RankBatches:
        if any(count is None for count in rows):
            raise DispatchError(
                "a batch without tensors or lists cannot be cut into parts for the ranks: let the dataset's length be "
                "a multiple of the global batch, pass drop_last=True, or slice_fn_for_dispatch"
            )
        have = sum(count for count in rows if count is not None)
        per_rank = -(-have // self.ranks)
        missing = per_rank * self.ranks - have
        source = first if fit([group[0], first]) else group[0]
        while missing > 0:
            filler = cut(source, slice(0, missing))
            group = [*group, filler]
            missing -= rows_of(filler) or missing
        batch = join(group)
        slice_fn = self.slice_fn or cut
        parts = [
            slice_fn(batch, slice(r * per_rank, (r + 1) * per_rank), process_index=r, num_processes=self.ranks)
            for r in range(self.ranks)
        ]
        return parts, have if per_rank * self.ranks != have else -1
