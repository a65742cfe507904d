"""A training of two ranks whose every step can be compared with that of another run: 24 steps, a checkpoint every 7.

It holds on after step 18 of the attempt that ``HOLDS`` names, reducing all the time, until the file ``go`` lies beside
its working copy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import Orc

SCRIPT = """
import json, os, pathlib, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from orc.runtime import Accelerator

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)  # different on each rank on purpose
fixed = torch.Generator().manual_seed(1)
data = TensorDataset(torch.arange(48), torch.randn(48, 4, generator=fixed), torch.randn(48, 1, generator=fixed))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
resumed = accelerator.resume()
step = resumed.step if resumed else 0
print("begin", step, os.uname().nodename, time.time(), flush=True)
go, turn = pathlib.Path(os.environ.get("ORC_JOB_DIR", "."), "go"), 0
for epoch in range(resumed.epoch if resumed else 0, 2):
    for numbers, x, y in loader:
        accelerator.backward((model(x) - y).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print("step", step, json.dumps(numbers.tolist()), flush=True)
        while step == 18 and os.environ.get("ORC_ATTEMPT", "-") == os.environ.get("HOLDS"):
            together = torch.tensor([go.exists()])
            dist.all_reduce(together, dist.ReduceOp.MAX)
            if together:
                break
            turn += 1
            print("turn", turn, flush=True)
            time.sleep(0.1)
weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
print("weights", json.dumps(weights), flush=True)
accelerator.end_training()
"""
LAST_CHECKPOINT = 14  # that is committed when it holds on
STEP = re.compile(r"^step (\d+) (.*)$", re.MULTILINE)
BEGIN = re.compile(r"^begin (\d+) (\S+) (\S+)$", re.MULTILINE)
WEIGHTS = re.compile(r"^weights .*$", re.MULTILINE)
JOB: dict[str, Any] = {
    "resources": {"nodes": 2, "procs_per_node": 1},
    "runtime": {"use_cpu": True},
    "checkpoint": {"every": 7, "keep": 2},
    "env": {"HOLDS": "1"},
    "grace": 2,
}


@dataclass(frozen=True)
class Course:
    """What a training did: the samples of each rank by step, and the weights at its end."""

    samples: tuple[dict[str, str], dict[str, str]]
    weights: str


def undisturbed(directory: Path) -> Course:
    """The training in two processes of this machine."""
    (directory / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "orc.orchestrator.cli.main", "launch", "-n", "2", "--cpu", "--log-dir", "logs"]
    subprocess.run([*argv, "train.py"], cwd=directory, check=True, capture_output=True, timeout=300)
    logs = [(directory / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    return Course((dict(STEP.findall(logs[0])), dict(STEP.findall(logs[1]))), WEIGHTS.findall(logs[0])[0])


class Training:
    """One job of `SCRIPT` on two hosts."""

    def __init__(self, laptop: Orc, *args: str, **spec: Any) -> None:
        self.laptop = laptop
        laptop.write_job(SCRIPT, **{**JOB, **spec})
        self.job = laptop.submit(*args)

    def until_it_holds(self) -> None:
        """Both ranks have made 18 steps; the checkpoint of step 14 is committed."""
        for rank in (0, 1):
            self.laptop.until_log(self.job, rank, "turn 3\n")

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """As ``orc status --json`` shows them."""
        found: list[dict[str, Any]] = self.laptop.job(self.job)["attempts"]
        return found

    def log(self, rank: int, attempt: int) -> str:
        """One rank's output in one attempt."""
        return self.laptop.log(self.job, rank, "--attempt", str(attempt))

    def check(self, expected: Course, attempts: int) -> None:
        """It ended well after *attempts* attempts, each from the last committed checkpoint, with nothing twice."""
        view = self.laptop.job(self.job)
        assert (view["state"], len(view["attempts"])) == ("SUCCEEDED", attempts), view
        for rank in (0, 1):
            text = self.log(rank, attempts)
            ((begin, *_),) = BEGIN.findall(text)
            first = LAST_CHECKPOINT if attempts > 1 else 0
            assert int(begin) == first
            steps = STEP.findall(text)
            assert steps == list(expected.samples[rank].items())[first:]
        assert WEIGHTS.findall(self.log(0, attempts)) == [expected.weights]

    def begun_again_at(self) -> float:
        """When the second attempt's rank 0 began to train, by the machine's clock."""
        ((_, _, at),) = BEGIN.findall(self.log(0, 2))
        return float(at)

    def noticed_at(self) -> float:
        """When the ledger heard of the first attempt's end."""
        events = json.loads(self.laptop("events", self.job, "--json"))["events"]
        return next(float(event["at"]) for event in events if event["kind"] in ("lost", "failed"))
