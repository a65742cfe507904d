"""What a prepared step costs over the same step of a model made parallel by hand, on 2 gloo ranks of this machine.

    python tests/benchmarks/bench_parallel.py [turns]

Both models live in the same ranks and take turns, one step at a time; each figure is the median over turns of the
slower rank's time. Budget: 1.02 x the step by hand. A kind is a function that returns both steps; see `KINDS`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import Row, report
from torch import nn

from orc.runtime import Accelerator, ParallelismConfig, PipelineParallelConfig, TorchTensorParallelConfig
from orc.runtime.testing import run_ranks

TURNS, BUDGET = 60, 1.02
WIDTH, LAYERS = 512, 6
Step = Callable[[], object]


class Block(nn.Module):
    """Two layers of four times the width, with a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], None]) -> Step:
    batch = torch.randn(16, 64, WIDTH, generator=torch.Generator().manual_seed(1))

    def step() -> None:
        backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor() -> tuple[Step, Step, int, int]:
    """Tensor parallelism: both steps, the bytes of parameters that this rank keeps, and those of the whole model."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    handler = TorchTensorParallelConfig(plan={"*.up": "colwise", "*.down": "rowwise"})
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    whole = sum(one.nbytes for one in made()[0].parameters())
    model, optimizer = accelerator.prepare(*made())
    ours = step_of(model, optimizer, accelerator.backward)
    kept = sum(getattr(one, "to_local", lambda one=one: one)().nbytes for one in model.parameters())
    model, _ = made()
    mesh = accelerator.torch_device_mesh["tp"]
    model = parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    by_hand = step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda loss: loss.backward())
    return ours, by_hand, kept, whole


def stages(schedule: str) -> tuple[Step, Step, int, int]:
    """A pipeline, against torch.distributed.pipelining as its documentation has it, with an optimizer of the stage."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

    parts, middle = 4, str(LAYERS // 2)
    words, target = torch.randint(0, WIDTH, (2, 16, 64), generator=torch.Generator().manual_seed(1))

    def decoder() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    handler = PipelineParallelConfig(
        loss_fn=loss_fn, example_args=(words,), num_microbatches=parts, split_points=[middle], schedule=schedule
    )
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    whole, model = decoder(), decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    rank = accelerator.process_index
    cut = pipeline(whole, (words[: len(words) // parts],), split_spec={middle: SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"), torch.distributed.group.WORLD)
    turns = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](stage, parts, loss_fn=loss_fn)
    own = torch.optim.AdamW(stage.submod.parameters(), 1e-3)

    def by_hand() -> float:
        losses: list[torch.Tensor] = []
        turns.step(target=target, losses=losses) if rank else turns.step(words)
        loss = torch.stack(losses).mean().detach() if rank else torch.zeros(())
        torch.distributed.broadcast(loss, 1)
        own.step()
        own.zero_grad()
        return loss.item()

    def ours() -> float:
        loss = model(words, target=target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    for _ in range(2):  # the second step too: it has learned the same
        assert abs(by_hand() - ours()) < 1e-3
    kept = sum(one.nbytes for one in model.parameters())
    return ours, by_hand, kept, sum(one.nbytes for one in whole.parameters())


KINDS = {
    "tensor parallelism, tp 2": tensor,
    "stages, gpipe": partial(stages, "gpipe"),
    "stages, 1f1b": partial(stages, "1f1b"),
}


def measured(kind: str, turns: int) -> tuple[list[float], list[float], int, int]:
    """Times of both on this rank, with what it keeps."""
    torch.set_num_threads(1)
    *steps, kept, whole = KINDS[kind]()
    times: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for which in (0, 1) if turn % 2 else (1, 0):
            torch.distributed.barrier()
            began = time.perf_counter()
            steps[which]()
            if turn >= 3:
                times[which].append(time.perf_counter() - began)
    return times[0], times[1], kept, whole


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    rows = []
    for kind in KINDS:
        ranks = run_ranks(2, measured, kind, turns, timeout_s=400)
        ours, theirs = ([max(pair) for pair in zip(*(rank[i] for rank in ranks), strict=True)] for i in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        slow, fast = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        rows.append(Row(f"step with {kind}", "by hand", slow, fast, "ms", ratio, BUDGET))
        kept, whole = (ranks[0][i] / 2**20 for i in (2, 3))
        rows.append(Row(f"parameters of a rank, {kind}", "one process", kept, whole, "MiB", kept / whole, None))
    report(rows)


if __name__ == "__main__":
    main()
