"""Placeholders for an optimizer and a schedule that DeepSpeed makes from its configuration file. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class DummyOptim:
    """Placeholder of an optimizer; DeepSpeed makes the real one from the configuration's ``optimizer`` section.

    Args:
        params: parameters, or groups of them, as for a torch optimizer.
        lr: learning rate, where the configuration says ``auto``.
        weight_decay: weight decay, where the configuration says ``auto``.
        kwargs: kept, for scripts that pass the arguments of the real optimizer.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups as a torch optimizer has them, with the learning rate and weight decay given here."""
        groups = self.params if self.params and isinstance(self.params[0], dict) else [{"params": self.params}]
        return [{"lr": self.lr, "weight_decay": self.weight_decay, **group} for group in groups]


class DummyScheduler:
    """Placeholder of a schedule; DeepSpeed makes the real one from the configuration's ``scheduler`` section.

    Args:
        optimizer: the optimizer or its placeholder.
        total_num_steps: optimizer steps of the whole training, where the configuration says ``auto``.
        warmup_num_steps: optimizer steps of warm-up, where the configuration says ``auto``.
        lr_scheduler_callable: makes the schedule from the real optimizer, where the configuration has none.
        kwargs: kept, for scripts that pass the arguments of the real schedule.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
