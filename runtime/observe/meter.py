"""The training thread's part of the metrics: a few additions per batch. Nothing is looked up, sent or written here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orc.runtime.observe.flops import FlopCount

if TYPE_CHECKING:
    from torch import Tensor

    from orc.runtime.observe.loss import LossReader

_clock = time.perf_counter


class _Pass:
    """State of one pass over a loader: samples, tokens and waiting time since the last optimizer step."""

    __slots__ = ("began", "loader", "mark", "rows", "tokens", "trained", "waited")

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.began = self.mark = _clock()
        self.rows = self.tokens = 0
        self.waited = 0.0
        self.trained = False


class Meter:
    """Totals since the start, written by the training thread and read by others.

    Attributes:
        steps: optimizer steps that were timed.
        busy_s: seconds these took, without evaluation, saving and loading.
        waited_s: seconds of these spent waiting for batches.
        samples: samples in these, over all ranks.
        tokens: tokens in these, on this rank: elements of ``input_ids``, or what `count_tokens` was told.
        flops: operations of one step on this rank; `None` until counted, and where they cannot be.
        loss: of the last backward, on its device.
        loss_reader: brings it to the host, where that is another device's.
        told_loss: the loss in the newest line of metrics.
        may_count: asked once whether FLOPs can be counted.
        away_s: seconds of other work since the last step.
        other_s: seconds of evaluation, saving and loading.
        slowest_s: longest step since it was last reset.
        epoch: the epoch of the last step.
    """

    def __init__(self) -> None:
        self.steps = self.samples = self.tokens = self.epoch = 0
        self.busy_s = self.waited_s = self.away_s = self.other_s = self.slowest_s = 0.0
        self.flops: int | None = None
        self.loss: Tensor | None = None
        self.loss_reader: LossReader | None = None
        self.told_loss: float | None = None
        self._told_tokens = False
        self._passes: list[_Pass] = []
        self.may_count: Callable[[], bool] = lambda: True
        self._count = FlopCount()
        self._flops_due = False  # count the window that begins with the next batch
        self._flops_open = True  # not counted yet

    def count_tokens(self, count: int) -> None:
        """*count* tokens of this rank were in the batch; takes the place of looking at ``input_ids``."""
        self._told_tokens = True
        if self._passes:
            self._passes[-1].tokens += count

    def note_loss(self, loss: Tensor, normalized: bool) -> None:
        """Note that *loss* has gone backward; one that is a sum over anything (*normalized*) is not shown."""
        if not normalized:
            self.loss = loss.detach()
            if self.loss_reader is not None:
                self.loss_reader.note(self.loss)

    def timed(self, loader: Any, source: Iterator[Any]) -> Iterator[Any]:
        """*source* with its waits measured: the batches of one pass over *loader*."""
        current = _Pass(loader)
        self._passes.append(current)
        rows = loader.total_batch_size
        first, tokens_of = True, None
        try:
            while True:
                asked = _clock()
                try:
                    batch = next(source)
                except StopIteration:
                    return
                current.waited += _clock() - asked
                current.rows += rows
                if first:
                    first, tokens_of = False, None if self._told_tokens else _token_reader(batch)
                if tokens_of is not None and not self._told_tokens:
                    current.tokens += tokens_of(batch)
                if self._flops_due:
                    self._flops_due = False
                    self._begin_count()
                yield batch
        finally:
            self._end(current)

    def step(self, loader: Any) -> None:
        """An optimizer step was taken in the running pass over *loader*."""
        now = _clock()
        current = self._passes[-1]
        if current.loader is not loader:
            current = next(passing for passing in self._passes if passing.loader is loader)
        away, self.away_s = self.away_s, 0.0
        self.other_s += away
        if self._count.counting:
            self.flops, self._flops_open = self._count.stop(), False  # a step that was counted is slower: not timed
        else:
            elapsed = now - current.mark - away
            self.steps += 1
            self.busy_s += elapsed
            self.waited_s += current.waited
            self.tokens += current.tokens
            self.samples += current.rows
            if loader.end_of_dataloader and loader.remainder >= 0:
                self.samples -= loader.total_batch_size - loader.remainder
            if elapsed > self.slowest_s:
                self.slowest_s = elapsed
            if self._flops_open:
                self._flops_due = True
        self.epoch = loader.epoch
        current.mark, current.waited, current.rows, current.tokens, current.trained = _clock(), 0.0, 0, 0, True

    def _begin_count(self) -> None:
        if self.may_count():
            self._count.start()
        else:
            self._flops_open = False

    def _end(self, current: _Pass) -> None:
        if current in self._passes:
            self._passes.remove(current)
        if not current.trained:
            if self._passes:  # an evaluation in the middle of training is no part of the step around it
                self.away_s += _clock() - current.began
            else:
                self.other_s += _clock() - current.began
        elif self._count.counting:  # the loop was left before the step: count a later one
            self._count.stop()
            self._flops_due = False


def _token_reader(batch: Any) -> Callable[[Any], int] | None:
    if hasattr(batch, "content"):  # a dispatched message
        inner = _token_reader(batch.content)
        return None if inner is None else lambda one: inner(one.content)
    if isinstance(batch, Mapping) and hasattr(batch.get("input_ids"), "numel"):
        return lambda one: int(one["input_ids"].numel())
    return None
