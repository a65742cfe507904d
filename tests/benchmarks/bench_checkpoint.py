"""save_state and load_state of 480 MB against writing (with fsync) and reading the same bytes; one process.

``stall`` is how long ``save_state(block=False)`` holds training up, against one memcpy of the state into memory that is
there already; ``first stall`` the same for the first one of a run, which gets its memory, against a memcpy into fresh
memory.

    python tests/benchmarks/bench_checkpoint.py [directory]

The pairs take turns; the median of their ratios is compared. Budgets: save 1.1, load 1.3 with the files in the page
cache and 1.15 without, stall 1.5.

Loading verifies all bytes before it touches anything (the row without a budget), and then the bytes go to their places,
in threads. A plain read of cached files runs at the speed of memory, so these two passes are the floor.

``memory`` is how far the memory of a process (mapped files included) rises over what it had before, at the peak of a
save or a load of the state that it holds already.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import Row, report

from orc.runtime import Accelerator
from orc.runtime.checkpoint.format.layout import content_problems, read_manifest

ROUNDS = 7
BUDGETS = {"save": 1.1, "load": 1.3, "cold load": 1.15, "stall": 1.5, "first stall": 1.5}
MEGABYTES = 480


def plain_write(directory: Path, data: memoryview) -> float:
    """Seconds to write *data* to a file and bring it to disk."""
    began = time.perf_counter()
    with (directory / "plain").open("wb", buffering=0) as file:
        at = 0
        while at < len(data):
            at += file.write(data[at:])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def plain_read(directory: Path, buffer: memoryview) -> float:
    """Seconds to read it back into memory that is there already."""
    began = time.perf_counter()
    with (directory / "plain").open("rb", buffering=0) as file:
        at = 0
        while count := file.readinto(buffer[at:]):
            at += count
    return time.perf_counter() - began


def drop(*files: Path) -> None:
    """Take *files*, which are on disk, out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def resident(which: str) -> float:
    """Megabytes of memory that this process has (``VmRSS``) or had at its peak (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024 / 1e6


def rise(action: Any, *args: Any) -> float:
    """Megabytes that ``action(*args)`` adds to the memory of this process at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    action(*args)
    return resident("VmHWM") - before


def timed(action: Any, *args: Any) -> float:
    """Seconds of ``action(*args)``."""
    began = time.perf_counter()
    action(*args)
    return time.perf_counter() - began


def timed_after(accelerator: Accelerator, target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of a memcpy, when the background is quiet again."""
    accelerator.wait_for_checkpoint()
    return timed(target.copy_, source)


def stepped() -> Accelerator:
    """The Accelerator of a run that has stepped once."""
    torch.set_num_threads(1)  # as launched jobs have it, also when run by itself
    # A model and Adam's two moments: a third of the bytes each.
    model = torch.nn.ModuleList(torch.nn.Linear(2000, 2000, bias=False) for _ in range(MEGABYTES // 48))
    optimizer = torch.optim.Adam(model.parameters())
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


def memory(directory: Path) -> None:
    """Print what saving and loading add to the memory of this process."""
    accelerator = stepped()
    accelerator.save_state(directory)  # imports what it needs
    accelerator.load_state(directory)
    print(rise(accelerator.save_state, directory), rise(accelerator.load_state, directory))


def main(directory: Path) -> None:
    """Measure and print."""
    accelerator = stepped()
    state = directory / "state"
    accelerator.save_state(state)
    size = sum(file.stat().st_size for file in state.iterdir())
    data = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))
    saves, loads, cold, floors, stalls, first = [], [], [], [], [], []
    manifest = read_manifest(state)
    source = torch.frombuffer(data, dtype=torch.uint8)
    there = torch.zeros_like(source)
    began = time.perf_counter()
    accelerator.save_state(state, block=False)
    stall = time.perf_counter() - began
    accelerator.wait_for_checkpoint()
    first.append((stall, timed(source.clone)))
    for _ in range(ROUNDS):
        stalls.append(
            (timed(lambda: accelerator.save_state(state, block=False)), timed_after(accelerator, there, source))
        )
        written = plain_write(directory, data)
        saves.append((timed(accelerator.save_state, state), written))
        read = plain_read(directory, data)
        loads.append((timed(accelerator.load_state, state), read))
        drop(directory / "plain", *state.iterdir())
        read = plain_read(directory, data)
        cold.append((timed(accelerator.load_state, state), read))
        read = plain_read(directory, data)
        floors.append((timed(content_problems, state, manifest, list(manifest.files)), read))
    rows = []
    compared = (
        ("save", f"save_state of {size / 1e6:.0f} MB", saves, "write and fsync"),
        ("load", f"load_state of {size / 1e6:.0f} MB", loads, "read"),
        ("cold load", "load_state from disk", cold, "read from disk"),
        ("floor", "verify, in threads", floors, "read"),
        ("stall", "stall of block=False", stalls, "memcpy"),
        ("first stall", "the first one of a run", first, "memcpy to fresh memory"),
    )
    for name, what, pairs, peer in compared:
        ratio = statistics.median(ours / plain for ours, plain in pairs)
        ours, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append(Row(what, peer, ours, plain, "s", ratio, BUDGETS.get(name)))
    # A process of its own: this one has memory from before that it can use again.
    done = subprocess.run([sys.executable, __file__, "--memory", str(state)], stdout=subprocess.PIPE, check=True)
    for what, megabytes in zip(("save_state", "load_state"), map(float, done.stdout.split()), strict=True):
        ratio = megabytes / (size / 1e6)
        rows.append(Row(f"{what}, memory over the state", "state", megabytes, size / 1e6, "MB", ratio, 0.1))
    report(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        memory(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
