"""Base of all prepared loaders: passes, positions, and the placement of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from orc.runtime.collectives.tree import send_to_device
from orc.runtime.core.events import Events
from orc.runtime.data.index_batches import PassSampler
from orc.runtime.data.iterable import Stream
from orc.runtime.data.lane import Lane
from orc.runtime.data.plan import PositionError
from orc.runtime.data.position import Cursor, Cut, Pass, Position, cut_at, offset_of

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import GradientRecord
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.state import GradientState
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
        attempts: counts optimizer steps, skipped ones too; the Accelerator puts its own here.
        part: makes of a batch what this rank computes of it; `None` where that is all of it.
        meter: measures how long the loop waits for batches; the Accelerator puts its own here.
    """

    dataset: Any
    context: RunContext
    gradient: GradientRecord
    device: torch.device | None
    non_blocking: bool
    prefetch_to_device: bool
    rng_types: tuple[str, ...]
    synchronized_generator: torch.Generator | None
    skip_batches: int
    skips: bool
    world_size: int
    total_batch_size: int
    cursor: Cursor
    events: Events
    _pass_sampler: PassSampler | None
    end_of_dataloader = False
    remainder = -1
    own_share = False
    simulated = False
    attempts: Callable[[], int] | None = None
    meter: Meter | None = None
    part: Callable[[Any], Any] | None = None
    lane: Lane | None = None  # made by the first pass: it opens the device
    seek: torch.Tensor | None = None  # of the workers, see `seek_tensor`

    if TYPE_CHECKING:  # each loader has its own

        def __iter__(self) -> Iterator[Any]: ...

    def __getstate__(self) -> dict[str, Any]:
        # Without what belongs to this process: workers, channels, and those who listen.
        left = ("gradient", "events", "attempts", "meter", "seek", "lane", "_iterator")
        return {name: None if name in left else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, gradient=state["context"].gradient, events=Events())
        if isinstance(self.dataset, Stream):
            self.dataset.seek_of_workers = None

    @property
    def _given_dataset(self) -> Any:
        return self.dataset.dataset if isinstance(self.dataset, Stream) else self.dataset

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all ranks. Raises `TypeError` for a stream without a length."""
        return len(self._given_dataset)

    @property
    def gradient_state(self) -> GradientState:
        """Accumulation and synchronisation of gradients in the run that this loader belongs to."""
        from orc.runtime.core.state import GradientState

        return GradientState.of(self.context)

    @property
    def iteration(self) -> int:
        """The number of passes that came before the running or next one; the same as `epoch`."""
        return self.epoch

    @property
    def base_dataloader(self) -> Any:
        """The loader that reads: this one, which is a `torch.utils.data.DataLoader` itself."""
        return self

    @property
    def use_stateful_dataloader(self) -> bool:
        """`True` if this is a torchdata `StatefulDataLoader` as well."""
        from orc.runtime.data.backed import Backed

        return isinstance(self, Backed)

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
        """Make the next pass number *epoch*; it is set on samplers and datasets that take an epoch."""
        self.cursor.set_epoch(epoch)
        self._announce(epoch)

    def _announce(self, epoch: int) -> None:
        sampler = self._passes()
        if sampler is not None:
            sampler.set_epoch(epoch)
        if hasattr(self._given_dataset, "set_epoch"):
            self._given_dataset.set_epoch(epoch)

    def _seed_stream(self, epoch: int) -> None:
        """Let ranks that all read a stream read it in one order: its generator begins with the epoch."""
        if isinstance(self.dataset, Stream) and self.dataset.shard.num_processes > 1:
            generator = getattr(self.dataset.dataset, "generator", None)
            if isinstance(generator, torch.Generator) and not hasattr(self.dataset.dataset, "set_epoch"):
                generator.manual_seed(epoch)

    def _passes(self) -> PassSampler | None:
        """The batch sampler that can start anywhere; `None` for streams."""
        return self._pass_sampler

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
            if isinstance(generator, torch.Generator) and generator is not getattr(sampler, "lent", None):
                return generator
        return self.synchronized_generator

    def _open(self) -> Pass:
        """Begin a pass: a new one, or the rest of a restored one. `skip_batches` counts from the start of the epoch."""
        cursor = self.cursor
        pending, cursor.pending = cursor.pending, None
        attempts = self.attempts() if self.attempts is not None else 0
        if pending is None:
            current = Pass(cursor.epoch, self.skip_batches, None, False, attempts, attempts)
        else:
            done, cut = self._continue(pending) if pending["live"] else (self.skip_batches, Cut())
            current = Pass(pending["epoch"], done, pending["key"], pending["live"], attempts, attempts, cut=cut)
        cursor.epoch, cursor.live = current.epoch, current
        self.end_of_dataloader, self.remainder = False, -1
        self._announce(current.epoch)
        self._seed_stream(current.epoch)
        if not current.restored and not self.simulated:
            _align(self.rng_types, self.synchronized_generator, self.context)
        return current

    def _close(self, current: Pass, exhausted: bool) -> None:
        cursor = self.cursor
        if cursor.live is current:
            cursor.live = None
            taken = current.began_at < self.attempts() if self.attempts is not None else current.done > 1
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
        sampler, generator = self._passes(), self._generator()
        if sampler is not None and (generator is None or sampler.given_generator):
            sampler.keep_drawing(position["generator"])
        elif generator is not None and position["generator"] is not None:
            generator.set_state(position["generator"])
        self.cursor.pending = position
        self.cursor.epoch = position["epoch"]

    def skipping(self, num_batches: int) -> DataLoaderAdapter:
        """Return a view of this loader whose passes leave out the first *num_batches* batches that this one's have."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.skip_batches, view.skips = self.skip_batches + num_batches, True
        view.__dict__["_iterator"] = None  # persistent workers belong to the loader that started them
        return view

    def _watched(self, source: Iterator[Any], current: Pass) -> Iterator[Any]:
        """*source*, the rest of a restored epoch; warns of a script that goes through its beginning without training.

        That is easily done: ``if step <= resume_step: continue`` skips what the loader has left out already.
        """
        attempts, restored, taken = self.attempts, current.done, 0
        began = attempts() if attempts is not None else 0
        for batch in source:
            if attempts is None or attempts() > began:
                self._warn_of_skips(current, restored, taken - self.gradient.num_steps)
                yield batch
                yield from source
                return
            yield batch
            taken += 1
        trained = attempts is None or attempts() > began
        self._warn_of_skips(current, restored, taken - self.gradient.num_steps if trained else taken)

    def _warn_of_skips(self, current: Pass, restored: int, untrained: int) -> None:
        if self.attempts is not None and untrained > 0 and self.context.is_main:
            warnings.warn(
                f"a loader was restored to batch {restored} of epoch {current.epoch}, and then {untrained} of its "
                "batches went by without an optimizer step. It goes on with the next batch by itself: a script that "
                "skips by hand after load_state (`if step <= resume_step: continue`) skips twice, and never sees the "
                "samples between. Leave the skipping out, or let skip_first_batches do it (docs/how-to/resume.md)",
                stacklevel=2,
            )

    def _ways(self) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
        """What begins to place a batch that was read, if anything does, and what then gives it out placed.

        Memory that this loader pins is copied without waiting for the copy: torch fills it again only afterwards.
        """
        part, device = self.part, self.device
        if device is None or device.type == "cpu":
            return None, part
        pinned = device.type == "cuda" and bool(getattr(self, "pin_memory", False))  # elsewhere it is without effect
        non_blocking = self.non_blocking or pinned
        if device.type == "cuda" and self.prefetch_to_device:
            lane = self.lane = self.lane or Lane(device, waits=not non_blocking)
            return lambda batch: lane.start(batch if part is None else part(batch)), lane.receive
        return None, lambda batch: send_to_device(batch if part is None else part(batch), device, non_blocking)


def _align(rng_types: Sequence[str], generator: torch.Generator | None, context: RunContext) -> None:
    """Give every rank rank 0's state of the generators *rng_types* (``generator`` is *generator*, if there is one)."""
    from orc.runtime.train.seeding import synchronize_rng_state

    for kind in rng_types:
        if kind != "generator" or generator is not None:
            synchronize_rng_state(kind, generator, ctx=context)
