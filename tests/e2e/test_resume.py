"""Jobs that lose a process or are preempted in mid-epoch go on as if nothing had happened, sample by sample."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from polling import polls

# A test starts several launches one after the other, each of processes that import torch.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = """
import json, os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from orc.runtime import Accelerator

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)  # different on each rank on purpose
fixed = torch.Generator().manual_seed(1)
data = TensorDataset(torch.arange(80), torch.randn(80, 4, generator=fixed), torch.randn(80, 1, generator=fixed))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
resumed = accelerator.resume()
step = resumed.step if resumed else 0
run = os.environ["ORC_ATTEMPT"] + "." + os.environ["ORC_RESTART"]
log = open(os.path.join(os.environ["ORC_JOB_DIR"], f"seen-{accelerator.process_index}.jsonl"), "a")
for epoch in range(resumed.epoch if resumed else 0, 3):
    for numbers, x, y in loader:
        loss = (model(x) - y).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(json.dumps({
            "step": step, "epoch": epoch, "samples": numbers.tolist(), "pid": os.getpid(),
            "run": run,
        }), file=log, flush=True)
        MEANWHILE
weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
accelerator.print("weights " + json.dumps(weights))
"""


class Job:
    """A submitted job on this machine, whose ranks do *meanwhile* after each step."""

    def __init__(self, directory: Path, meanwhile: str, **spec: Any) -> None:
        self.directory = directory
        directory.mkdir()
        (directory / "train.py").write_text(TRAIN.replace("MEANWHILE", meanwhile))
        (directory / "job.yaml").write_text(
            yaml.safe_dump(
                {
                    "name": directory.name,
                    "script": "train.py",
                    "resources": {"procs_per_node": 2},
                    "runtime": {"use_cpu": True},
                    "checkpoint": {"every": 7, "keep": 2},
                    "retry": {"max_attempts": 3, "on": ["crash", "preempted"], "backoff": 0},
                }
                | spec
            )
        )
        self.id: str = json.loads(self.orc("submit", "job.yaml", "--json"))["id"]

    @property
    def state(self) -> Path:
        return Path(os.environ["ORC_STATE_DIR"]) / "jobs" / self.id

    def orc(self, *args: str, status: tuple[int, ...] = (0,)) -> str:
        argv = [sys.executable, "-m", "orc.orchestrator.cli.main", *args]
        done = subprocess.run(argv, cwd=self.directory, capture_output=True, text=True, timeout=350)
        assert done.returncode in status, f"orc {' '.join(args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def view(self) -> dict[str, Any]:
        view: dict[str, Any] = json.loads(self.orc("status", self.id, "--json", status=(0, 1, 3)))["jobs"][0]
        return view

    def seen(self, rank: int) -> list[dict[str, Any]]:
        path = self.state / f"seen-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may still be growing
        return [json.loads(line) for line in lines]

    def until_step(self, rank: int, step: int) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            return next((line for line in self.seen(rank) if line["step"] >= step), None)

        return eventually(reached)

    def finish(self) -> dict[str, Any]:
        self.orc("wait", self.id, "--timeout", "300", status=(0, 1, 3, 6))
        view = self.view()
        assert view["state"] == "SUCCEEDED", json.dumps(view, indent=1) + self.orc("logs", self.id, status=(0, 2))
        return view

    def weights(self, attempt: int) -> str:
        log = self.orc("logs", self.id, "--rank", "0", "--attempt", str(attempt))
        return next(line for line in log.splitlines() if line.startswith("weights "))

    def samples(self, rank: int) -> Samples:
        """Epoch and samples of each step; steps that were repeated must have seen the same."""
        steps: Samples = {}
        for line in self.seen(rank):
            here = (line["epoch"], line["samples"])
            assert steps.setdefault(line["step"], here) == here, f"step {line['step']} was repeated with other samples"
        return steps


def eventually(condition: Callable[[], Any], timeout_s: float = 240) -> Any:
    for _ in polls(timeout_s):
        if result := condition():
            return result
    raise AssertionError("did not happen in time")


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def make(name: str, meanwhile: str, **spec: Any) -> Job:
        jobs.append(Job(tmp_path / name, meanwhile, **spec))
        return jobs[-1]

    yield make
    for job in jobs:
        job.orc("cancel", job.id, status=tuple(range(128)))


Samples = dict[int, tuple[int, list[int]]]
_uninterrupted: list[tuple[list[Samples], str]] = []


def uninterrupted(submit: Callable[..., Job]) -> tuple[list[Samples], str]:
    """What both ranks see, and the weights they end with, when nothing happens; run once for all tests."""
    if not _uninterrupted:
        _uninterrupted.append(run_uninterrupted(submit))
    return _uninterrupted[0]


def run_uninterrupted(submit: Callable[..., Job]) -> tuple[list[Samples], str]:
    job = submit("whole", "pass")
    job.finish()
    samples = [job.samples(rank) for rank in range(2)]
    assert [sorted(steps) for steps in samples] == [list(range(1, 61))] * 2
    for epoch in range(3):
        read = [s for steps in samples for e, batch in steps.values() if e == epoch for s in batch]
        assert sorted(read) == list(range(80))
    return samples, job.weights(1)


def test_a_killed_process_costs_nothing_but_repeated_steps(submit: Callable[..., Job]) -> None:
    # In the second epoch, saved last after step 28.
    hold = "while run == '1.0' and step == 29: accelerator.wait_for_everyone(); time.sleep(0.02)"
    job = submit("killed", hold, launcher="torchrun")  # with `python` it is killed in test_hosts_faults.py
    os.kill(job.until_step(1, 29)["pid"], signal.SIGKILL)
    view = job.finish()
    assert [attempt["cause"] for attempt in view["attempts"]] == ["crash", None]
    failure = view["attempts"][0]["exit"]["first_failure"]
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")
    runs = {line["run"]: line["step"] for line in reversed(job.seen(0))}
    assert list(runs.values()) == [29, 1], "resumed from a committed checkpoint, not from the start"
    expected, weights = uninterrupted(submit)
    assert [job.samples(rank) for rank in range(2)] == expected
    assert job.weights(2) == weights


def test_a_preempted_job_saves_leaves_and_goes_on(submit: Callable[..., Job]) -> None:
    # The ranks agree on a step within a second; there must be steps left.
    job = submit("preempted", "time.sleep(0.5 if run == '1.0' and step >= 24 else 0)")
    os.kill(job.until_step(0, 24)["pid"], signal.SIGTERM)  # one is told, both leave after the same step
    view = job.finish()
    first = view["attempts"][0]
    assert first["cause"] == "preempted"
    assert {rank["exit_code"] for rank in first["exit"]["ranks"].values()} == {75}
    by_run: dict[str, list[int]] = {}
    for line in job.seen(0):
        by_run.setdefault(line["run"], []).append(line["step"])
    before, after = by_run.values()
    assert before + after == list(range(1, 61)), "no step was lost or repeated"
    expected, weights = uninterrupted(submit)
    assert [job.samples(rank) for rank in range(2)] == expected
    assert job.weights(2) == weights


def test_a_checkpoint_that_does_not_fit_is_refused_once_and_not_with_every_attempt(submit: Callable[..., Job]) -> None:
    change = (
        "if step == 10 and accelerator.is_main_process:\n"
        "            text = open(__file__).read()\n"
        "            open(__file__, 'w').write(text.replace(', shuffle=True', ''))\n"
        "            os._exit(9)"
    )
    job = submit("misfit", change, retry={"max_attempts": 5, "on": ["crash"], "backoff": 0})
    job.orc("wait", job.id, "--timeout", "300", status=(1,))
    view = job.view()
    assert [attempt["cause"] for attempt in view["attempts"]] == ["crash", "crash"]
    assert "exited with 78 (another attempt would end the same way)" in view["reason"]
    log = job.orc("logs", job.id, "--rank", "0", "--attempt", "2")
    assert "CheckpointMisfit" in log
    assert "saved from a shuffled order of samples, this loader's is sequential" in log
