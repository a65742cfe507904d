"""The prepared learning rate scheduler: follows the optimizer's real steps.

With N processes a schedule advances by N for every optimizer step. The last of the N is always a call of the
scheduler's own ``step``, and the only one; what lies before is skipped where the schedule allows it, or only computed.

The rates are those of N calls bit for bit, so that a run can be compared with one that makes them, up to `_ONE_BY_ONE`
steps and always where a rate depends on the number of the step alone. For longer jumps of schedules that go from one
rate to the next the closed form is used where torch has one, which differs by their rounding errors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from orc.runtime.core.accumulation import GradientRecord

# Their rates depend on the number of the step alone.
_BY_NUMBER = tuple(schedule.get_lr for schedule in (LambdaLR, OneCycleLR, CyclicLR))
_ONE_BY_ONE = 8


class AcceleratedScheduler:
    """Wraps *scheduler*: it advances only when the optimizers really stepped.

    A schedule is written for one process. Without *split_batches* the run consumes its batches ``num_processes`` times
    as fast, so every optimizer step advances the schedule by as many steps; with it, by one.

    Args:
        scheduler: a torch scheduler.
        optimizers: the prepared optimizers it depends on.
        step_with_optimizer: `False` leaves the timing to the script: every call advances by one.
        split_batches: whether the loaders split one batch over the processes.
        gradient: says when gradients are synchronised; by default the current context's.
        num_processes: steps per optimizer step without *split_batches*; by default as many as share out
            the data (`Topology.data_size`).
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        gradient: GradientRecord | None = None,
        num_processes: int | None = None,
    ) -> None:
        if gradient is None or num_processes is None:
            from orc.runtime.core.context import current_context

            ctx = current_context()
            gradient = gradient or ctx.gradient
            num_processes = num_processes or ctx.topology.pin_data_share()[1]
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._window = gradient.owner or gradient  # of the Accelerator that prepares it
        self._advance = 1 if split_batches else num_processes
        self._counts = hasattr(scheduler, "_step_count")  # some of torch's have none
        self._ends = getattr(scheduler, "total_steps", None) is not None  # torch's raise beyond their last step
        self._can_skip = [optimizer for optimizer in self.optimizers if hasattr(optimizer, "step_was_skipped")]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless gradients are still accumulating or an optimizer skipped its step."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        gradient = self._window.take_over()
        if not gradient.sync_gradients:
            if self._counts and gradient.adjust_scheduler:
                scheduler._step_count += 1
            return
        for optimizer in self._can_skip:
            if optimizer.step_was_skipped:
                return
        if self._advance == 1 and not self._ends:
            scheduler.step(*args, **kwargs)
        else:
            jump(scheduler, self._advance, *args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the current learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state."""
        return self.scheduler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state.

        Args:
            state_dict: what ``state_dict`` returned.
        """
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_window"}  # of the run

    def __setstate__(self, state: dict[str, Any]) -> None:
        from orc.runtime.core.context import current_context

        self.__dict__.update(state)
        gradients = [optimizer._window for optimizer in self.optimizers if hasattr(optimizer, "_window")]
        record = current_context().gradient
        self._window = gradients[0] if gradients else record.owner or record

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin._window = self._window  # of the same run
        return twin

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"


def jump(scheduler: Any, count: int, *args: Any, **kwargs: Any) -> None:
    """Advance *scheduler* by *count* steps, at most to its end; rates as after *count* calls of ``step``."""
    limit = getattr(scheduler, "total_steps", None)
    if limit is not None:
        count = min(count, limit - scheduler.last_epoch)
    plain = type(scheduler).step is LRScheduler.step and "step" not in scheduler.__dict__ and not args and not kwargs
    if count < 1:
        return
    if plain and scheduler._step_count == 1:
        scheduler.step()  # the first call tells of steps in the wrong order
        count -= 1
    if not plain:
        for _ in range(count):
            scheduler.step(*args, **kwargs)
    elif count:
        _skip(scheduler, count - 1)
        scheduler.step()


def _skip(scheduler: Any, count: int) -> None:
    if type(scheduler).get_lr in _BY_NUMBER:
        _count(scheduler, count)
        return
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if closed is not None:
        before = closed()
        _count(scheduler, count)
        after = closed()
        if before == after:
            return  # no change on the way: whatever the rates are, they stay
        if count >= _ONE_BY_ONE and _are(before, scheduler):
            for group, rate in zip(scheduler.optimizer.param_groups, after, strict=True):
                group["lr"] = rate
            return
        _count(scheduler, -count)
    _walk(scheduler, count)


def _walk(scheduler: Any, count: int) -> None:
    """Set the rates as *count* calls of ``step`` do, without the rest of ``step``: a tenth of the cost."""
    groups = scheduler.optimizer.param_groups
    if not all(isinstance(group["lr"], float) for group in groups):
        for _ in range(count):
            scheduler.step()
        return
    scheduler._get_lr_called_within_step = True
    try:
        for _ in range(count):
            _count(scheduler, 1)
            rates = scheduler.get_lr()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            scheduler._last_lr = [group["lr"] for group in groups]
    finally:
        scheduler._get_lr_called_within_step = False


def _count(scheduler: Any, count: int) -> None:
    scheduler.last_epoch += count
    scheduler._step_count += count


def _are(rates: Any, scheduler: Any) -> bool:
    """Return whether the groups have *rates*; not after a change by another schedule or the script, nor for tensors."""
    return all(
        isinstance(group["lr"], float) and math.isclose(group["lr"], rate, rel_tol=1e-9, abs_tol=1e-9 * base)
        for group, rate, base in zip(scheduler.optimizer.param_groups, rates, scheduler.base_lrs, strict=True)
    )
