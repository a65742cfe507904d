"""The spike guard: notices NaN, infinities, jumps of the loss and of the gradient norm without waiting for the device.

``warn`` and ``raise``: each optimizer step writes its loss and gradient norm into a small buffer on the device. Every
``spike_every`` steps the buffer is copied to the host without waiting, and looked at when the copy has arrived: at one
of the next steps. What is wrong is therefore told up to ``2 * spike_every`` steps late, with the number of the step.

``skip``: the update must not happen, so the decision is made before it, from the gradient norm: the one number that is
the same on every rank. Optimizers that take ``found_inf`` (torch's fused ones) get the decision as a tensor and skip on
the device. For all others the host has to know: on an accelerator that is one wait per optimizer step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.logging import get_logger
from orc.runtime.parallel.norms import total_norm

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.events import Events
    from orc.runtime.train.optimizer import AcceleratedOptimizer

WARM_UP = 20  # values before anything finite counts as a jump
HISTORY = 256  # values that "usual" is the median of
QUANTITIES = ("loss", "gradient norm")


class SpikeError(OrcRuntimeError):
    """The loss or the gradient norm is not finite, or far above what is usual; the message names step and rank."""


@dataclass(frozen=True)
class Finding:
    """A value that is not finite or jumps. ``usual`` is the median before it, `None` for a value that is not finite."""

    step: int
    quantity: str
    value: float
    usual: float | None

    def __str__(self) -> str:
        if self.usual is None:
            return f"the {self.quantity} is {self.value} at step {self.step}"
        return (
            f"the {self.quantity} jumps to {self.value:.4g} at step {self.step}, "
            f"{self.value / self.usual:.0f} times the usual {self.usual:.4g}"
        )


class Usual:
    """Detector of values of one quantity that are not finite or far above the median of those before. Pure."""

    def __init__(self, quantity: str, factor: float, warm_up: int = WARM_UP) -> None:
        self.quantity = quantity
        self.factor = factor
        self.warm_up = warm_up
        self._values: deque[float] = deque(maxlen=HISTORY)
        self._median = 0.0
        self._stale = 0  # values until the median is taken anew: sorting for each one would cost more than the rest

    def judge(self, step: int, value: float) -> Finding | None:
        """Judge the *value* of *step*; jumps do not become usual, so that each of them is found."""
        if not math.isfinite(value):
            return Finding(step, self.quantity, value, None)
        if len(self._values) >= self.warm_up:
            if self._stale == 0:
                self._median, self._stale = statistics.median(self._values), 16
            usual = self._median
            if usual > 0 and value > self.factor * usual:
                return Finding(step, self.quantity, value, usual)
        self._values.append(value)
        self._stale = max(self._stale - 1, 0)
        return None


class Readings:
    """A buffer on the device with the last values; looked at when they have arrived on the host."""

    def __init__(self, device: torch.device, every: int) -> None:
        self._device = device
        self._every = every
        self._buffer = torch.full((every, len(QUANTITIES)), math.nan, device=device)
        self._rows = list(self._buffer.unbind())  # views: indexing costs more than the write
        self._cells = [list(row.unbind()) for row in self._rows]
        self._steps = [0] * every
        self._known = [[False] * len(QUANTITIES) for _ in range(every)]
        self._fill = 0
        self._travelling: tuple[Tensor, Any, list[int], list[list[bool]]] | None = None

    def write(self, step: int, values: tuple[Tensor | None, ...]) -> None:
        """Keep the values of *step* (elements without a gradient, or `None`)."""
        row = self._fill
        self._steps[row] = step
        known = self._known[row]
        for index, value in enumerate(values):
            known[index] = value is not None
            if value is not None:
                self._cells[row][index].copy_(value)
        self._fill = row + 1

    @property
    def full(self) -> bool:
        """The buffer has no place for another step."""
        return self._fill == self._every

    def send(self) -> None:
        """Start the copy to the host, and begin anew. The one before must have been taken."""
        steps, known = self._steps[: self._fill], [list(row) for row in self._known[: self._fill]]
        if self._device.type == "cuda":
            host = torch.empty(self._buffer.shape, pin_memory=True)
            host.copy_(self._buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host, event = self._buffer.to("cpu", copy=True), None
        self._travelling = (host, event, steps, known)
        self._fill = 0

    def take(self, wait: bool = False) -> list[tuple[int, list[float | None]]]:
        """Return the values that have arrived, by step; nothing while they are on their way, unless *wait*."""
        if self._travelling is None:
            return []
        host, event, steps, known = self._travelling
        if event is not None:
            if wait:
                event.synchronize()
            elif not event.query():
                return []
        self._travelling = None
        rows = host[: len(steps)].tolist()
        return [
            (step, [value if there else None for value, there in zip(row, have, strict=True)])
            for step, row, have in zip(steps, rows, known, strict=True)
        ]


class SpikeGuard:
    """Looks after the loss and the gradient norm of one Accelerator.

    `listen` subscribes it to the events of an engine.

    Args:
        context: of the run.
        action: ``warn``, ``raise`` or ``skip``.
        factor: a value above this many times the usual one is a jump.
        every: optimizer steps between looks.
        base_step: the step that the run was resumed at.
    """

    def __init__(
        self,
        context: RunContext,
        action: str,
        factor: float = 10.0,
        every: int = 10,
        base_step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.context = context
        self.action = action
        self.factor = factor
        self._base_step = base_step
        self._readings = Readings(context.device, every)
        self._usual = [Usual(quantity, factor) for quantity in QUANTITIES]
        self._loss: Tensor | None = None
        self._norm: Tensor | None = None
        self._limits: dict[int, _Limit] = {}
        self._log = get_logger(__name__)
        self._told = False  # that fp16 skips by itself
        self.skipped = 0  # updates that the host skipped; those skipped on the device are not counted
        self.latest: dict[str, float] = {}

    def listen(self, events: Events) -> None:
        """See every loss that goes backward, every norm that is clipped, and each step."""
        events.subscribe("on_backward", self._see_loss)
        events.subscribe("on_clip", self._see_norm)
        if self.action == "skip":
            events.subscribe("before_step", self._refuses)
        events.subscribe("on_step", self._note)

    def norms(self, optimizers: Sequence[AcceleratedOptimizer]) -> tuple[tuple[float, float], ...]:
        """Return the usual gradient norm of each of *optimizers*, and the number of updates that it was taken from.

        Empty where nothing was judged: the ranks that resume begin as this one did.
        """
        if not self._limits:
            return ()
        return tuple(
            limit.state() if (limit := self._limits.get(id(optimizer))) is not None else (0.0, 0.0)
            for optimizer in optimizers
        )

    def load_norms(self, optimizers: Sequence[AcceleratedOptimizer], norms: Sequence[tuple[float, float]]) -> None:
        """Go on with what `norms` returned, so that a resumed run vetoes the updates that it would have vetoed."""
        self._limits = {
            id(optimizer): _Limit(self.context.device, self.factor, *state)
            for optimizer, state in zip(optimizers, norms, strict=False)
        }

    def _see_loss(self, loss: Tensor, normalized: bool) -> None:
        if not normalized and loss.numel() == 1:  # else it is a sum over anything
            self._loss = loss.detach()

    def _see_norm(self, norm: Tensor) -> None:
        self._norm = norm

    def _refuses(self, prepared: AcceleratedOptimizer) -> bool:
        if prepared.scaler is not None:
            if not self._told:
                self._told = True
                self._log.warning(
                    "spike_action=skip with fp16: the gradient scaler skips updates that are not finite; jumps are "
                    "only reported"
                )
            return False
        if self._skip(prepared):
            self._norm = self._loss = None
            return True
        return False

    def _note(self, prepared: AcceleratedOptimizer) -> None:
        self._write(prepared.steps)

    def _write(self, step: int) -> None:
        readings = self._readings
        readings.write(step + self._base_step(), (self._loss, self._norm))
        self._loss = self._norm = None
        if readings.full:
            self._judge(readings.take(wait=True))  # the one before has had a whole round to arrive
            readings.send()
        self._judge(readings.take())

    def flush(self) -> None:
        """Judge everything that was written, waiting for it."""
        self._judge(self._readings.take(wait=True))
        self._readings.send()
        self._judge(self._readings.take(wait=True))

    def _judge(self, arrived: list[tuple[int, list[float | None]]]) -> None:
        findings = []
        for step, values in arrived:
            for usual, value in zip(self._usual, values, strict=True):
                if value is None:
                    continue
                finding = usual.judge(step, value)
                if finding is not None:
                    findings.append(finding)
                elif usual.quantity == "gradient norm":
                    self.latest["grad_norm"] = value
        if not findings:
            return
        text = f"rank {self.context.rank}: {findings[0]}"
        if len(findings) > 1:
            text += f" (and {len(findings) - 1} more up to step {findings[-1].step})"
        if self.action == "raise":
            raise SpikeError(f"{text}; load an earlier checkpoint, or lower the learning rate or spike_action")
        self._log.warning(text, main_process_only=False)

    # ---- skipping

    def _skip(self, prepared: AcceleratedOptimizer) -> bool:
        """Return whether the host must skip this update. Optimizers that can do so skip it on the device instead."""
        norm = self._norm
        if norm is None:
            # Over all shards: the ranks must come to the same decision.
            self._norm = norm = total_norm((p for group in prepared.param_groups for p in group["params"]), 2.0)
        limit = self._limits.get(id(prepared))
        if limit is None:
            limit = self._limits[id(prepared)] = _Limit(norm.device, self.factor)
            if not takes_found_inf(prepared.optimizer) and norm.device.type != "cpu":
                self._log.warning(
                    "spike_action=skip waits for the device at every step with this optimizer; torch's fused "
                    "optimizers (fused=True) skip on the device"
                )
        bad = limit.exceeded(norm)
        optimizer: Any = prepared.optimizer
        if takes_found_inf(optimizer) and norm.device.type != "cpu":
            optimizer.found_inf, optimizer.grad_scale = bad, None
            prepared.skips_on_device(bad)
            return False
        skip = bool(bad.item())
        if skip:
            self.skipped += 1
            self._log.warning(
                f"step {prepared.steps + self._base_step() + 1} is skipped: the gradient norm is {norm.item():.4g}"
            )
        return skip


class _Limit:
    """Limit of the gradient norm, kept on the device: a multiple of its moving average."""

    def __init__(self, device: torch.device, factor: float, average: float = 0.0, seen: float = 0.0) -> None:
        self._factor = factor
        self._average = torch.tensor(average, device=device)
        self._seen = torch.tensor(seen, device=device)

    def state(self) -> tuple[float, float]:
        """Return the average, and the number of norms that it was taken from."""
        return self._average.item(), self._seen.item()

    def exceeded(self, norm: Tensor) -> Tensor:
        """1.0 when *norm* is not finite or too large, else 0.0; as a tensor on its device."""
        norm = norm.detach().to(torch.float32)
        jump = (self._seen >= WARM_UP) & (norm > self._factor * self._average)
        bad = jump | ~torch.isfinite(norm)
        weight = 1.0 / (self._seen + 1).clamp(max=50.0)
        self._average = torch.where(bad, self._average, torch.lerp(self._average, norm, weight))
        self._seen = self._seen + (~bad)
        return bad.to(torch.float32)


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether *optimizer* skips its update on the device when ``found_inf`` is set: torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        bool(group.get("fused")) for group in optimizer.param_groups
    )
