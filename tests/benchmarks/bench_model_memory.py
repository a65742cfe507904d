"""Peak memory of loading a model and of a forward: whole, half on the disk, in eight and in four bits.

    python tests/benchmarks/bench_model_memory.py [MEBIBYTES]

Each case runs in a process of its own. ``own`` is memory that the process has to have (anonymous pages); ``with file``
has the pages of the mapped checkpoint too, which the system takes back when it needs them. The peer is the model read
into memory in float32. With a GPU its peak is printed as well.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from harness import Row, report
from safetensors.torch import load_file, save_file
from torch import nn

import orc.runtime as ours

LAYERS = 16
HALF = {str(layer): "cpu" if layer < LAYERS // 2 else "disk" for layer in range(LAYERS)}
# To four bits bitsandbytes takes about ten times a weight for a moment on the CPU, which is more the larger layers are.
BUDGETS = {"whole on the CPU": 0.1, "half on the disk": 0.1, "8 bits": 0.45, "4 bits": None, "torchao int8": 0.45}


def empty(width: int) -> nn.Module:
    """A model of linear layers on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def cases(width: int, file: str) -> dict[str, Callable[[], nn.Module]]:
    """The ways to load the model in *file*."""

    def read() -> nn.Module:
        model = empty(width)
        model.load_state_dict({name: value.clone() for name, value in load_file(file).items()}, assign=True)
        return model

    def quantized(config: object) -> Callable[[], nn.Module]:
        return lambda: ours.load_and_quantize_model(empty(width), config, file)  # type: ignore[arg-type]

    return {
        "read in float32": read,
        "whole on the CPU": lambda: ours.load_checkpoint_and_dispatch(empty(width), file, device_map={"": "cpu"}),
        "half on the disk": lambda: ours.load_checkpoint_and_dispatch(empty(width), file, device_map=HALF),
        "8 bits": quantized(ours.BnbQuantizationConfig(load_in_8bit=True, torch_dtype="bf16")),
        "4 bits": quantized(ours.BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")),
        "torchao int8": quantized(ours.TorchAoQuantizationConfig()),
    }


def memory(name: str) -> float:
    """Mebibytes of *name* in this process's status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def peaks(action: Callable[[], object]) -> tuple[object, float, float]:
    """The result of *action*, and how far own memory, and memory with file pages, rose meanwhile."""
    done, own = threading.Event(), [memory("RssAnon")]

    def watch() -> None:
        while not done.wait(0.002):
            own.append(memory("RssAnon"))

    Path("/proc/self/clear_refs").write_text("5")
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    result = action()
    done.set()
    thread.join()
    return result, max(own), memory("VmHWM")


def measure(load: Callable[[], nn.Module], width: int) -> list[float]:
    """Peaks over the start: own and with file, of loading and of a forward."""
    before = memory("RssAnon"), memory("VmRSS")
    model, *loading = peaks(load)
    assert isinstance(model, nn.Module)
    dtype = torch.float32 if next(model.parameters()).dtype == torch.float32 else torch.bfloat16
    with torch.no_grad():
        _, *forward = peaks(lambda: model(torch.randn(8, width).to(dtype)))
    return [peak - start for peak, start in zip([*loading, *forward], [*before, *before], strict=True)]


def in_process(load: Callable[[], nn.Module], width: int) -> list[float]:
    """What `measure` says in a fork of this process, which has imported everything already."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writing, json.dumps(measure(load, width)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found: list[float] = json.loads(pipe.read())
    os.wait()
    return found


def main() -> None:
    """Measure and print."""
    size = float(sys.argv[1]) if len(sys.argv) > 1 else 256
    width = int((size * 2**20 / 4 / LAYERS) ** 0.5) // 64 * 64
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says at each forward that int8 computes in float16
    torch.set_num_threads(1)  # threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.safetensors"
        save_file({f"{layer}.weight": torch.randn(width, width) for layer in range(LAYERS)}, file, {"format": "pt"})
        found = cases(width, file)
        for config in ("8 bits", "4 bits", "torchao int8"):  # their libraries, at a size that does not count
            small = f"{folder}/small.safetensors"
            save_file({f"{layer}.weight": torch.randn(32, 32) for layer in range(LAYERS)}, small, {"format": "pt"})
            cases(32, small)[config]()
        rows, whole = [], 0.0
        for name, load in found.items():
            load_own, load_file_pages, run_own, run_file_pages = in_process(load, width)
            whole = whole or max(load_own, run_own)
            print(
                f"{name:18} load {load_own:6.0f} MiB own, {load_file_pages:6.0f} with file; "
                f"forward {run_own:6.0f} own, {run_file_pages:6.0f} with file"
            )
            if name in BUDGETS:
                peak = max(load_own, run_own)
                rows.append(Row(f"peak: {name}", "read in float32", peak, whole, "MiB", peak / whole, BUDGETS[name]))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            model = ours.load_checkpoint_and_dispatch(
                empty(width), file, device_map={name: 0 if place == "cpu" else "cpu" for name, place in HALF.items()}
            )
            model(torch.randn(8, width))
            print(f"half on the GPU, half on the CPU: {torch.cuda.max_memory_allocated() >> 20} MiB on the GPU")
    report(rows)


if __name__ == "__main__":
    main()
