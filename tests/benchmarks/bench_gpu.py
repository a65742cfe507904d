"""Training on one GPU beside the same loop by hand, and beside Accelerate where that is installed.

    python tests/benchmarks/bench_gpu.py

The tiny model shows what a step costs on the host, the transformer what users see: batches come from a loader with
pinned memory, and the losses are read once at the end. Without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import torch
from harness import Row, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orc.runtime.state

TURNS = 9


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


class Transformer(nn.Module):
    """Six layers of width 1024 over sequences of 512 tokens: 84 million parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8192, 1024)
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(self.words(x))


SIZES = {  # model, samples of one batch, steps
    "tiny": (tiny, (64, 64), 100),
    "transformer": (Transformer, (16, 512), 12),
}


def loader(shape, steps):
    data = torch.randn(4 * shape[0], *shape[1:]) if shape[1] == 64 else torch.randint(8192, (4 * shape[0], *shape[1:]))
    rows = [index % len(data) for index in range(steps * shape[0])]
    return DataLoader(TensorDataset(data), batch_size=shape[0], sampler=rows, pin_memory=True)


def by_hand(size, precision):
    make, shape, steps = SIZES[size]
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    batches = loader(shape, steps)

    def run():
        for (x,) in batches:
            x = x.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                output = model(x)
            scaler.scale(output.float().square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return run


def prepared(size, precision, library):
    make, shape, steps = SIZES[size]
    library.state.AcceleratorState._reset_state(True)
    accelerator = library.Accelerator(mixed_precision=precision)
    model = make()
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader(shape, steps))

    def run():
        for (x,) in batches:
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure(size, precision, libraries):
    """Microseconds per step of each loop, medians of turns."""
    steps = SIZES[size][2]
    loops = {"by hand": by_hand(size, precision)}
    loops |= {name: prepared(size, precision, library) for name, library in libraries.items()}
    times = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, run in list(loops.items())[:: -1 if turn % 2 else 1]:
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn:
                times[name].append((time.perf_counter() - began) / steps * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def saving(directory):
    """Seconds that a step loop stands still for a checkpoint that is written beside it, and for one that is not."""
    orc.runtime.state.AcceleratorState._reset_state(True)
    accelerator = orc.runtime.Accelerator()
    model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
    model = accelerator.prepare(model)
    found = {}
    for name, block in (("first, beside", False), ("beside", False), ("waiting", True)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        accelerator.save_state(Path(directory, name.replace(", ", "-")), block=block)
        found[name] = time.perf_counter() - began
        accelerator.wait_for_checkpoint()
    return found


def main() -> None:
    if not torch.cuda.is_available():
        print("bench_gpu: no GPU here, nothing is measured")
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    libraries = {"orc": orc.runtime}
    if importlib.util.find_spec("accelerate"):
        import accelerate

        libraries["accelerate"] = accelerate
    rows = []
    for size, precision in (("tiny", "no"), ("tiny", "fp16"), ("transformer", "bf16"), ("transformer", "fp16")):
        found = measure(size, precision, libraries)
        ours = found.pop("orc")
        for peer, theirs in found.items():
            budget = 1.02 if size == "transformer" and peer == "by hand" else None
            rows.append(Row(f"{size}, {precision}: a step", peer, ours, theirs, "µs", ours / theirs, budget))
    with tempfile.TemporaryDirectory() as directory:
        stalls = saving(directory)
    for name in ("first, beside", "beside"):
        rows.append(
            Row(f"2 GiB saved {name}: stall", "waiting for it", stalls[name], stalls["waiting"], "s",
                stalls[name] / stalls["waiting"], None)
        )  # fmt: skip
    report(rows)


if __name__ == "__main__":
    main()
