"""What the prepared loop costs over the same loop written by hand, in one process on the CPU.

    python tests/benchmarks/bench_runtime_loop.py

Raw and prepared loops take turns; each figure is the median over turns of the difference per step. The model is tiny,
so that the loop is nearly all overhead. Where Accelerate is installed (extra `bench`) its loop takes turns too.
Budgets (microseconds per step): 5 plain, 10 with clipping, 10 with accumulation, clipping, scheduler and bf16. Where
other programs run on the same cores, ``--cpu-time`` compares the processor time of the thread instead of the clock.
Last: what watching adds to the plain loop. ``metrics`` has the watchdog too; ``warn`` and ``skip`` guard from spikes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from functools import partial

import torch
from harness import Row, report
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import orc.runtime.state
from orc.runtime.core.context import reset_default

STEPS, TURNS = 40, 400
WATCHING = {
    "metrics": {"ORC_METRICS": "yes", "ORC_STALL_TIMEOUT_S": "600"},
    "warn": {"ORC_SPIKE_ACTION": "warn"},
    "skip": {"ORC_SPIKE_ACTION": "skip"},
}


def parts():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1.0)


def raw_plain(inputs, clip=False):
    model, optimizer, _ = parts()

    def run():
        for x in inputs:
            model(x).sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def prepared_plain(inputs, library=orc.runtime, clip=False):
    library.state.AcceleratorState._reset_state(True)
    accelerator = library.Accelerator(cpu=True)
    model, optimizer, _ = accelerator.prepare(*parts())

    def run():
        for x in inputs:
            accelerator.backward(model(x).sum())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def watched(settings):
    """The plain loop of a run that these variables watch."""

    def loop(inputs):
        os.environ.update(settings)
        reset_default()
        try:
            return prepared_plain(inputs)
        finally:
            for name in settings:
                del os.environ[name]

    return loop


def raw_full(inputs):
    model, optimizer, scheduler = parts()

    def run():
        for index, x in enumerate(inputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
            (output.float().sum() / 2).backward()
            if (index + 1) % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def prepared_full(inputs, library=orc.runtime):
    library.state.AcceleratorState._reset_state(True)
    accelerator = library.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, optimizer, scheduler = accelerator.prepare(*parts())

    def run():
        for x in inputs:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def measure(loops, steps: int = STEPS, turns: int = TURNS) -> dict[str, float]:
    """Median microseconds per step of the loop called raw, and of the differences of the others from it."""
    inputs = [torch.randn(2, 4) for _ in range(steps)]
    times: dict[str, list[float]] = {name: [] for name in loops}
    runs = {name: loop(inputs) for name, loop in loops.items()}
    clock = time.thread_time if "--cpu-time" in sys.argv else time.perf_counter
    for turn in range(turns + 2):
        for name, run in runs.items():
            started = clock()
            run()
            if turn >= 2:
                times[name].append((clock() - started) / steps * 1e6)
    raw = times.pop("raw")
    over = {name: statistics.median(b - a for a, b in zip(raw, own, strict=True)) for name, own in times.items()}
    return {"raw": statistics.median(raw), **over}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for what, raw, prepared, budget in (
        ("step over a raw loop, plain", raw_plain, prepared_plain, 5),
        (
            "step over a raw loop, clip_grad_norm_",
            partial(raw_plain, clip=True),
            partial(prepared_plain, clip=True),
            10,
        ),
        ("step over a raw loop, accumulate+clip+scheduler+bf16", raw_full, prepared_full, 10),
    ):
        measured = measure({"raw": raw, "orc": prepared})
        rows.append(Row(what, "raw loop", measured["orc"], measured["raw"], "µs", None, budget, "ours"))
        if importlib.util.find_spec("accelerate"):
            import accelerate

            theirs = measure({"raw": raw, "accelerate": lambda x, make=prepared: make(x, accelerate)})["accelerate"]
            rows.append(Row(what, "accelerate", measured["orc"], theirs, "µs", measured["orc"] / theirs, None))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        measured = measure({"raw": watched({}), **{name: watched(own) for name, own in WATCHING.items()}}, 200, 60)
        off = measured.pop("raw")
        rows += [
            Row(f"watching a step, {n}", "prepared loop", over, off, "µs", None, None) for n, over in measured.items()
        ]
    report(rows)


if __name__ == "__main__":
    main()
