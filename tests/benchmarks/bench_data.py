"""Prepared loaders against plain ones with a `DistributedSampler`, and the cost of skipping; one process.

    python tests/benchmarks/bench_data.py

Plain and prepared loader take turns; what is compared is the median of the turns' ratios. Budgets: a pass over a
prepared loader 1.1 of a plain one; the first batch of an epoch of a million samples 1.3; skipping 100,000 batches
2 ms (data with indices), 23 ms (stream). The peer of skipping is what torch offers: reading and dropping them.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from harness import Row, compare, report, seconds
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from orc.runtime import Accelerator, prepare_data_loader, skip_first_batches

ROUNDS = 15


class Numbers(Dataset[int]):
    """Samples that cost next to nothing, so that only the loader is measured."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Images(Numbers):
    """Samples of the size of a small image."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 32, 32), float(index)), index


class Stream(IterableDataset[int]):
    """A hundred thousand and one batches of one."""

    def __iter__(self) -> Any:
        return iter(range(100_001))


def walk(loader: Any) -> float:
    """Seconds of one pass."""

    def run() -> None:
        for _ in loader:
            pass

    return seconds(run)


def first(loader: Any) -> float:
    """Seconds until the first batch of a pass."""
    return seconds(lambda: next(iter(loader)))


def of_two(data: Dataset[int], batch_size: int, shuffle: bool) -> tuple[Any, Any]:
    """The prepared loader of rank 0 of 2, and a plain one."""
    prepared = prepare_data_loader(
        DataLoader(data, batch_size=batch_size, shuffle=shuffle), num_processes=2, process_index=0
    )
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)
    return prepared, DataLoader(data, batch_size=batch_size, sampler=sampler)


def skipping(what: str, loader: DataLoader[Any], drop: DataLoader[Any], budget_ms: float) -> Row:
    """Until the first batch behind 100,000 others; the peer reads and drops them."""
    prepared = Accelerator(cpu=True).prepare(loader)

    def plain() -> None:
        for index, _ in enumerate(drop):
            if index == 100_000:
                break

    times = [first(skip_first_batches(prepared, 100_000)) * 1e3 for _ in range(7)]
    mine, other = statistics.median(times), seconds(plain) * 1e3
    return Row(f"skip 100,000 batches, {what}", "read and drop", mine, other, "ms", mine / other, budget_ms, "ours")


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    rows = []
    peer = "DistributedSampler"
    for what, data, batch_size, shuffle in (
        ("indices, sequential", Numbers(40_000), 4, False),
        ("indices, shuffled", Numbers(40_000), 4, True),
        ("images, shuffled", Images(4_000), 16, True),
    ):
        ours, plain = of_two(data, batch_size, shuffle)
        rows.append(
            compare(
                f"pass over a loader, {what}",
                peer,
                lambda loader=ours: walk(loader),
                lambda loader=plain: walk(loader),
                budget=1.1,
                turns=ROUNDS,
            )
        )
    for what, shuffle in (("sequential", False), ("shuffled", True)):
        ours, plain = of_two(Numbers(1_000_000), 32, shuffle)
        rows.append(
            compare(
                f"epoch start, 1,000,000 samples, {what}",
                peer,
                lambda loader=ours: first(loader),
                lambda loader=plain: first(loader),
                budget=1.3,
                turns=7,
            )
        )
    numbers = Numbers(100_001)
    rows.append(skipping("sequential", DataLoader(numbers), DataLoader(numbers), 2))
    rows.append(skipping("shuffled", DataLoader(numbers, shuffle=True), DataLoader(numbers, shuffle=True), 2))
    rows.append(skipping("stream", DataLoader(Stream()), DataLoader(Stream()), 23))
    report(rows)


if __name__ == "__main__":
    main()
