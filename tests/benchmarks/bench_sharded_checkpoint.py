"""save_state and load_state of a sharded model of 240 MB on 2 ranks against torch.distributed.checkpoint by itself.

    python tests/benchmarks/bench_sharded_checkpoint.py [directory]

The pairs take turns; the median of their ratios is compared, of the slower rank. Budget: 1.1 for both. torch writes and
reads model and optimizer as scripts do it by hand, with files brought to disk, but without checksums, manifest, random
states and the check of every byte before anything changes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Row, on_ranks, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from orc.runtime import Accelerator
from orc.runtime.utils import broadcast_object_list

ROUNDS = 5
BUDGET = 1.1
LAYERS = 5  # of 16 MB, and twice that for Adam's moments


def timed(action: Any, *args: Any) -> float:
    """Seconds of ``action(*args)`` on the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    action(*args)
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def main(root: Path | None) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    [text] = broadcast_object_list([str(root or tempfile.mkdtemp())])
    directory = Path(text)
    model = torch.nn.Sequential(*(torch.nn.Linear(2000, 2000, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2000)).sum())
    optimizer.step()
    optimizer.zero_grad()
    bare = optimizer.optimizer

    def save_raw() -> None:
        weights, state = get_state_dict(model, bare)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory / "raw")

    def load_raw() -> None:
        weights, state = get_state_dict(model, bare)
        both = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=directory / "raw")
        set_state_dict(model, bare, model_state_dict=weights, optim_state_dict=both["optimizer"])

    ours = directory / "ours"
    save_raw()
    accelerator.save_state(ours)
    saves, loads, stalls = [], [], []
    for _ in range(ROUNDS):
        saves.append((timed(accelerator.save_state, ours), timed(save_raw)))
        loads.append((timed(accelerator.load_state, ours), timed(load_raw)))
        stalls.append((timed(lambda: accelerator.save_state(ours, block=False)), saves[-1][1]))
        accelerator.wait_for_checkpoint()
    size = sum(file.stat().st_size for file in ours.rglob("*") if file.is_file())
    rows = []
    for what, pairs, budget in (("save_state", saves, BUDGET), ("load_state", loads, BUDGET), ("stall", stalls, None)):
        ratio = statistics.median(mine / raw for mine, raw in pairs)
        mine, raw = (statistics.median(column) for column in zip(*pairs, strict=True))
        peer = "dcp.load" if what == "load_state" else "dcp.save"
        rows.append(Row(f"{what} of {size / 1e6:.0f} MB in shards", peer, mine, raw, "s", ratio, budget))
    if accelerator.is_main_process:
        report(rows)
        if root is None:
            shutil.rmtree(directory)
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    on_ranks(2)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
