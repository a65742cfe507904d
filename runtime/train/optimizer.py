"""The prepared optimizer: steps and clears only when gradients are synchronised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from orc.runtime.core.accumulation import GradientRecord
    from orc.runtime.train.engine import Engine


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps *optimizer*; everything that is not overridden here is the wrapped one's.

    Args:
        optimizer: a torch optimizer.
        device_placement: move the optimizer's state to its parameters' device.
        scaler: with fp16, what steps in its place.
        gradient: says when to step; by default the current context's.
        engine: makes the updates; by default one of the current context.
        device: where the state belongs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        gradient: GradientRecord | None = None,
        engine: Engine | None = None,
        device: torch.device | None = None,
    ) -> None:
        # No super().__init__(): the wrapped optimizer owns groups, state and hooks.
        if gradient is None or engine is None:
            from orc.runtime.core.context import current_context
            from orc.runtime.core.prepared import Prepared
            from orc.runtime.train.engine import engine_for

            ctx = current_context()
            gradient = gradient or ctx.gradient
            engine = engine or engine_for(ctx, prepared=Prepared(scaler=scaler))
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self._window = gradient.owner or gradient  # of the Accelerator that prepares it
        self._engine = engine
        self.steps = 0  # updates made
        self.skips = 0  # updates skipped, by the engine or by a watcher of the gradients
        self._skipped: bool | torch.Tensor = False  # whether the last was; 1.0 or 0.0 where its device alone knows
        if device_placement and device is not None and optimizer.state:
            self.load_state_dict(optimizer.state_dict())

    @property
    def state(self) -> Any:
        """State per parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Default options of a parameter group."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Args:
            param_group: as for `torch.optim.Optimizer.add_param_group`.
        """
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; torch puts each tensor on the device it belongs to.

        Counts of steps stay on the CPU unless the optimizer is fused or capturable: on a device each would be waited
        for at every step.

        Args:
            state_dict: what ``state_dict`` returned.
        """
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless they are still accumulating.

        Args:
            set_to_none: drop the gradients instead of filling them with zeros.
        """
        if self._window.take_over().sync_gradients:
            self._engine.zero_grad(self, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still accumulating; an overflow skips the update.

        Args:
            closure: computes the loss anew, as for `torch.optim.Optimizer.step`.
        """
        if not self._window.take_over().sync_gradients:
            return None
        engine = self._engine
        events = engine.events
        self._skipped = False
        if events.before_step and True in [refuses(self) for refuses in events.before_step]:  # all are asked
            self.count(False)
            return None
        result = engine.step(self, closure)
        if events.on_step:
            for tell in events.on_step:
                tell(self)
        return result

    def count(self, updated: bool) -> None:
        """Count an update that was made, or skipped.

        Args:
            updated: the parameters have changed, as the engine sees it without waiting for the device.
        """
        self._skipped = not updated
        self.steps += updated
        self.skips += not updated

    def skips_on_device(self, told: torch.Tensor) -> None:
        """Record that the wrapped optimizer decides by itself, on its device, whether to skip the next update.

        Args:
            told: 1.0 on that device where it skips, otherwise 0.0.
        """
        self._skipped = told

    @property
    def step_was_skipped(self) -> bool:
        """`True` if an overflow, or a watcher of the gradients, made the optimizer skip its last step."""
        return bool(self._skipped)

    def train(self) -> None:
        """Training mode of optimizers that have one (schedule-free)."""
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()

    def eval(self) -> None:
        """Evaluation mode of optimizers that have one (schedule-free)."""
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # Without the engine that trains here, and without the counter that torch's schedulers put around `step`.
        here = ("_window", "_engine", "step")
        own = {name: value for name, value in self.__dict__.items() if name not in here}
        return {**own, "ctx": self._engine.ctx}

    def __setstate__(self, state: dict[str, Any]) -> None:
        from orc.runtime.core.prepared import Prepared
        from orc.runtime.train.engine import engine_for

        ctx = state["ctx"]
        self.__dict__.update({name: value for name, value in state.items() if name != "ctx"})
        self._window = ctx.gradient.owner or ctx.gradient
        self._engine = engine_for(ctx, prepared=Prepared(scaler=self.scaler))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        own = {name: value for name, value in self.__getstate__().items() if name not in ("scaler", "ctx")}
        twin.__dict__.update(copy.deepcopy(own, memo))
        twin._window, twin._engine, twin.scaler = self._window, self._engine, self.scaler  # of the same run
        return twin

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
