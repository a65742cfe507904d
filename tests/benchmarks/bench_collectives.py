"""Nested gather, reduce, broadcast and pad of 64 small tensors against one coalesced collective written by hand.

    python tests/benchmarks/bench_collectives.py [ranks]

Both take turns on every rank; the figure is the median of the ratios of the turns, on rank 0. Budget: 1.2. The
hand-written one joins the tensors, makes one collective and takes the results apart; for pad it is one all-reduce of
64 sizes and the padding. Objects (budget 1.5) are compared with gathering their pickled bytes, whose sizes are equal
and known; dispatched batches of 16 MB (budget 1.3) with rank 0 writing one into shared memory and the others copying it
out; reduce of 50 MB (budget 1.05) with a copy and an all-reduce.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness import Row, report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
TURNS = 400


def measure(shared: str) -> dict[str, tuple[float, float, float]]:
    """On each rank: median microseconds of ours and of the peer, and the median ratio."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset

    from orc.runtime import Accelerator, broadcast, current_context, gather, gather_object, pad_across_processes, reduce

    ctx = current_context()
    world = ctx.world_size
    data = {f"k{i}": torch.randn(8, 4) for i in range(64)}
    ragged = {f"k{i}": torch.randn(8 + (i + ctx.rank) % 2, 4) for i in range(64)}

    def join():
        return torch.cat([t.reshape(-1) for t in data.values()])

    def by_hand_gather():
        flat = join()
        out = flat.new_empty(world * flat.numel())
        dist.all_gather_single(out, flat)
        pieces = out.view(world, -1).split([t.numel() for t in data.values()], 1)
        return {k: p.reshape(-1, 4) for k, p in zip(data, pieces, strict=True)}

    def by_hand_reduce():
        flat = join()
        dist.all_reduce(flat)
        pieces = flat.split([t.numel() for t in data.values()])
        return {k: p.view(t.shape) for (k, t), p in zip(data.items(), pieces, strict=True)}

    def by_hand_broadcast():
        flat = join()
        dist.broadcast(flat, 0)
        pieces = flat.split([t.numel() for t in data.values()])
        return {k: p.view(t.shape) for (k, t), p in zip(data.items(), pieces, strict=True)}

    def by_hand_pad():
        sizes = torch.tensor([t.shape[0] for t in ragged.values()])
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        result = {}
        for (k, t), size in zip(ragged.items(), sizes.tolist(), strict=True):
            result[k] = t if t.shape[0] == size else torch.cat([t, t.new_zeros(size - t.shape[0], 4)])
        return result

    small, large = [{"rank": ctx.rank, "text": "x" * 80}], [bytes(1 << 20)]

    def by_hand_objects(value):
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        out = mine.new_empty(world * mine.numel())
        dist.all_gather_single(out, mine)
        return [item for piece in out.view(world, -1) for item in pickle.loads(piece.numpy())]

    rows = 4096  # of 4 KiB: 16 MiB
    batch = {"x": torch.randn(rows, 512), "more": (torch.randn(rows, 384), torch.randn(rows, 128))}

    class Batches(IterableDataset):
        def __iter__(self):
            while True:
                yield batch

    dispatched = iter(Accelerator(cpu=True).prepare(DataLoader(Batches(), batch_size=None)))
    joined, memory = torch.randn(rows, 1024), torch.from_file(shared, shared=True, size=rows * 1024)

    def by_hand_shared():
        if ctx.rank == 0:
            memory.copy_(joined.view(-1))
        dist.barrier()
        return memory.clone()

    large_sum = torch.randn(12_500_000)

    def by_hand_large():
        result = large_sum.clone()
        dist.all_reduce(result)
        return result

    pairs = {
        "gather": (by_hand_gather, lambda: gather(data, ctx=ctx)),
        "reduce": (by_hand_reduce, lambda: reduce(data, "sum", ctx=ctx)),
        "broadcast": (by_hand_broadcast, lambda: broadcast(data, ctx=ctx)),
        "pad": (by_hand_pad, lambda: pad_across_processes(ragged, ctx=ctx)),
        "gather_object of 100 B": (lambda: by_hand_objects(small), lambda: gather_object(small, ctx=ctx)),
        "gather_object of 1 MiB": (lambda: by_hand_objects(large), lambda: gather_object(large, ctx=ctx)),
        "dispatch of 16 MiB batches": (by_hand_shared, lambda: next(dispatched)),
        "reduce of 50 MB": (by_hand_large, lambda: reduce(large_sum, "sum", ctx=ctx)),
    }
    results = {}
    for name, calls in pairs.items():
        times: list[list[float]] = [[], []]
        turns = TURNS if "MiB" not in name and "MB" not in name else TURNS // 8
        for turn in range(turns + 20):
            for index, call in enumerate(calls):
                dist.barrier()
                started = time.perf_counter()
                call()
                if turn >= 20:
                    times[index].append((time.perf_counter() - started) * 1e6)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        results[name] = (statistics.median(times[1]), statistics.median(times[0]), ratio)
    return results


def main() -> None:
    from conftest import RankPool

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    pool = RankPool()
    try:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
            shared.truncate(4096 * 1024 * 4)
            measured = pool(ranks, measure, shared.name, timeout=300)[0]
    finally:
        pool.close()
    rows = []
    for name, (ours, theirs, ratio) in measured.items():
        what, peer, budget = f"{name} of 64 leaves", "one packed collective", 1.2
        if name.startswith("gather_object"):
            what, peer, budget = name, "gathering the bytes", 1.5
        elif name.startswith("dispatch"):
            what, peer, budget = name, "a copy through shared memory", 1.3
        elif name.endswith("MB"):
            what, peer, budget = name, "copy and all-reduce", 1.05
        rows.append(Row(f"{what}, {ranks} ranks", peer, ours, theirs, "µs", ratio, budget))
    report(rows)


if __name__ == "__main__":
    main()
