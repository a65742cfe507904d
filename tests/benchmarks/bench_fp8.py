"""Cost and losses of training in fp8 through orc, and by hand with torchao: alone, with DDP and with FSDP.

    python tests/benchmarks/bench_fp8.py [turns]

The published examples of fp8 compare a framework's training with the library's own. This does the same for the back
end ``ao``: one process, two copies (DDP) and two shards (FSDP2) train the same model both ways, which take turns one
step at a time. The figures are the median over turns of the slower rank's step, and the largest difference of the
losses. With GPUs each rank has one; without, torchao emulates fp8 on the CPU over gloo, where times say what
orc adds, not what fp8 gains. Budget: 1.02 x the step by hand; the losses are the same.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, report
from torch import nn

from orc.runtime import Accelerator, AORecipeKwargs, FullyShardedDataParallelPlugin
from orc.runtime.testing import run_ranks

TURNS, BUDGET = 40, 1.02
WIDTH, LAYERS, ROWS = 512, 4, 64
Step = Callable[[], float]


def made(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(device)


def step_of(model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any], device: torch.device) -> Step:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(inputs).float().square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def ours(way: str) -> tuple[Step, torch.device]:
    """Step of a script with an Accelerator."""
    options: dict[str, Any] = {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs()]}
    if way == "FSDP":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), **options)
    given = made(accelerator.device)
    model, optimizer = accelerator.prepare(given, torch.optim.AdamW(given.parameters(), lr=1e-4))
    return step_of(model, optimizer, accelerator.backward, accelerator.device), accelerator.device


def by_hand(way: str, device: torch.device) -> Step:
    """Step of torchao and torch alone, with the layers that the documentation of torchao would convert."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = [str(index) for index, layer in enumerate(made(device)) if isinstance(layer, nn.Linear)]
    first_and_last = {names[0], names[-1]}
    # Emulated where there is no tensor core for it, as orc does.
    config = Float8LinearConfig(emulate=device.type == "cpu")
    model: Any = convert_to_float8_training(
        made(device), config=config, module_filter_fn=lambda _, name: name not in first_and_last
    )
    if way == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    if way == "FSDP":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # as the plug-in
    return step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4), lambda loss: loss.backward(), device)


def measured(way: str, turns: int) -> tuple[list[float], list[float], float]:
    """Times of both on this rank, and how far their losses are apart."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mine, device = ours(way)
    steps = [mine, by_hand(way, device)]
    times: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for which in (0, 1) if turn % 2 else (1, 0):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            began = time.perf_counter()
            losses[which].append(steps[which]())
            if turn >= 3:
                times[which].append(time.perf_counter() - began)
    return times[0], times[1], max(abs(one - two) for one, two in zip(*losses, strict=True))


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    rows = []
    for way, count in (("alone", 1), ("DDP", 2), ("FSDP", 2)):
        if torch.cuda.is_available() and torch.cuda.device_count() < count:
            continue
        ranks = run_ranks(count, measured, way, turns, timeout_s=400)
        mine, theirs = ([max(pair) for pair in zip(*(rank[i] for rank in ranks), strict=True)] for i in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        slow, fast = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
        rows.append(Row(f"step in fp8, {way}", "torchao by hand", slow, fast, "ms", ratio, BUDGET))
        apart = max(rank[2] for rank in ranks)
        rows.append(Row(f"loss in fp8, {way}: apart", "torchao by hand", apart, None, "", None, 1e-3, "ours"))
    report(rows)


if __name__ == "__main__":
    main()
