"""What watching a run costs per step, over the same prepared loop with everything off; one process on the CPU.

Run: ``python tests/benchmarks/bench_watching.py``. Loops take turns; each figure is the median over turns of the
difference in microseconds per step. The model is tiny, so that the loop is nearly all overhead. ``metrics`` includes
the watchdog, whose share is nothing on the training thread; ``warn`` and ``skip`` are the spike guard's.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
from harness import Row, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, AcceleratorState

STEPS, TURNS = 200, 60
SETTINGS = {
    "off": {},
    "metrics": {"ORC_METRICS": "yes", "ORC_STALL_TIMEOUT_S": "600"},
    "warn": {"ORC_SPIKE_ACTION": "warn"},
    "skip": {"ORC_SPIKE_ACTION": "skip"},
}


def loop(settings: dict[str, str]):
    """The prepared loop under *settings*: a function that makes one pass."""
    os.environ.update(settings)
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(2 * STEPS, 4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), data)
    for name in settings:
        del os.environ[name]

    def run():
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    from orc.runtime.core.context import reset_default

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        runs = {}
        for name, settings in SETTINGS.items():
            reset_default()
            runs[name] = loop(settings)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(TURNS + 2):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                if turn >= 2:
                    times[name].append((time.perf_counter() - started) / STEPS * 1e6)
        off = statistics.median(times["off"])
        rows = []
        for name in list(runs)[1:]:
            over = statistics.median(b - a for a, b in zip(times["off"], times[name], strict=True))
            rows.append(Row(f"watching a step, {name}", "prepared loop", over, off, "µs", None, None))
        report(rows)
        os.chdir("/")


if __name__ == "__main__":
    main()
