"""Options of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orc.runtime.core.handlers import KwargsHandler

if TYPE_CHECKING:
    import os

    import torch

_SCHEDULE = ("wait", "warmup", "active")
_SCHEDULE_OPTIONAL = ("repeat", "skip_first", "skip_first_wait")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``.

    Attributes:
        activities: what is recorded: ``cpu``, ``cuda``, ``xpu``, ``mtia``, ``hpu``; by default all there is.
        schedule_option: when it is recorded, in calls of ``step()``: ``skip_first`` once, then cycles of ``wait``,
            ``warmup`` and ``active``; ``repeat`` cycles, 0 for as many as there are. Without it, everything.
        on_trace_ready: called with the profiler each time a trace is finished.
        record_shapes: shapes of the operators' inputs.
        profile_memory: memory taken and given back by operators.
        with_stack: source lines.
        with_flops: floating point operations of matrix products and convolutions.
        with_modules: the module that an operator was called from.
        output_trace_dir: where each process writes its trace; see `Accelerator.profile`.

    Raises:
        ValueError: an unknown activity, or a schedule with unknown or missing keys.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self, *ready: Callable[[torch.profiler.profile], Any]) -> torch.profiler.profile:
        """Return the profiler. *ready* are called when a trace is finished, before ``on_trace_ready``."""
        import torch

        callbacks = [*ready, *([] if self.on_trace_ready is None else [self.on_trace_ready])]

        def finished(profiler: torch.profiler.profile) -> None:
            for callback in callbacks:
                callback(profiler)

        return torch.profiler.profile(
            activities=None if self.activities is None else _activities(self.activities),
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=finished if callbacks else None,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _check_schedule(option: dict[str, int]) -> None:
    unknown = [key for key in option if key not in (*_SCHEDULE, *_SCHEDULE_OPTIONAL)]
    missing = [key for key in _SCHEDULE if key not in option]
    if unknown or missing:
        problem = f"unknown key {unknown[0]!r}" if unknown else f"{', '.join(missing)} missing"
        raise ValueError(
            f"ProfileKwargs: schedule_option: {problem}; it takes wait, warmup, active and, if wanted, "
            f"{', '.join(_SCHEDULE_OPTIONAL)}"
        )


def _activities(names: Sequence[Any]) -> list[Any]:
    from torch.profiler import ProfilerActivity

    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    activities = []
    for name in names:
        activity = known.get(name.lower()) if isinstance(name, str) else name
        if not isinstance(activity, ProfilerActivity):
            raise ValueError(f"ProfileKwargs: unknown activity {name!r}; this torch has {', '.join(known)}")
        activities.append(activity)
    return list(dict.fromkeys(activities))
