"""The prepared learning rate scheduler: follows the optimizer's real steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orc.runtime.train.schedule_jump import jump

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from orc.runtime.core.context import GradientRecord


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
        self._gradient = gradient
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
        if not self._gradient.sync_gradients:
            if self._counts and self._gradient.adjust_scheduler:
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
        return {name: value for name, value in self.__dict__.items() if name != "_gradient"}  # the run's

    def __setstate__(self, state: dict[str, Any]) -> None:
        from orc.runtime.core.context import current_context

        self.__dict__.update(state)
        gradients = [optimizer._gradient for optimizer in self.optimizers if hasattr(optimizer, "_gradient")]
        self._gradient = gradients[0] if gradients else current_context().gradient

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin._gradient = self._gradient  # of the same run
        return twin

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"
