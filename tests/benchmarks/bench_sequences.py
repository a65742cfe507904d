"""Sequences in pieces against the same by hand, on two gloo ranks: seconds per step, and what autograd keeps.

    python tests/benchmarks/bench_sequences.py [tokens] [steps]

By hand means: torch's rounds of the ring or its all-to-all called in the model, tokens cut by the script, DDP. Both run
in turns in one process, and the median of the ratios counts. What autograd keeps for backward is counted by tensor.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from harness import Row, on_ranks, report
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from orc.runtime import Accelerator, ParallelismConfig
from orc.runtime.core.context import reset_default
from orc.runtime.parallel.context import _RingAttention
from orc.runtime.parallel.sequence import _by_heads

VOCABULARY, SIZE, HEADS, LAYERS = 512, 128, 4, 4


class Decoder(nn.Module):
    def __init__(self, tokens, attention=None):
        super().__init__()
        self.attention = attention
        self.tokens, self.places = nn.Embedding(VOCABULARY, SIZE), nn.Embedding(tokens, SIZE)
        self.mixed = nn.ModuleList(nn.Linear(SIZE, 3 * SIZE) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
                                  for _ in range(LAYERS))  # fmt: skip
        self.out = nn.Linear(SIZE, VOCABULARY)

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        attend = self.attention or functional.scaled_dot_product_attention
        for mixed, wide in zip(self.mixed, self.wide, strict=True):
            query, key, value = mixed(hidden).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
            hidden = hidden + attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
            hidden = hidden + wide(hidden)
        return self.out(hidden)


def kept_by(step):
    """Bytes that autograd keeps for the backward of *step*, parameters left out."""
    storages = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(storages.values())


def compared(kind, tokens, steps):
    """Median of (prepared / by hand), seconds by hand, and bytes kept by both."""
    reset_default()
    config = ParallelismConfig(cp_size=2) if kind == "cp" else ParallelismConfig(sp_size=2, sp_backend="torch")
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    group, rank = dist.group.WORLD, accelerator.process_index
    torch.manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (1, tokens))
    batch = {"input_ids": rows, "position_ids": torch.arange(tokens)[None], "labels": rows.roll(-1, 1)}
    parts = torch.arange(tokens).chunk(4)
    mine = torch.cat([parts[rank], parts[3 - rank]]) if kind == "cp" else torch.arange(tokens).chunk(2)[rank]

    def ring(query, key, value, is_causal):
        return _RingAttention.apply(query, key, value, group, None)

    heads = _by_heads(group, 2)

    def ulysses(query, key, value, is_causal):
        return heads(query, key, value, enable_gqa=False, is_causal=True)

    def one(attention=None):
        torch.manual_seed(1)
        return Decoder(tokens, attention)

    hand = DistributedDataParallel(one(ring if kind == "cp" else ulysses))
    hand_optimizer = torch.optim.SGD(hand.parameters(), 0.01)
    model = one()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    cut = accelerator.prepare(torch.utils.data.DataLoader([batch], batch_size=None)).part

    def loss_of(model, batch):
        labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        return functional.cross_entropy(
            model(batch["input_ids"], batch["position_ids"]).flatten(0, 1), labels.flatten()
        )

    def by_hand():
        loss_of(hand, {name: value[:, mine] for name, value in batch.items()}).backward()
        hand_optimizer.step()
        hand_optimizer.zero_grad()

    def prepared():
        if kind == "cp":
            given = dict(batch)
            with accelerator.maybe_context_parallel(list(given.values()), [1] * 3):
                accelerator.backward(loss_of(model, given))
        else:
            accelerator.backward(loss_of(model, cut(batch)))
        optimizer.step()
        optimizer.zero_grad()

    kept = [kept_by(by_hand), kept_by(prepared)]
    ratios, seconds = [], []
    for turn in range(steps):
        times = {}
        for step in (by_hand, prepared) if turn % 2 else (prepared, by_hand):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            times[step] = time.perf_counter() - began
        ratios.append(times[prepared] / times[by_hand])
        seconds.append(times[by_hand])
    return accelerator.is_main_process, statistics.median(ratios), statistics.median(seconds), kept


def alone(tokens):
    """Bytes that one process keeps for whole sequences."""
    model, rows = Decoder(tokens), torch.randint(0, VOCABULARY, (1, tokens))
    return kept_by(lambda: functional.cross_entropy(model(rows, torch.arange(tokens)).flatten(0, 1), rows.flatten()))


def main():
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    whole, rows = alone(tokens), []
    for kind in ("cp", "sp"):
        main_process, ratio, seconds, (hand, prepared) = compared(kind, tokens, steps)
        if main_process:
            print(
                f"{kind} 2, {tokens} tokens: prepared / by hand {ratio:.3f} ({1000 * seconds:.0f} ms a step); kept "
                f"for backward {prepared / 2**20:.1f} MiB, by hand {hand / 2**20:.1f}, one process {whole / 2**20:.1f}"
            )
            name = f"a step of {kind} 2, {tokens} tokens"
            rows.append(Row(name, "by hand", ratio * seconds, seconds, "s", ratio, None))
    if rows:
        report(rows)


if __name__ == "__main__":
    on_ranks(2)
    main()
