"""Windows of the meter as JSON lines: every rank measures its own, rank 0 writes one line for all of them.

Runs on the watch thread. The ranks' windows meet on the run's store; they are of the same length but not aligned.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orc.runtime.logging import get_logger
from orc.runtime.observe.device import MEMORY, device_memory, note_memory
from orc.runtime.observe.flops import peak_tflops
from orc.runtime.observe.meter import Meter

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.store import Store
    from orc.runtime.train.engine import Engine

FILE = "metrics.jsonl"
RANKS_FILE = "ranks.json"  # the newest window of each rank
# The first window is short, so that a run shows a curve soon; each is longer than the one before, up to the interval.
FIRST_WINDOW_S = 1.0
WINDOW_GROWTH = 1.5
Window = dict[str, Any]


class Reporter:
    """Writes a line to *path* about every *interval_s* seconds in which steps were taken, at first more often.

    Args:
        context: of the run.
        meter: what to report of.
        path: the file, on rank 0; `None` on the other ranks.
        interval_s: seconds between lines; the first ones come `FIRST_WINDOW_S` and then ever longer apart.
        peak: TFLOP/s of one device, for MFU.
    """

    def __init__(
        self, context: RunContext, meter: Meter, path: Path | None, interval_s: float, peak: float | None = None
    ) -> None:
        self.context = context
        self.meter = meter
        self.path = path
        self.interval_s = interval_s
        self.peak = peak
        self.extra: Callable[[], Mapping[str, float]] | None = None  # more to report, from whoever has it
        self._windows: dict[int, Window] = {}
        self._from = self._totals()
        self._step = 0
        self._window_s = min(FIRST_WINDOW_S, interval_s)
        self._due = time.monotonic() + self._window_s
        self._waiting = False

    @classmethod
    def of(cls, context: RunContext) -> Reporter:
        """From the configuration. The file is in the job directory, or else in the current one."""
        config = context.config
        path = Path(context.env.job.job_dir or ".") / FILE if context.is_main else None
        peak = peak_tflops(context.device, config.peak_tflops)
        return cls(context, Meter(), path, config.metrics_interval_s, peak)

    def listen(self, engine: Engine) -> None:
        """Read the loss when it has gone backward, and count FLOPs unless a prepared model is compiled."""
        meter, prepared = self.meter, engine.prepared
        meter.may_count = lambda: not any(_compiled(model) for model in prepared.models)
        if self.context.device.type == "cuda" and self.path is not None:
            from orc.runtime.observe.loss import LossReader

            meter.loss_reader = LossReader()
        if self.context.device.type in ("cpu", "cuda"):  # elsewhere a value read from another thread may start work
            engine.events.subscribe("on_backward", meter.note_loss)

    def poll(self, step: int, store: Store | None = None, prefix: str = "") -> None:
        """Called often; does something when a window is full, and on rank 0 when the others' have arrived."""
        self._step = step
        if self.meter.loss_reader is not None:
            self.meter.loss_reader.wanted = True  # so that the next line has one that is not old
        if self._waiting and store is not None:
            self._waiting = False
            self._collect(store, prefix)
            self._write()
        if time.monotonic() < self._due:
            return
        measured = self._measure()
        if measured:
            self._window_s = min(self._window_s * WINDOW_GROWTH, self.interval_s)
        self._due = time.monotonic() + self._window_s
        if not measured:
            return
        if store is not None:
            store.set(f"{prefix}/window/{self.context.rank}", json.dumps(self._windows[self.context.rank]))
            self._waiting = self.context.is_main  # the others' windows end at about the same time: take them next time
        else:
            self._write()

    def finish(self, step: int) -> None:
        """Write what is left, at *step*; a run shorter than a window gets its line here."""
        self._step = step
        if self._measure() or self._waiting:
            self._waiting = False
            self._write(last=True)

    def _totals(self) -> tuple[float, ...]:
        meter = self.meter
        return meter.steps, meter.busy_s, meter.waited_s, meter.samples, meter.tokens, meter.other_s, time.monotonic()

    def _measure(self) -> bool:
        """Close this rank's window; whether a step was taken in it."""
        totals, before = self._totals(), self._from
        steps, busy, waited, samples, tokens, other, wall = (
            now - then for now, then in zip(totals, before, strict=True)
        )
        if not steps or busy <= 0:
            return False
        self._from = totals
        meter = self.meter
        slowest, meter.slowest_s = meter.slowest_s, 0.0
        step_s = busy / steps
        memory = device_memory(self.context.device)
        note_memory(self.context, memory)
        self._windows[self.context.rank] = {
            "step": self._step,
            "steps": int(steps),
            "window_s": wall,
            "step_s": step_s,
            "slowest_step_s": slowest,
            "samples_per_s": samples / busy,
            "tokens_per_s": tokens / busy,
            "data_wait": waited / busy,
            "other_s": other,
            "tflops": meter.flops / step_s / 1e12 if meter.flops else None,
            **memory,
        }
        return True

    def _collect(self, store: Store, prefix: str) -> None:
        for rank in range(self.context.world_size):
            key = f"{prefix}/window/{rank}"
            if rank != self.context.rank and store.check([key]):
                self._windows[rank] = json.loads(store.get(key))

    def _write(self, last: bool = False) -> None:
        if self.path is None:
            return
        job = self.context.env.job
        line: dict[str, Any] = {
            "at": time.time(),
            "attempt": job.attempt,
            "restart": job.restart,
            "step": self._step,
            "epoch": self.meter.epoch,
            "world_size": self.context.world_size,
            **combine(self._windows, self.context.rank, self.peak, self.context.topology.peers),
        }
        loss = self._loss(last)
        if loss is not None:
            line["loss"] = self.meter.told_loss = loss
        if self.extra is not None:
            line.update(self.extra())
        text = json.dumps({name: _short(value) for name, value in line.items()}) + "\n"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, text.encode())  # one write: readers never see half a line
            finally:
                os.close(fd)
            self._write_ranks(self.path.with_name(RANKS_FILE))
        except OSError as error:
            self.path = None  # training is worth more than telling about it
            get_logger(__name__).warning(f"metrics are not written any more: {error}")

    def _write_ranks(self, path: Path) -> None:
        """Write how each rank gets on, in place of what was written before; one rank alone is in the metrics."""
        if len(self._windows) < 2:
            return
        job = self.context.env.job
        ranks = {
            rank: {name: _short(window[name]) for name in ("step", "step_s", "data_wait")}
            for rank, window in sorted(self._windows.items())
        }
        content = {"at": time.time(), "attempt": job.attempt, "restart": job.restart, "ranks": ranks}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    def _loss(self, last: bool) -> float | None:
        """The last loss that is known on the host; of the *last* line the last one, which is waited for."""
        loss, reader = self.meter.loss, self.meter.loss_reader
        value = None if reader is None else reader.value
        # What a compiled model returns may live in a buffer that the next step overwrites.
        if (last or reader is None) and loss is not None and loss.numel() == 1 and self.meter.may_count():
            value = float(loss)
        return value if value is not None and value - value == 0 else None  # JSON has neither NaN nor infinity


