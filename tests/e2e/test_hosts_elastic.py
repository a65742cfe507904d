"""An elastic job on bare hosts loses one of three and takes it back: each sample of the epoch is seen once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Orc
from hosts_testbed import HostsTestbed

# Each attempt but the last holds on after eight steps, three after a checkpoint, until something ends it.
SCRIPT = """
import json, os, pathlib, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from orc.runtime import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)
loader = DataLoader(torch.arange(230.0)[:, None], batch_size=2, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
resumed = accelerator.resume()
step = resumed.step if resumed else 0
print("begin", json.dumps([step, accelerator.num_processes, os.uname().nodename]), flush=True)
stop = step + 8 if os.environ["ORC_ATTEMPT"] != "3" else -1
for x in loader:
    accelerator.backward(model(x).mean())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    step += 1
    everywhere = accelerator.gather_for_metrics(x).flatten().int().tolist()
    print("step", step, json.dumps(everywhere), flush=True)
    turn = 0
    while step == stop:
        turn += 1
        print("holds on", turn, flush=True)
        if accelerator.is_main_process and pathlib.Path(os.environ["ORC_JOB_DIR"], "fail").exists():
            os._exit(3)
        accelerator.gather(torch.zeros(1))
        time.sleep(0.1)
print("schedule", schedule.last_epoch, flush=True)
accelerator.end_training()
"""
BEGIN = re.compile(r"^begin (.*)$", re.MULTILINE)
STEP = re.compile(r"^step (\d+) (.*)$", re.MULTILINE)
RETRY = {"max_attempts": 6, "on": ["node_failure", "crash"], "backoff": 0}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hosts_then_two_then_three_see_every_sample_once(
    hosts: HostsTestbed, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (tmp_path / "job").mkdir()
    first, second, third = hosts.names[:3]
    laptop = Orc(tmp_path / "job", hosts.cluster(hosts=[first, second, third], connect_timeout=8, peer_timeout=5))
    laptop.write_job(
        SCRIPT,
        resources={"nodes": "2:3", "procs_per_node": 1},
        runtime={"use_cpu": True},
        checkpoint={"every": 5, "keep": 2},
        retry=RETRY,
        grace=2,
    )
    job = laptop.submit()

    def attempt_holds(number: int) -> None:
        laptop.until(job, lambda view: len(view["attempts"]) == number and view["state"] == "RUNNING")
        laptop.until_log(job, 0, "holds on 3\n")

    attempt_holds(1)
    hosts.fault("crash", third)
    began = time.time()
    laptop.until(job, lambda view: len(view["attempts"]) == 2)
    record_property(f"without_{third}_s", round(time.time() - began, 1))
    attempt_holds(2)
    hosts.fault("boot", third)
    (hosts.root(first) / "jobs" / job / "fail").touch()
    laptop("wait", job)
    view = laptop.job(job)
    assert view["state"] == "SUCCEEDED", view
    attempts = view["attempts"]
    assert [attempt["hosts"] for attempt in attempts] == [
        [first, second, third],
        [first, second],
        [first, second, third],
    ]
    assert [attempt["failed_hosts"] for attempt in attempts] == [[third], [], []]
    assert [attempt["cause"] for attempt in attempts] == ["node_failure", "crash", None]
    assert third in attempts[0]["reason"]
    logs = [laptop.log(job, 0, "--attempt", str(number)) for number in (1, 2, 3)]
    begins = [json.loads(BEGIN.findall(log)[0]) for log in logs]
    assert [(step, ranks) for step, ranks, _ in begins] == [(0, 3), (5, 2), (10, 3)]
    kept: dict[int, list[int]] = {}
    for log in logs:  # what a later attempt did again takes the place of what was lost
        kept.update({int(step): json.loads(samples) for step, samples in STEP.findall(log)})
    assert [len(kept[step]) for step in sorted(kept)] == [6] * 5 + [4] * 5 + [6] * 30
    assert sorted(sample for samples in kept.values() for sample in samples) == list(range(230))
    assert "schedule 115\n" in logs[2], "by samples: half as many as there are, with batches of two"
    assert "epoch 0 goes on after 30 samples, with 4 samples per step; it was 6" in logs[1]
