"""What is known of a rank and of its GPU while it trains: where it waits, what it has issued."""

import json
import subprocess
import sys
import textwrap

import pytest

WAITS = """
    import json, threading, time, torch
    import torch.distributed as dist
    from orc.runtime.observe.flight_recorder import flight_record, last_collectives, record_collectives
    from orc.runtime.observe.whereabouts import main_place

    record_collectives()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    time.sleep(1)  # NCCL's watchdog notes that it is done
    before = last_collectives(flight_record())
    seen = []

    def look():
        until = time.monotonic() + 10
        while time.monotonic() < until and (not seen or seen[-1][0] != "synchronize"):
            seen.append((main_place().activity, last_collectives(flight_record())))

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
