"""Several steps of a learning rate schedule at once.

With N processes a schedule advances by N for every optimizer step. The last of the N is always a call of the
scheduler's own ``step``, and the only one; what lies before is skipped where the schedule allows it, or only computed.

The rates are those of N calls bit for bit, so that a run can be compared with one that makes them, up to `_ONE_BY_ONE`
steps and always where a rate depends on the number of the step alone. For longer jumps of schedules that go from one
rate to the next the closed form is used where torch has one, which differs by their rounding errors.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

# Their rates depend on the number of the step alone.
_BY_NUMBER = tuple(one.get_lr for one in (LambdaLR, OneCycleLR, CyclicLR))
_ONE_BY_ONE = 8


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
