"""One way to measure and one table for all benchmarks.

    python tests/benchmarks/harness.py [name ...]      (make bench)

runs every ``bench_<name>.py`` beside this file, one after the other, and prints one table. A benchmark measures its
subject and a peer in turn (`paired`), compares the median of the turns' ratios with a budget, and hands rows to
`report`. Each also runs by itself. The status is 1 when a benchmark broke; a budget that is missed is a verdict.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

# What is installed has its byte code; so does what was just edited after one run, unless this keeps it from being kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

HERE = Path(__file__).resolve().parent
ROWS = "BENCH_ROWS"  # a file to which rows are added, for the run of all benchmarks
COLUMNS = ("what", "peer", "ours", "theirs", "ratio", "budget", "verdict")


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. *ours* and *theirs* are in *unit*; *budget* limits *limits*: the ratio or ours."""

    what: str
    peer: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    budget: float | None
    limits: str = "ratio"

    @property
    def verdict(self) -> str:
        measured = self.ratio if self.limits == "ratio" else self.ours
        if self.budget is None or measured is None:
            return ""
        if self.limits == "at least":
            return "ok" if self.ours >= self.budget else "MISSED"
        return "ok" if measured <= self.budget else "MISSED"

    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        budget = ""
        if self.budget is not None:
            budget = f"{self.budget:g}" if self.limits == "ratio" else f"{self.budget:g} {self.unit}"
            budget = ("≥ " if self.limits == "at least" else "≤ ") + budget
        return (
            self.what,
            self.peer,
            f"{self.ours:.4g} {self.unit}",
            "" if self.theirs is None else f"{self.theirs:.4g} {self.unit}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            budget,
            self.verdict,
        )


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def paired(ours: Callable[[], float], theirs: Callable[[], float], turns: int, warm_up: int = 1) -> list[float]:
    """Medians of both and of the turns' ratios. Both return what they measured; who goes first alternates."""
    pairs = []
    for turn in range(turns + warm_up):
        if turn % 2:
            mine, other = ours(), theirs()
        else:
            other, mine = theirs(), ours()
        if turn >= warm_up:
            pairs.append((mine, other, mine / other))
    return [statistics.median(column) for column in zip(*pairs, strict=True)]


def compare(
    what: str,
    peer: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    budget: float | None,
    turns: int,
    unit: str = "ms",
    scale: float = 1e3,
) -> Row:
    """The row of two functions that return seconds."""
    mine, other, ratio = paired(ours, theirs, turns)
    return Row(what, peer, mine * scale, other * scale, unit, ratio, budget)


def table(rows: Iterable[Row]) -> str:
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]

    def text(line: tuple[str, ...]) -> str:
        cells = [
            cell.ljust(width) if index in (0, 1, 6) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    head, *body = map(text, lines)
    return "\n".join([head, "-" * len(head), *body])


def report(rows: Iterable[Row]) -> None:
    """Print the rows, and add them to the table of the whole run if there is one."""
    rows = list(rows)
    print(table(rows), flush=True)
    if path := os.environ.get(ROWS):
        with open(path, "a") as file:
            for row in rows:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def on_a_laptop(program: str, measure: Callable[[int], None], turns: int, *needs: str) -> int:
    """Call *measure* on the laptop of a hosts testbed; elsewhere bring one up that runs *program* there."""
    if "HOSTS_LAPTOP" in os.environ:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else turns)
        return 0
    if os.geteuid() != 0 or any(shutil.which(need) is None for need in needs):
        print(
            f"{Path(program).stem}: needs {', '.join(('root, for the hosts testbed', *needs))}: not measured",
            file=sys.stderr,
        )
        return 0
    hosts = HERE.parent / "testbed" / "hosts"
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as directory:
        testbed = str(Path(directory, "testbed"))
        environ = {**os.environ, "HOSTS_TESTBED_DIR": testbed, "HOSTS_VENV": str(Path(sys.executable).parent.parent)}
        try:
            subprocess.run([hosts / "up.sh", "4"], env=environ, check=True, stdout=sys.stderr)
            inside = [hosts / "enter.sh", "laptop", sys.executable, str(Path(program).resolve()), *sys.argv[1:]]
            return subprocess.run(inside, env={**environ, "HOSTS_LAPTOP": testbed}).returncode
        finally:
            subprocess.run([hosts / "down.sh"], env=environ, check=True, stdout=sys.stderr)


def on_ranks(count: int) -> None:
    """Start this program anew as *count* ranks, unless it is one of them."""
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        os.execv(sys.executable, [*launch, *sys.argv])


def main(names: list[str]) -> int:
    """Run the benchmarks and print their table; returns the exit status."""
    found = sorted(HERE.glob("bench_*.py"))
    unknown = {*names} - {path.stem.removeprefix("bench_") for path in found}
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    broken = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rows")
        path.touch()
        # One thread per process, as several processes share the cores.
        env = {**os.environ, ROWS: str(path), "OMP_NUM_THREADS": "1"}
        for program in found:
            if names and program.stem.removeprefix("bench_") not in names:
                continue
            began = time.perf_counter()
            done = subprocess.run([sys.executable, str(program)], env=env, stdout=subprocess.PIPE, text=True)
            print(f"{program.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            if done.returncode:
                broken.append(program.name)
                print(done.stdout, file=sys.stderr)
        print(table(Row(**json.loads(line)) for line in path.read_text().splitlines()))
    if broken:
        print(f"broken: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
