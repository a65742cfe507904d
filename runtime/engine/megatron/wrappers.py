"""Wrappers around Megatron-LM's optimizer and schedule, which `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from orc.runtime.train.optimizer import AcceleratedOptimizer
from orc.runtime.train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import GradientRecord
    from orc.runtime.engine.megatron.optimizer import MegatronOptimizer
    from orc.runtime.train.engine import Engine


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The prepared optimizer: ``step`` clips and updates, ``zero_grad`` does nothing.

    Args:
        optimizer: Megatron-LM's.
        gradient: of the run.
        trainer: the Accelerator's engine, which counts.

    Attributes:
        gathers_state: its state dict is whole, and all processes ask for it together.
    """

    gathers_state = True

    def __init__(self, optimizer: MegatronOptimizer, *, gradient: GradientRecord, trainer: Engine) -> None:
        super().__init__(optimizer, False, gradient=gradient, engine=trainer)  # type: ignore[arg-type]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with the gradients of the last batch.

        Raises:
            ValueError: *closure* is given; Megatron-LM cannot call it.
        """
        if closure is not None:
            raise ValueError("Megatron-LM's optimizer takes no closure: call the model and step()")
        return super().step()


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """The prepared schedule: each ``step`` is one optimizer step, however many processes there are.

    Args:
        scheduler: Megatron-LM's ``OptimizerParamScheduler``.
        optimizers: the prepared optimizer.
        gradient: of the run.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, gradient: GradientRecord | None = None) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, num_processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance by one optimizer step, unless that was skipped."""
        if not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            self.scheduler.step(1)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rate of each group."""
        return [group["lr"] for group in self.optimizers[0].param_groups]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the wrapped schedule's state, and set the rates that go with it.

        Args:
            state_dict: what ``state_dict`` returned.
        """
        self.scheduler.num_steps = 0  # it adds those of the state to its own
        self.scheduler.load_state_dict(dict(state_dict))
        self.scheduler.step(0)
