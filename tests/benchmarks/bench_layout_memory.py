"""Memory of one process in each layout of the same model and batch, as a table: what it keeps, and its peak.

    python tests/benchmarks/bench_layout_memory.py [layout ...]

Each layout runs in new processes (gloo, one thread each). Parameters, gradients and optimizer states are counted tensor
by tensor; activations are the most bytes that autograd keeps at one time; the peak is that of the resident memory of
the process in a step, over what it had before the model was made. The largest of the ranks counts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

LAYOUTS = {
    "one process": {},
    "dp_shard 2": {"dp_shard": 2},
    "tp 2": {"tp": 2},
    "dp_shard 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "cp 2": {"cp": 2},
    "sp 2": {"sp": 2},
    "pp 2": {"pp": 2},
}
WORDS, TOKENS, ROWS, WIDTH, HEADS, BLOCKS = 2048, 256, 8, 384, 6, 4
PLAN = {
    "words": "embedding_rowwise",
    "blocks.*.attention.*": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.mixed": "rowwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixed, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, hidden):
        normed = self.before(hidden)
        query, key, value = (one(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in self.attention)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mixed(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words, places):
        hidden = self.words(words) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def local(tensor):
    held = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held


def total(tensors):
    return sum({one.data_ptr(): one.nbytes for one in map(local, tensors)}.values())


def resident(field):
    """A line of /proc/self/status in bytes: VmRSS, or VmHWM for the most since it was reset."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(field)))


class Kept:
    """The most bytes that autograd keeps at one time for a backward, parameters left out."""

    def __init__(self, model):
        self.model, self.counts, self.now, self.most = model, {}, 0, 0

    def pack(self, tensor):
        storage = local(tensor).untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if any(local(one).untyped_storage().data_ptr() == place for one in self.model.parameters()):
            return tensor
        self.counts[place] = self.counts.get(place, 0) + 1
        if self.counts[place] == 1:
            self.now += size
            self.most = max(self.most, self.now)
        return Held(self, tensor, place, size)

    def release(self, place, size):
        self.counts[place] -= 1
        if not self.counts[place]:
            self.now -= size


class Held:
    def __init__(self, kept, tensor, place, size):
        self.kept, self.tensor, self.place, self.size = kept, tensor, place, size

    def __del__(self):
        self.kept.release(self.place, self.size)


def measured(sizes):
    from orc.runtime import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
        TorchTensorParallelConfig,
    )

    shards = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    words = torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = [words, torch.arange(TOKENS).expand(ROWS, TOKENS).contiguous(), words.roll(-1, 1)]
    options = {"sp_backend": "torch", "tp_handler": TorchTensorParallelConfig(plan=PLAN)}
    if "pp" in sizes:
        options["pp_handler"] = PipelineParallelConfig(
            loss_fn=loss_of, example_args=tuple(batch[:2]), num_microbatches=4
        )
    config = ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()}, **options)
    accelerator = Accelerator(
        cpu=True, parallelism_config=config if sizes else None, fsdp_plugin=shards if "dp_shard" in sizes else None
    )
    topology = accelerator.ctx.topology
    rows = ROWS // topology.data_size
    mine = [one[topology.data_rank * rows :][:rows] for one in batch]
    if "sp" in sizes:
        mine = [one.chunk(2, 1)[topology.place("sp")] for one in mine]
    accelerator.wait_for_everyone()
    before = resident("VmRSS")
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    kept, gradients = Kept(accelerator.unwrap_model(model)), 0
    for step in range(3):
        if step == 1:  # the optimizer's state is there
            Path("/proc/self/clear_refs").write_text("5")
        pieces = [one.clone() for one in mine]
        hooks = torch.autograd.graph.saved_tensors_hooks(
            kept.pack if step == 2 else lambda one: one, lambda one: one.tensor if isinstance(one, Held) else one
        )
        with accelerator.maybe_context_parallel(pieces, [1, 1, 1]):
            with hooks:
                *given, target = pieces
                loss = model(*given, target=target) if "pp" in sizes else loss_of(model(*given), target)
            accelerator.backward(loss)
            del loss
        gradients = total(one.grad for one in model.parameters() if one.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            peak = resident("VmHWM") - before
    states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    return [total(model.parameters()), gradients, total(states), kept.most, peak]


def main(names):
    print(
        "| layout | parameters | gradients | optimizer | activations | peak of the process |\n|---|---|---|---|---|---|"
    )
    for name in names:
        ranks = 1
        for size in LAYOUTS[name].values():
            ranks *= size
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
        env |= {"MALLOC_MMAP_THRESHOLD_": "65536", "BENCH_LAYOUT": name}
        done = subprocess.run([*command, __file__], env=env, capture_output=True, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        if done.returncode or len(found) != ranks:
            raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        shown = [f"{max(column) / 2**20:.0f}" for column in zip(*found, strict=True)]
        print(f"| `{name}` | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    if "BENCH_LAYOUT" in os.environ:
        sys.stdout.write(json.dumps(measured(LAYOUTS[os.environ["BENCH_LAYOUT"]])) + "\n")
    else:
        main(sys.argv[1:] or list(LAYOUTS))
