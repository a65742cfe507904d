"""What is known of a rank and of its GPU while it trains: where it waits, what it has issued."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from orc.launchers.hosts.all_reduce_probe import between_gpus, places, reduce_together
from orc.runtime import Accelerator
from orc.runtime.observe import watch

WAITS = """
    import json, threading, time, torch
    import torch.distributed as dist
    from orc.runtime.launch.device import record_collectives
    from orc.runtime.observe.flight_recorder import flight_record, last_collectives
    from orc.runtime.observe.whereabouts import main_call_site

    record_collectives()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    before, until = {}, time.monotonic() + 30  # a thread of torch notes that it is done
    while not (before and all(last.done for last in before.values())) and time.monotonic() < until:
        before = last_collectives(flight_record())
    seen = []

    def look():
        until = time.monotonic() + 10
        while time.monotonic() < until and (not seen or seen[-1][0] != "synchronize"):
            seen.append((main_call_site().activity, last_collectives(flight_record())))

    torch.cuda._sleep(4_000_000_000)  # some seconds of the device, which the collective is behind
    dist.all_reduce(value)
    looker = threading.Thread(target=look)
    looker.start()
    value.item()
    looker.join()
    (group, last), = seen[-1][1].items()
    print(json.dumps([seen[-1][0], group, before[group].number, before[group].done, last.number, last.done]))
    dist.destroy_process_group()
"""


@pytest.mark.cuda_only
def test_a_rank_that_waits_for_its_device_behind_a_collective_is_seen_to_wait(tmp_path):
    script = tmp_path / "train.py"  # a process of its own: torch reads how much to record once
    script.write_text(textwrap.dedent(WAITS))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    activity, group, *collectives = json.loads(done.stdout.splitlines()[-1])
    assert (activity, collectives) == ("synchronize", [1, True, 2, False]), group


@pytest.mark.cuda_only
def test_a_rank_of_a_job_tells_of_its_gpu_and_of_the_memory_that_it_takes(tmp_path, monkeypatch, capfd):
    (tmp_path / "a1" / "node-0").mkdir(parents=True)
    for name, value in {
        "ORC_ATTEMPT_DIR": tmp_path / "a1",
        "ORC_JOB_DIR": tmp_path,
        "ORC_METRICS_INTERVAL_S": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    torch.cuda.reset_peak_memory_stats()
    accelerator = Accelerator()
    model = torch.nn.Linear(1024, 1024)
    data = DataLoader(torch.randn(256, 1024), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    for batch in data:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    watch.close_all()
    name = torch.cuda.get_device_name()
    assert f"orc: rank 0 of 1 trains on {name} (" in capfd.readouterr().err
    record = json.loads((tmp_path / "a1/node-0/device-0.json").read_text())
    assert record["name"] == name
    assert record["uuid"]
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    weights = 3 * 1024 * 1024 * 4  # with the two moments
    assert weights < line["memory_allocated"] <= line["memory_peak"] <= line["memory_reserved"]
    assert record["memory_peak"] == line["memory_peak"]


@pytest.mark.cuda_only
def test_the_probe_of_hosts_reduces_over_all_gpus_and_knows_what_their_links_promise():
    devices = places(torch, torch.device("cuda"))
    measured = reduce_together(torch, devices, 64 << 20)  # it looks at the sums
    promised = between_gpus()
    assert promised is not None
    assert promised[1] > 500  # megabytes per second: one lane of the third generation
    assert len(devices) == 1 or 0.1 * promised[1] < measured < 2 * promised[1]


FULL = """
    import torch
    from orc.runtime import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(8, 2048, device="cuda")).sum())
    optimizer.step()
    loss = model(torch.ones(4096, 2048, device="cuda").requires_grad_())
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.cuda_only
def test_a_script_that_runs_out_of_memory_says_what_held_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(FULL))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    *_, error, whose, parts, blocks = done.stderr.splitlines()
    assert "OutOfMemoryError: CUDA out of memory" in error
    assert whose.startswith(f"orc: memory of {torch.cuda.get_device_name()} (")
    assert parts.startswith("orc: of the tensors: parameters 64.0 MiB, gradients 64.0 MiB, optimizer state 128.0 MiB")
    assert "that Python does not see" in parts
    assert blocks.startswith("orc: largest blocks: ")
    assert " MiB" in blocks


@pytest.mark.cuda_only
def test_nccl_beside_gloo_has_its_own_time_out():
    accelerator = Accelerator()
    _ = accelerator.ctx.topology.mesh  # of one rank
    limits = [
        dist.group.WORLD._get_backend(place).options._timeout for place in (accelerator.device, torch.device("cpu"))
    ]
    assert [limit.total_seconds() for limit in limits] == [600, 1800]
    accelerator.end_training()
