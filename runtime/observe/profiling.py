"""torch's profiler with documented options, and a trace file per process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.core.handlers import KwargsHandler

if TYPE_CHECKING:
    import os

    import torch

    from orc.runtime.core.context import RunContext

_SCHEDULE = ("wait", "warmup", "active")
_SCHEDULE_OPTIONAL = ("repeat", "skip_first", "skip_first_wait")
TRACE_FILE = "profile_{suffix}.json"


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
        """The profiler. *ready* are called when a trace is finished, before ``on_trace_ready``."""
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
    found = []
    for name in names:
        activity = known.get(name.lower()) if isinstance(name, str) else name
        if not isinstance(activity, ProfilerActivity):
            raise ValueError(f"ProfileKwargs: unknown activity {name!r}; this torch has {', '.join(known)}")
        found.append(activity)
    return list(dict.fromkeys(found))


class Traces:
    """The trace files of one process, one per finished recording.

    The latest is ``profile_<rank>.json``; with a schedule of several cycles the earlier ones are
    ``profile_<rank>_cycle<n>.json``.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.folder, self.rank = Path(folder), rank
        self.written = 0

    def write(self, profiler: torch.profiler.profile) -> None:
        """Write the recording that *profiler* has just finished; the file appears complete or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / TRACE_FILE.format(suffix=self.rank)
        part = path.with_suffix(".json.tmp")
        type(profiler).export_chrome_trace(profiler, str(part))
        if self.written:
            path.replace(self.folder / TRACE_FILE.format(suffix=f"{self.rank}_cycle{self.written - 1}"))
        part.replace(path)
        self.written += 1
        # torch can write a recording only once; a script's own callback gets a copy.
        profiler.export_chrome_trace = functools.partial(_copy, path)  # type: ignore[method-assign]


def _copy(source: Path, path: str, *args: Any, **kwargs: Any) -> None:
    import gzip

    data = source.read_bytes()
    Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)


class Profiling:
    """The part of the Accelerator that profiles."""

    def __init__(self, ctx: RunContext, profile_handler: ProfileKwargs) -> None:
        self.ctx = ctx
        self.profile_handler = profile_handler

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """A block that is profiled; gives torch's profiler, whose ``step()`` moves a schedule on.

        With ``output_trace_dir``, each process writes ``profile_<rank>.json`` there, a Chrome trace; all processes
        must then enter the block, and leave it when all files are written.

        Args:
            profile_handler: options for this block, instead of those of the Accelerator.
        """
        handler = profile_handler or self.profile_handler
        if handler.output_trace_dir is None:
            with handler.build() as profiler:
                yield profiler
            return
        traces = Traces(handler.output_trace_dir, self.ctx.rank)
        with handler.build(traces.write) as profiler:
            yield profiler
        if not traces.written:
            from orc.runtime.logging import get_logger

            get_logger(__name__).warning(
                "profile: nothing was recorded, so no trace was written: the block ended before the schedule's first "
                "recording was complete"
            )
        self.ctx.barrier()
