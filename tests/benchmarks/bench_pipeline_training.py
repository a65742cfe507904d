"""Training in stages against the same by hand, on two gloo ranks: seconds per step, paired medians.

    python tests/benchmarks/bench_pipeline_training.py [turns]

It starts its two ranks by itself. By hand means torch.distributed.pipelining as its documentation has it:
``pipeline(...)``, ``build_stage``, a schedule, an optimizer of the stage, the losses of the last stage sent to the
other. Both run in turns in one process.
"""

import copy
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from harness import Row, report
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from orc.runtime import Accelerator, AcceleratorState, ParallelismConfig, PipelineParallelConfig

VOCABULARY, SIZE, HEADS, LAYERS, TOKENS, ROWS, PARTS = 512, 256, 4, 6, 64, 16, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.mixed, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.wide = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))

    def forward(self, x):
        query, key, value = self.mixed(self.first(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.wide(self.second(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(SIZE, VOCABULARY)

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def compared(name, turns):
    """Median of (prepared / by hand), and the seconds of both."""
    AcceleratorState._reset_state()
    words, target = torch.randint(0, VOCABULARY, (2, ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    middle = f"blocks.{LAYERS // 2}"
    config = PipelineParallelConfig(
        loss_fn=loss_fn, example_args=(words,), num_microbatches=PARTS, split_points=[middle], schedule=name
    )
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=config))
    model = Decoder()
    whole = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))

    rank = accelerator.process_index
    pipe = pipeline(whole, (words[: ROWS // PARTS],), split_spec={middle: SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = SCHEDULES[name](stage, PARTS, loss_fn=loss_fn)
    own = torch.optim.AdamW(stage.submod.parameters(), 1e-3)

    def by_hand():
        losses = []
        if rank == 0:
            schedule.step(words)
            loss = torch.zeros(())
        else:
            schedule.step(target=target, losses=losses)
            loss = torch.stack(losses).mean().detach()
        dist.broadcast(loss, 1)
        own.step()
        own.zero_grad()
        return loss.item()

    def prepared():
        loss = model(words, target=target)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert abs(by_hand() - prepared()) < 1e-3
    assert abs(by_hand() - prepared()) < 1e-3  # the second step too: it has learned the same
    ratios, seconds = [], {by_hand: [], prepared: []}
    for turn in range(turns):
        took = {}
        for step in (by_hand, prepared) if turn % 2 else (prepared, by_hand):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            took[step] = time.perf_counter() - began
            seconds[step].append(took[step])
        ratios.append(took[prepared] / took[by_hand])
    return statistics.median(ratios), [statistics.median(times) for times in seconds.values()]


def main(turns=40):
    torch.set_num_threads(1)
    rows = []
    for name in SCHEDULES:
        ratio, (hand, ours) = compared(name, turns)
        what = f"step of a pipeline, {name}"
        rows.append(Row(what, "torch.distributed.pipelining by hand", ours * 1e3, hand * 1e3, "ms", ratio, 1.02))
    if dist.get_rank() == 0:
        report(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(*map(int, sys.argv[1:]))
    else:
        launch = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        raise SystemExit(subprocess.run([*launch, __file__, *sys.argv[1:]]).returncode)
