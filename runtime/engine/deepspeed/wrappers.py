"""Wrappers around DeepSpeed's engine, optimizer and schedule, which `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orc.runtime.train.optimizer import AcceleratedOptimizer
from orc.runtime.train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    import torch

    from orc.runtime.core.accumulation import GradientRecord
    from orc.runtime.train.engine import Engine


class DeepSpeedEngineWrapper:
    """Wraps the engine of DeepSpeed: backward, and the update at the end of each accumulation window.

    Args:
        engine: as ``deepspeed.initialize`` returns it.

    Attributes:
        engine: the same.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.norm: Tensor | None = None  # of the gradients of the last update, before clipping

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; with *sync_gradients* reduce them over the processes, clip, update and clear.

        Args:
            loss: a mean over the batch; DeepSpeed divides it by the accumulation count and scales it.
            sync_gradients: this batch ends an accumulation window.
            kwargs: ``retain_graph`` and others of DeepSpeed's ``backward``.
        """
        engine = self.engine
        engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        engine.backward(loss, **kwargs)
        if not sync_gradients:
            return
        if engine.zero_optimization_stage() == 0:  # keeps no norm
            self.norm = _norm(engine.module.parameters())
        engine.step()

    def get_global_grad_norm(self) -> Tensor:
        """Return the norm of the gradients at the last update, over all processes and before clipping."""
        norm = self.engine.get_global_grad_norm()
        if norm is None:
            norm = self.norm if self.norm is not None else 0.0
        import torch

        return norm.detach().float() if isinstance(norm, Tensor) else torch.tensor(float(norm))


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The prepared optimizer: `Accelerator.backward` has updated already, so ``step`` and ``zero_grad`` do nothing.

    Args:
        optimizer: DeepSpeed's.
        engine: DeepSpeed's, which owns it.
        gradient: says when an accumulation window ends.
        trainer: the Accelerator's engine, which counts.
        original: the optimizer or placeholder that was prepared.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        engine: Any,
        gradient: GradientRecord,
        trainer: Engine,
        original: Any = None,
    ) -> None:
        super().__init__(optimizer, False, gradient=gradient, engine=trainer)
        self.deepspeed_engine = engine
        self.wrapped = DeepSpeedEngineWrapper(engine)
        self.original = original
        # Where it scales, it skips updates that overflow: the spike guard leaves them to it.
        self.scaler = getattr(optimizer, "loss_scaler", None) if engine.fp16_enabled() else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the update has cleared the gradients.

        Args:
            set_to_none: without effect here.
        """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing but count the update that `Accelerator.backward` made.

        Raises:
            ValueError: *closure* is given; DeepSpeed cannot call it.
        """
        if closure is not None:
            raise ValueError("DeepSpeed's optimizers take no closure: call backward() and step()")
        if self._window.take_over().sync_gradients:
            self._engine.step(self)
            for tell in self._engine.events.on_step:
                tell(self)
        return None

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the state, as DeepSpeed keeps it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. Whole runs are loaded by `Accelerator.load_state`."""
        self.optimizer.load_state_dict(state_dict)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The prepared schedule that DeepSpeed made: it advances with each update, so ``step`` does nothing.

    Args:
        scheduler: DeepSpeed's.
        optimizers: the prepared optimizer.
        gradient: of the run.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, gradient: GradientRecord | None = None) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, num_processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the update has advanced the schedule."""


def _norm(parameters: Any) -> Tensor:
    import torch

    norms = [torch.linalg.vector_norm(p.grad.detach().float()) for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)
