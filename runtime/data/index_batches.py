"""Batch samplers of prepared loaders: each serves one pass and can start anywhere in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from orc.runtime.data.order import Order, check_key
from orc.runtime.data.plan import IndexPlan, PositionError
from orc.runtime.data.position import Cut, Pass, Position, Share, cut_at
from orc.runtime.data.samplers import BatchSamplerShard


def generator_holder(*samplers: Any) -> Any:
    """Return the first of *samplers* that has a place for a generator of torch, empty or not; `None` without one."""
    kinds = (torch.Generator, type(None))
    return next((sampler for sampler in samplers if isinstance(getattr(sampler, "generator", 0), kinds)), None)


class PassSampler(Sampler[Any]):
    """Base: `begin` hands over the next pass, the following ``iter()`` serves it.

    Batches are drawn when the first is asked for, not before, so that random numbers are consumed in the order in
    which an unprepared loader consumes them.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool
    given_generator = False  # the sampler came without one, and draws from what `prepare_data_loader` gave it
    lent: torch.Generator | None = None  # what a sampler without a generator draws from while a pass is made again

    def __init__(self, share: Share) -> None:
        self.share = share
        self._upcoming: Pass | None = None

    @property
    def holder(self) -> Any:
        """The sampler that has a place for a generator; `None` where none has."""
        return generator_holder(self.sampler)

    def begin(self, current: Pass) -> None:
        """The next ``iter()`` is for *current*."""
        self._upcoming = current

    def __iter__(self) -> Iterator[Any]:
        # torch makes two iterators per pass with workers and uses the second, so the pass is taken at the first batch.
        return self._serve_upcoming(self._upcoming)

    def _serve_upcoming(self, current: Pass | None) -> Iterator[Any]:
        self._upcoming = None
        yield from self.serve(current or Pass())

    def serve(self, current: Pass) -> Iterator[Any]:
        """Batches of *current* from ``current.done`` on; sets ``current.key`` when it has none."""
        raise NotImplementedError

    def batches(self, current: Pass) -> int | None:
        """This rank's batches in the epoch of *current*, those before its cut included; `None` when unknown."""
        raise NotImplementedError

    def tail(self, current: Pass) -> int:
        """Samples of the last round, over all ranks, that are no repetitions; -1 when there are none."""
        raise NotImplementedError

    def note(self, state: Position, current: Pass) -> None:
        """Write into *state* where *current* is, and how its samples are cut into rounds."""
        raise NotImplementedError

    def restore(self, position: Position, global_batch: int) -> Cut:
        """The cut for continuing *position* in rounds of *global_batch* samples. Raises `PositionError`."""
        raise NotImplementedError

    def keep_drawing(self, state: torch.Tensor | None) -> None:
        """Let a sampler that came without a generator draw its next orders as those of a saved position were drawn.

        That is from a generator in *state*, or with `None` from torch's own.
        """
        holder = self.holder
        if holder is not None:
            holder.generator = None if state is None else torch.Generator()
            self.given_generator = state is not None
            if state is not None:
                holder.generator.set_state(state)

    def set_epoch(self, epoch: int) -> None:
        """Pass *epoch* on to the sampler if it takes it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


class PlanBatches(PassSampler):
    """Batches of a map-style dataset with a known order: slices of one permutation.

    single:
        Yield bare indices, for a loader without batching (``batch_size=None``).
    """

    def __init__(
        self, plan: IndexPlan, order: Order, rank: int, share: Share, *, sampler: Any = None, single: bool = False
    ) -> None:
        super().__init__(share)
        self.plan = plan
        self.order = order
        self.rank = rank
        self.sampler = sampler
        self.single = single
        self.batch_size = None if single else plan.rows
        self.drop_last = plan.drop_last

    def __len__(self) -> int:
        return self.plan.batches(self.rank)

    def serve(self, current: Pass) -> Iterator[Any]:
        """Slices of the order; one range object each where it is sequential."""
        if current.key is None:
            current.key = self.order.draw(current.epoch, self.share)
        indices = self.order.indices(current.key)
        plan, single = self.plan.rest(current.cut.samples), self.single
        rows, stride = plan.rows, plan.global_batch
        first = plan.start + current.rounds * stride + self.rank * rows
        stop = plan.start + plan.full_rounds * stride
        ends = stop - stride if current.rounds < plan.full_rounds and not plan.last_ranges(self.rank) else stop
        for begin in range(first, stop, stride):
            if begin >= ends:
                self.order.finish()
            chunk = list(range(begin, begin + rows)) if indices is None else indices[begin : begin + rows].tolist()
            yield chunk[0] if single else chunk
        if current.rounds <= plan.full_rounds:
            self.order.finish()
            last: list[int] = []
            for begin, end in plan.last_ranges(self.rank):
                last += range(begin, end) if indices is None else indices[begin:end].tolist()
            if last:
                yield last[0] if single else last

    def batches(self, current: Pass) -> int:
        """Return the batches in the plan of what was left at the cut."""
        return current.cut.rounds + self.plan.rest(current.cut.samples).batches(self.rank)

    def tail(self, current: Pass) -> int:
        """The remainder of the plan where it is filled up."""
        plan = self.plan.rest(current.cut.samples)
        return plan.remainder if plan.fills_up else -1

    def note(self, state: Position, current: Pass) -> None:
        """Exact: offsets are arithmetic."""
        plan = self.plan.rest(current.cut.samples)
        done = plan.rounds if current.rounds >= plan.batches(self.rank) else current.rounds
        state["offset"], state["global_batch"], state["length"] = plan.offset(done), plan.global_batch, plan.length

    def restore(self, position: Position, global_batch: int) -> Cut:
        """Exact at any number of processes and any batch size: what is left of the order is cut anew."""
        if position["length"] != self.plan.length:
            raise PositionError(
                f"saved in the middle of an epoch of {position['length']} samples, this loader's epoch has "
                f"{self.plan.length}: the dataset changed"
            )
        if position["key"] is not None:
            check_key(self.order, position["key"])
        return cut_at(position, global_batch)


class CustomBatches(PassSampler):
    """Batches of the user's own sampler or batch sampler, dealt out by a `BatchSamplerShard`.

    The order cannot be computed, so it is replayed: the state of the sampler's generator at the start of the pass is
    remembered, and a continued pass draws the indices again without reading their samples.
    """

    def __init__(self, shard: BatchSamplerShard, share: Share, world_size: int) -> None:
        super().__init__(share)
        self.shard = shard
        self.world_size = world_size
        self.sampler = shard.sampler if shard.sampler is not None else shard.batch_sampler
        self.batch_size = shard.batch_size
        if shard.split_batches and shard.batch_size is not None:
            self.batch_size = shard.batch_size // shard.num_processes
        self.drop_last = shard.drop_last

    @property
    def holder(self) -> Any:
        """The sampler, or else the batch sampler, that has a place for a generator."""
        return generator_holder(self.shard.sampler, self.shard.batch_sampler)

    def __len__(self) -> int:
        return len(self.shard)

    def serve(self, current: Pass) -> Iterator[Any]:
        """The shard's batches; on one process the sampler's own."""
        holder, again = self.holder, current.key is not None
        generator = None if holder is None or holder.generator is self.lent else holder.generator
        source = torch.default_generator if generator is None else generator
        if current.key is None:
            current.key = {"kind": "custom", "state": None if holder is None else self.share(source.get_state())}
        state = current.key["state"]
        if holder is None or state is None:
            yield from self._dealt(current)
        elif generator is not None:
            generator.set_state(state)
            yield from self._dealt(current)
        elif not again and torch.equal(state, source.get_state()):
            yield from self._dealt(current)
        else:  # torch's own generator stays where it is: it has drawn this order already, or is not rank 0's
            holder.generator = self.lent = torch.Generator()
            holder.generator.set_state(state)
            try:
                yield from self._dealt(current)
            finally:
                holder.generator = self.lent = None

    def _dealt(self, current: Pass) -> Iterator[Any]:
        left = self._left(current.cut)
        if self.world_size == 1:
            yield from islice(left, current.rounds, None)
        else:
            yield from self.shard.batches_from(current.rounds, left)

    @property
    def given(self) -> Any:
        """The script's own batch sampler; with several processes the `BatchSamplerShard` that holds it."""
        return self.shard if self.world_size > 1 else self.shard.batch_sampler

    @property
    def _chunks(self) -> bool:
        """Return whether the batches are no more than consecutive samples of a sampler, so that any others will do."""
        return type(self.shard.batch_sampler) is BatchSampler

    def _left(self, cut: Cut) -> Iterator[Any]:
        """The batches from *cut* on."""
        whole = self.shard.batch_sampler
        if self._chunks and cut.samples:
            return iter(BatchSampler(islice(whole.sampler, cut.samples, None), whole.batch_size, whole.drop_last))
        return islice(whole, cut.batches, None)

    def batches(self, current: Pass) -> int | None:
        """`None` where the batch sampler has no length, or where the last batch decides whether this rank has one."""
        shard = self.shard
        if current.cut.rounds:
            return None
        if shard.drop_last and not self._chunks:  # whether the last batch is a short one is seen when it comes
            return None
        if shard.total_length is None or (shard.split_batches and not (shard.even_batches or shard.drop_last)):
            return None
        return self.shard.total_length if self.world_size == 1 else len(self.shard)

    def tail(self, current: Pass) -> int:
        """Return the number of items in the last round before the shard filled it up; -1 where it filled up none."""
        return -1 if self.shard.tail is None or self.world_size == 1 else self.shard.tail

    @property
    def _per_round(self) -> int:
        """Batches of the batch sampler in one round."""
        return 1 if self.shard.split_batches else self.world_size

    @property
    def _global_batch(self) -> int:
        """Samples per round; 0 where batches vary."""
        size = self.shard.batch_size or 0
        return size if self.shard.split_batches else size * self.world_size

    def note(self, state: Position, current: Pass) -> None:
        """In batches of the batch sampler, and in samples where these have one size."""
        state["offset"], state["global_batch"] = current.samples(self._global_batch), self._global_batch
        state["batches"] = current.cut.batches + current.rounds * self._per_round
        state["batch_size"] = self.shard.batch_size

    def restore(self, position: Position, global_batch: int) -> Cut:
        """Any cut of a sampler's samples; whole batches of a batch sampler of the user's own."""
        key = position["key"]
        if key is not None and key.get("kind") != "custom":
            raise PositionError(
                f"saved from a {key.get('kind')} order of samples, this loader has a sampler of its own: give it the "
                "sampler it had when the checkpoint was written"
            )
        if self._chunks and global_batch and position["global_batch"]:
            return cut_at(position, global_batch)
        rounds, size = position["rounds"], self.shard.batch_size
        if rounds and position.get("batch_size", size) != size:
            raise PositionError(
                f"saved in the middle of an epoch with batches of {position['batch_size']}, now they have {size}, and "
                f"only {type(self.shard.batch_sampler).__name__} knows which samples make a batch: continue with the "
                "former size (the number of processes may change), or resume from a checkpoint taken at the end of an "
                "epoch"
            )
        batches = position.get("batches", rounds * self._per_round)
        return Cut() if batches == rounds * self._per_round else Cut(rounds, position["offset"], batches)

    def set_epoch(self, epoch: int) -> None:
        """To the batch sampler and the sampler under it."""
        self.shard.set_epoch(epoch)
