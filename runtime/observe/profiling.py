"""torch's profiler, and a trace file per process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    import torch

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import ProfileKwargs
    from orc.runtime.core.options import Options

TRACE_FILE = "profile_{suffix}.json"


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
    """The part of the Accelerator that profiles, by its *options* unless others are given."""

    def __init__(self, ctx: RunContext, options: Options) -> None:
        self.ctx = ctx
        self.options = options

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """A block that is profiled; gives torch's profiler, whose ``step()`` moves a schedule on.

        With ``output_trace_dir``, each process writes ``profile_<rank>.json`` there, a Chrome trace; all processes
        must then enter the block, and leave it when all files are written.

        Args:
            profile_handler: options for this block, instead of those of the Accelerator.
        """
        handler = profile_handler or self.options.profile
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
