"""How cost grows: with jobs, users, history and followers; with nodes, ranks and shards. Everything is simulated.

    python tests/benchmarks/bench_scale.py [--part NAME ...] [--full] [--list]

Without ``--full`` each part runs at a small size, in seconds; with it at the sizes of docs/explanation/scale.md. What
counts is printed beside the time by the clock: calls, statements, processor time, memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import scale_control
import scale_nodes
from harness import Row, report

Part = Callable[[bool], Iterable[Row]]
PARTS: dict[str, Part] = {**scale_control.PARTS, **scale_nodes.PARTS}


def main() -> None:
    """Measure the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="one of the parts; may be repeated")
    parser.add_argument("--full", action="store_true", help="the sizes of the page about scale")
    parser.add_argument("--list", action="store_true", help="name the parts")
    arguments = parser.parse_args()
    if arguments.list:
        print(*PARTS, sep="\n")
        return
    for name in arguments.part or PARTS:
        print(f"-- {name}", flush=True)
        report(PARTS[name](arguments.full))


if __name__ == "__main__":
    main()
