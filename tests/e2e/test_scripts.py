"""Complete training scripts, started by `orc launch`, one by torchrun, too: bit for bit what plain PyTorch computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A test starts several launches one after the other, each of processes that import torch.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).with_name("scripts")
LAUNCHERS = {
    "orc launch": ["orc.orchestrator.cli.main", "launch", "-n"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
}
Lines = list[list[dict[str, Any]]]


def start(argv: list[str], *, succeeds: bool = True) -> None:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, env={**os.environ})
    assert (done.returncode == 0) is succeeds, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def launch(launcher: str, world: int, script: str, *args: str | Path, succeeds: bool = True) -> None:
    words = ["-m", *LAUNCHERS[launcher], str(world), str(SCRIPTS / script), *map(str, args)]
    start(words, succeeds=succeeds)


def read(directory: Path) -> Lines:
    """What each rank reported."""
    ranks = len(list(directory.glob("rank-*.jsonl")))
    return [
        [json.loads(line) for line in (directory / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the plain training *task* reports; run once."""
    runs: dict[tuple[str, ...], Lines] = {}

    def of(task: str, *phases: str) -> Lines:
        if (task, *phases) not in runs:
            out = tmp_path_factory.mktemp(task)
            start([str(SCRIPTS / "reference.py"), task, str(out), *phases])
            runs[(task, *phases)] = read(out)
        return runs[(task, *phases)]

    return of


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_classification_with_metrics(tmp_path: Path, reference: Any, launcher: str) -> None:
    launch(launcher, 2, "classification.py", "--out", tmp_path)
    found, expected = read(tmp_path), reference("classification")
    assert found == expected
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in found]
    assert len(losses[0]) == 18
    assert losses[0] != losses[1]
    epochs = [line for line in found[0] if "accuracy" in line]
    assert [line["seen"] for line in epochs] == [53, 53, 53]
    assert all(line["accuracy"] == line["alone"] for line in epochs)
    assert float.fromhex(epochs[-1]["accuracy"]) > 0.8


def test_accumulation_over_batches_of_varying_length(tmp_path: Path, reference: Any) -> None:
    launch("orc launch", 2, "token_accumulation.py", "--out", tmp_path)
    found, expected = read(tmp_path), reference("tokens")
    assert found == expected
    tokens = [[line["tokens"] for line in lines if "tokens" in line] for lines in found]
    assert [len(of_rank) for of_rank in tokens] == [14, 14]
    assert tokens[0] != tokens[1], "a mean of means would have been another number"
    per_token = [float.fromhex(line["loss"]) / line["tokens"] for line in found[0] if "tokens" in line]
    assert per_token[-1] < per_token[0]


def test_interrupted_training_goes_on_at_other_world_sizes(tmp_path: Path, reference: Any) -> None:
    phases, last, found = [], 0, []
    for world in (2, 4, 1):
        out = tmp_path / str(world)
        out.mkdir()
        interrupted = [] if world == 1 else ["--preempt-at", "4"]
        args = ["--out", out, "--project", tmp_path / "project", *interrupted]
        launch("orc launch", world, "resumed.py", *args, succeeds=not interrupted)
        phase = list(zip(*read(out), strict=True))
        assert len(phase[0]) == world
        assert [lines[0]["step"] for lines in phase] == list(range(last + 1, last + 1 + len(phase)))
        assert len(phase) >= 4
        last += len(phase)
        assert last < 50 if interrupted else last == 100, "interrupted in the first epoch, finished in the second"
        phases.append(f"{world}:{last}")
        found += phase

    # Samples: those of one process that was never interrupted, in the same order.
    whole = [(line["step"], line["epoch"], line["samples"]) for line in reference("resumed", "1:100")[0]]
    joined = [
        (lines[0]["step"], lines[0]["epoch"], [sample for line in lines for sample in line["samples"]])
        for lines in found
    ]
    assert joined == whole
    assert sorted(sample for _, epoch, samples in joined if epoch == 0 for sample in samples) == list(range(400))

    # Losses: those of plain DDP on as many processes at each step.
    expected = reference("resumed", *phases)
    for lines in found:
        for rank, line in enumerate(lines):
            assert line in expected[rank]
