"""`orc launch -n 2` against `torchrun --nproc-per-node 2`: first line, first all-reduce, exit, launcher memory.

    python tests/benchmarks/bench_launch.py [rounds]

Two scripts: one begins with its imports, as most do (then `orc launch` imports torch once for both ranks), one prints
before it imports torch (then it cannot). The two launchers run in turn, one pair per round; what is compared is the
median of the pairs' ratios, so that a machine that is busy for a while slows both. `python` twice, with nothing that
looks after it, is the floor.
Budgets (ratios to torchrun): first line 0.5, first all-reduce 0.4, exit 0.4; launcher memory 40 MB.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import Row, report

ROUNDS = 4
BUDGETS = {"first line": 0.5, "first all-reduce": 0.4, "exit": 0.4}
SAY = """
def say(what, number):
    os.write(1, f"{what}={number}\\n".encode())
say("first line", time.time())
"""
TRAIN = """
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
say("first all-reduce", time.time())
assert x.item() == 2
with open(f"/proc/{os.getppid()}/status") as status:
    say("launcher kB", next(line.split()[1] for line in status if line.startswith("VmRSS")))
dist.destroy_process_group()
"""


IMPORT = "import torch, torch.distributed as dist\n"
SCRIPTS = {
    "imports first": "import os, time\n" + IMPORT + SAY + TRAIN,
    "prints first": "import os, time\n" + SAY + IMPORT + TRAIN,
}


@dataclass(frozen=True)
class Run:
    """One launch of two ranks: seconds from the start until both ranks have got there, and the launcher's memory."""

    seconds: dict[str, float]
    launcher_mb: float


def launch(argv: list[list[str]], environ: list[dict[str, str]]) -> Run:
    began = time.time()
    processes = [
        subprocess.Popen(words, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words, env in zip(argv, environ, strict=True)
    ]
    text = ""
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        text += out
    exit_s = time.time() - began
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        what, _, number = line.partition("=")
        found.setdefault(what, []).append(float(number))
    assert {what: len(numbers) for what, numbers in found.items()} == dict.fromkeys(found, 2)
    seconds = {what: max(found[what]) - began for what in ("first line", "first all-reduce")}
    return Run({**seconds, "exit": exit_s}, max(found["launcher kB"]) / 1024)


def orc(script: Path) -> Run:
    return launch([[str(Path(sys.executable).parent / "orc"), "launch", "-n", "2", str(script)]], [{}])


def torchrun(script: Path) -> Run:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return launch([argv], [{}])


def bare(script: Path) -> Run:
    port = str(20000 + time.time_ns() // 1_000_000 % 10_000)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, str(script)]
    return launch([argv, argv], [{**common, "RANK": str(rank)} for rank in range(2)])


def compare(script: Path, source: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each, and median ratios to torchrun of the same round."""
    script.write_text(source)
    contestants = {"torchrun": torchrun, "orc launch": orc, "bare python": bare}
    for run in contestants.values():  # byte code and libraries in the cache
        run(script)
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            runs[name].append(run(script))
    result: dict[str, dict[str, float]] = {}
    for name, own in runs.items():
        row = {what: statistics.median(r.seconds[what] for r in own) for what in BUDGETS}
        pairs = list(zip(own, runs["torchrun"], strict=True))
        row |= {
            f"{what} ratio": statistics.median(a.seconds[what] / b.seconds[what] for a, b in pairs) for what in BUDGETS
        }
        row["launcher MB"] = statistics.median(r.launcher_mb for r in own)
        result[name] = row
    return result


def table(result: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':12} {'first line':>18} {'first all-reduce':>18} {'exit':>18} {'launcher':>10}"]
    for name, row in result.items():
        cells = [f"{row[what]:.2f} s ({row[what + ' ratio']:.2f})" for what in BUDGETS]
        memory = "" if name == "bare python" else f"{row['launcher MB']:.0f} MB"
        lines.append(f"{name:12} {cells[0]:>18} {cells[1]:>18} {cells[2]:>18} {memory:>10}")
    lines.append(
        f"{'budget':12} " + " ".join(f"{f'({BUDGETS[what]:.2f})':>18}" for what in BUDGETS) + f" {'40 MB':>10}"
    )
    return "\n".join(lines)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_launching_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    result = compare(tmp_path / "train.py", SCRIPTS[kind], ROUNDS)
    with capsys.disabled():
        print(f"\n{kind}\n{table(result)}")
        report(rows(kind, result))


def rows(kind: str, result: dict[str, dict[str, float]]) -> list[Row]:
    own, peer = result["orc launch"], result["torchrun"]
    found = [
        Row(f"launch of 2, {what} ({kind})", "torchrun", own[what], peer[what], "s", own[f"{what} ratio"], budget)
        for what, budget in BUDGETS.items()
    ]
    mine, other = own["launcher MB"], peer["launcher MB"]
    return [*found, Row(f"launcher's memory ({kind})", "torchrun", mine, other, "MB", mine / other, 40, "ours")]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        for kind, source in SCRIPTS.items():
            count = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
            found = compare(Path(directory, "train.py"), source, count)
            print(f"{kind}\n{table(found)}\n")
            report(rows(kind, found))
