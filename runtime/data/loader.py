"""Prepared loaders: what is common to all (passes, positions, placement), and the one where ranks read their share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime.collectives.tree import send_to_device
from orc.runtime.core.events import Events
from orc.runtime.data.batch import rows_of
from orc.runtime.data.index_batches import CustomBatches, PassSampler
from orc.runtime.data.iterable import SKIP, START, Marked, Stream, begin_at, seek_tensor
from orc.runtime.data.plan import PositionError
from orc.runtime.data.position import Cursor, Cut, Key, Pass, Position, cut_at, offset_of
from orc.runtime.data.samplers import BatchSamplerShard
from orc.runtime.data.synchronize import align

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from orc.runtime.core.context import RunContext
    from orc.runtime.observe.meter import Meter


class DataLoaderAdapter:
    """Base of the prepared loaders.

    A loader counts what it yields, so `state_dict` tells at any moment where it is, and `load_state_dict` makes the
    next pass continue there, in the order that pass had. A pass that is left early leaves nothing behind.

    Attributes:
        end_of_dataloader: the batch just yielded is the last of its pass.
        remainder: samples in the global batch just yielded that are no repetitions; -1 when nothing was repeated.
        total_batch_size: samples per step over all ranks.
        total_dataset_length: samples of the dataset, over all ranks.
        own_share: the data is one rank's share already, made for as many as there are.
        simulated: this is a share for a rank that is not this process's; nothing is aligned with peers.
        events: are told when the loop asks for the next batch; the Accelerator puts its own here.
        steps: counts optimizer steps; the Accelerator puts its own here.
        part: makes of a batch what this rank computes of it; `None` where that is all of it.
        meter: measures how long the loop waits for batches; the Accelerator puts its own here.
    """

    dataset: Any
    end_of_dataloader: bool
    remainder: int
    events: Events
    steps: Callable[[], int] | None
    meter: Meter | None
    part: Callable[[Any], Any] | None

    def _adopt(
        self,
        *,
        context: RunContext | None,
        device: torch.device | str | None,
        non_blocking: bool,
        rng_types: Sequence[str] | None,
        synchronized_generator: torch.Generator | None,
        skip_batches: int,
        total_batch_size: int,
        world_size: int | None,
    ) -> None:
        if context is None:
            from orc.runtime.core.context import current_context

            context = current_context()
        self.context = context
        self.gradient = context.gradient
        self.device = None if device is None else torch.device(device)
        self.non_blocking = non_blocking
        self.rng_types = tuple(str(kind) for kind in rng_types or ())
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.skips = skip_batches > 0
        self.world_size = context.topology.take_share()[1] if world_size is None else world_size
        self.simulated = False
        self.own_share = False
        self.total_batch_size = total_batch_size
        self.cursor = Cursor()
        self.end_of_dataloader = False
        self.remainder = -1
        self.events = Events()
        self.steps = None
        self.meter = None
        self.part = None
        self.seek: torch.Tensor | None = None  # of the workers, see `seek_tensor`

    def __getstate__(self) -> dict[str, Any]:
        # Without what belongs to this process: workers, channels, and those who listen.
        left = ("gradient", "events", "steps", "meter", "seek", "_iterator")
        return {name: None if name in left else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient=state["context"].gradient, events=Events())
        if isinstance(self.dataset, Stream):
            self.dataset.seek_of_workers = None

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all ranks. Raises `TypeError` for a stream without a length."""
        inner = self.dataset.dataset if isinstance(self.dataset, Stream) else self.dataset
        return len(inner)

    @property
    def epoch(self) -> int:
        """The epoch of the running pass, or of the next one."""
        cursor = self.cursor
        if cursor.live is not None:
            return cursor.live.epoch
        return cursor.pending["epoch"] if cursor.pending is not None else cursor.epoch

    @property
    def samples_seen(self) -> int:
        """Samples that all ranks have taken since the start of the running pass's epoch; 0 between passes."""
        live = self.cursor.live
        return live.samples(self.total_batch_size) if live is not None else 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass number *epoch*; samplers and datasets that take an epoch are told."""
        self.cursor.set_epoch(epoch)
        self._announce(epoch)

    def _announce(self, epoch: int) -> None:
        sampler = self._passes()
        if sampler is not None:
            sampler.set_epoch(epoch)
        dataset = self.dataset.dataset if isinstance(self.dataset, Stream) else self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def _passes(self) -> PassSampler | None:
        """The batch sampler that can start anywhere, `None` for streams and for the user's own samplers."""
        raise NotImplementedError

    @property
    def rows_of_last_batch(self) -> int:
        """Samples of the last round where the data do not fill it; -1 where they do, or it is not known."""
        plan = getattr(self._passes(), "plan", None)
        return -1 if plan is None or getattr(self, "batch_size", None) is None else plan.remainder or -1

    def _generator(self) -> torch.Generator | None:
        """The generator that later epochs draw from: part of the position."""
        sampler = self._passes()
        for holder in (getattr(sampler, "sampler", None), sampler, getattr(self.dataset, "dataset", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                return generator
        return self.synchronized_generator

    def _open(self) -> Pass:
        """Begin a pass: a new one, or the rest of a restored one. `skip_batches` counts from the start of the epoch."""
        cursor = self.cursor
        pending, cursor.pending = cursor.pending, None
        steps = self.steps() if self.steps is not None else 0
        if pending is None:
            current = Pass(cursor.epoch, self.skip_batches, None, False, steps, steps)
        else:
            done, cut = self._continue(pending) if pending["live"] else (self.skip_batches, Cut())
            current = Pass(pending["epoch"], done, pending["key"], pending["live"], steps, steps, cut=cut)
        cursor.epoch, cursor.live = current.epoch, current
        self.end_of_dataloader, self.remainder = False, -1
        self._announce(current.epoch)
        if not current.restored and not self.simulated:
            align(self.rng_types, self.synchronized_generator, self.context)
        return current

    def _close(self, current: Pass, exhausted: bool) -> None:
        cursor = self.cursor
        if cursor.live is current:
            cursor.live = None
            taken = current.began_at < self.steps() if self.steps is not None else current.done > 1
            # A look at one batch is not an epoch; a training loop left early is.
            if exhausted or taken:
                cursor.epoch = current.epoch + 1
                cursor.pending = None
        self.gradient.end(self, exhausted=exhausted)

    def _continue(self, position: Position) -> tuple[int, Cut]:
        """The batches of the epoch to leave out, and the cut that they are counted with."""
        cut, rounds = self._restore(position), position["rounds"]
        if not self.skips or self.skip_batches == rounds:
            return rounds, cut
        if cut.rounds:
            raise PositionError(
                f"skip_first_batches({self.skip_batches}): the checkpoint was saved after {rounds} batches, "
                f"{offset_of(position)} samples into the epoch, with {position['global_batch']} samples per step, and "
                f"now a step has {self.total_batch_size}, so that batches cannot be counted from the start of the "
                "epoch: leave skip_first_batches out, the loader goes on with the next sample by itself"
            )
        return self.skip_batches, cut

    def _restore(self, position: Position) -> Cut:
        """The cut for continuing *position* here. Raises `PositionError`."""
        ranks, here = position.get("ranks", 1), self.world_size if self.own_share else 1
        if position["rounds"] and ranks != here:
            raise PositionError(
                f"saved in the middle of an epoch of data that shares itself out, then to {ranks} processes, now to "
                f"{here}: nobody but the dataset knows who has read what. Continue with {ranks}, or resume from a "
                "checkpoint taken at the end of an epoch"
            )
        sampler = self._passes()
        if sampler is not None:
            return sampler.restore(position, self.total_batch_size)
        cut = cut_at(position, self.total_batch_size)
        if cut.rounds and (self.own_share or not isinstance(self.dataset, Stream)):
            raise PositionError(
                f"saved in the middle of an epoch with {position['global_batch']} samples per step, now it is "
                f"{self.total_batch_size}: resume with the same samples per step, or from the end of an epoch"
            )
        return cut

    def state_dict(self) -> Position:
        """Return the position: in the middle of a pass while one runs, otherwise at the start of the next epoch."""
        cursor, sampler, generator = self.cursor, self._passes(), self._generator()
        state: Position = {
            "epoch": self.epoch,
            "live": False,
            "rounds": 0,
            "offset": 0,
            "global_batch": self.total_batch_size,
            "length": 0,
            "key": None,
            "generator": None if generator is None else generator.get_state(),
        }
        live = cursor.live
        if live is not None:
            state["live"], state["rounds"], state["key"] = True, live.done, live.key
            state["finished"] = live.finished
            state["offset"] = live.samples(self.total_batch_size)
            if sampler is not None:
                sampler.note(state, live)
            if self.own_share:
                state["ranks"] = self.world_size
        elif cursor.pending is not None:
            state = cursor.pending
        return state

    def check_position(self, state: Mapping[str, Any]) -> Cut:
        """Return the cut with which the next pass continues from *state*. Raises `PositionError` when it cannot."""
        return self._restore(cast("Position", state)) if state["live"] else Cut()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from *state* with the next pass. Raises `PositionError` when that is impossible here."""
        self.check_position(state)
        position = cast("Position", dict(state))
        generator = self._generator()
        if generator is not None and position["generator"] is not None:
            generator.set_state(position["generator"])
        self.cursor.pending = position
        self.cursor.epoch = position["epoch"]

    def skipping(self, num_batches: int) -> DataLoaderAdapter:
        """A view of this loader whose passes leave out the first *num_batches* batches that this one's have."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.skip_batches, view.skips = self.skip_batches + num_batches, True
        view.__dict__["_iterator"] = None  # persistent workers belong to the loader that started them
        return view

    def _watched(self, source: Iterator[Any], current: Pass) -> Iterator[Any]:
        """*source*, the rest of a restored epoch; warns of a script that goes through its beginning without training.

        That is easily done: ``if step <= resume_step: continue`` skips what the loader has left out already.
        """
        steps, restored, taken = self.steps, current.done, 0
        began = steps() if steps is not None else 0
        for batch in source:
            if steps is None or steps() > began:
                self._warn_of_skips(current, restored, taken - self.gradient.num_steps)
                yield batch
                yield from source
                return
            yield batch
            taken += 1
        trained = steps is None or steps() > began
        self._warn_of_skips(current, restored, taken - self.gradient.num_steps if trained else taken)

    def _warn_of_skips(self, current: Pass, restored: int, untrained: int) -> None:
        if self.steps is not None and untrained > 0 and self.context.is_main:
            warnings.warn(
                f"a loader was restored to batch {restored} of epoch {current.epoch}, and then {untrained} of its "
                "batches went by without an optimizer step. It goes on with the next batch by itself: a script that "
                "skips by hand after load_state (`if step <= resume_step: continue`) skips twice, and never sees the "
                "samples between. Leave the skipping out, or let skip_first_batches do it (docs/how-to/resume.md)",
                stacklevel=2,
            )

    def _place(self, batch: Any) -> Any:
        if self.part is not None:
            batch = self.part(batch)
        device = self.device
        return batch if device is None or device.type == "cpu" else send_to_device(batch, device, self.non_blocking)

    @property
    def _moves(self) -> bool:
        return self.part is not None or (self.device is not None and self.device.type != "cpu")


class DataLoaderShard(DataLoaderAdapter, DataLoader[Any]):
    """A `DataLoader` whose batches are this rank's share, on the right device.

    Args:
        dataset: of torch's kind, map-style or iterable.
        device: where batches are put; `None` leaves them.
        rng_types: generators to align over the ranks at the start of each pass (``torch``, ``cuda``, ``generator``).
        synchronized_generator: what ``generator`` in *rng_types* means.
        skip_batches: batches to leave out at the start of each pass.
        use_stateful_dataloader: be a torchdata `StatefulDataLoader` as well, see `orc.runtime.data.stateful`.
        kwargs: of `torch.utils.data.DataLoader`.
    """

    def __new__(cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> Self:
        """An instance of the subclass that torchdata backs, where that is asked for."""
        if use_stateful_dataloader:
            from orc.runtime.data.stateful import Backed, backed

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
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        given = None if is_stream(self) else self.batch_sampler
        if isinstance(given, Iterable) and not isinstance(given, PassSampler):
            shard = BatchSamplerShard(given, even_batches=False)
            # torch forbids replacing it through the attribute
            self.__dict__["batch_sampler"] = CustomBatches(shard, lambda tensor: tensor, 1)
        self._adopt(
            context=context,
            device=device,
            non_blocking=non_blocking,
            rng_types=rng_types,
            synchronized_generator=synchronized_generator,
            skip_batches=skip_batches,
            total_batch_size=0,
            world_size=world_size,
        )
        rows = self.batch_size or getattr(self.batch_sampler, "batch_size", None) or 1
        self.total_batch_size = total_batch_size or rows * self.world_size
        self.__dict__["batch_size"] = rows if self.batch_sampler is not None else None
        sampler = self.batch_sampler if self.batch_sampler is not None else self.sampler
        self._pass_sampler = sampler if isinstance(sampler, PassSampler) else None
        if isinstance(sampler, CustomBatches) and sampler is self.batch_sampler:
            self.__dict__["batch_sampler"] = sampler.given  # scripts look for their own object there

    def _passes(self) -> PassSampler | None:
        return self._pass_sampler

    @property
    def _index_sampler(self) -> Any:  # what torch iterates
        return super()._index_sampler if self._pass_sampler is None else self._pass_sampler

    def _stateful(self) -> Any:
        """The dataset, if it is a stream that can say where it is and go on from there in this process."""
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
        gradient, place, events = self.gradient, self._place if self._moves else None, self.events
        mark = self.context.compute.mark
        gradient.begin(self)
        exhausted = False
        try:
            sampler = self._passes()
            total = sampler.batches(current) if sampler is not None else None
            source = self._source(current)
            if total is None:
                source = self._ahead(source, current)
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

    def _ahead(self, source: Iterator[Any], current: Pass) -> Iterator[Any]:
        """Batches of a pass of unknown length: the next one is read before the last can be told."""
        nothing = object()
        batch = next(source, nothing)
        while batch is not nothing:
            key = self._reader_key(current.done + 1)
            following = next(source, nothing)
            valid = -1
            if isinstance(batch, Marked):
                batch, valid = batch.content, batch.valid
            # Of streams that share themselves out to workers, the end of any worker's part may be filled up.
            self.remainder = self._rows(valid, batch)
            if following is nothing:
                self.end_of_dataloader = current.finished = True
                sampler = self._passes()
                if sampler is not None:
                    self.remainder = self._rows(sampler.tail(current), batch)
            current.done += 1
            if key is not None:
                current.key = key
            yield batch
            batch = following

    def _rows(self, valid: int, batch: Any) -> int:
        """*valid* samples of the last round as rows: without ``batch_size`` what is counted are whole batches."""
        if valid < 0 or self.batch_size is not None:
            return valid
        return valid * (rows_of(batch) or 1)

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