def combine(windows: Mapping[int, Window], own: int, peak: float | None, peers: int = 1) -> dict[str, Any]:
    """Return the measurements of one line from the windows of the ranks: sums, means, and the spread between ranks.

    Every *peers* ranks have one batch, whose tokens count once.
    """
    ranks = sorted(windows)
    times = {rank: windows[rank]["step_s"] for rank in ranks}
    tflops = [windows[rank]["tflops"] for rank in ranks if windows[rank]["tflops"]]
    mean_tflops = statistics.fmean(tflops) if tflops else None
    waits = [windows[rank]["data_wait"] for rank in ranks]
    # Ranks that synchronise every step all take as long as the slowest: then the one that waits for data longest is it.
    apart = max(times.values()) > 1.1 * min(times.values())
    slowest = max(ranks, key=lambda rank: times[rank] if apart else windows[rank]["data_wait"])
    return {
        "steps": windows[own]["steps"],
        "window_s": windows[own]["window_s"],
        "step_s": statistics.fmean(times.values()),
        "step_s_min": min(times.values()),
        "step_s_max": max(times.values()),
        "slowest_step_s": max(windows[rank]["slowest_step_s"] for rank in ranks),
        "slowest_rank": slowest,
        "samples_per_s": windows[own]["samples_per_s"],
        "tokens_per_s": sum(windows[rank]["tokens_per_s"] for rank in ranks) / peers or None,
        "data_wait": statistics.fmean(waits),
        "data_wait_max": max(waits),
        "other_s": windows[own]["other_s"],
        "tflops": mean_tflops,
        "mfu": mean_tflops / peak if mean_tflops is not None and peak else None,
        **{name: max(windows[rank].get(name, 0) for rank in ranks) for name in MEMORY if name in windows[own]},
        "ranks": len(ranks),
    }


def _compiled(model: nn.Module) -> bool:
    # Counting would run it uncompiled once, which may need more memory than there is.
    from orc.runtime.compat.objects import has_compiled_regions, is_compiled_module

    return is_compiled_module(model) or has_compiled_regions(model)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and value < 1e8 else value
