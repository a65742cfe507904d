"""Agents on a host without a scheduler: started in the background, on slots of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from polling import until

from orc.launchers.agent.gpus import gpu_names, own_part
from orc.launchers.agent.processes import signal_process
from orc.launchers.agent.procfs import is_running
from orc.launchers.agent.start import Slots

from .conftest import AGENT, TOKEN

IDLE = """
import os, time
print("ready", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
while True:
    time.sleep(0.1)
"""


def ask(*words):
    done = subprocess.run([sys.executable, "-I", "-S", AGENT, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout), done.stderr


def start(job, owner="ssh:orc-job-1-a1"):
    return ask("start", job.directory / "agent.json", "--node-rank", "0", "--owner", owner)


def lease(job):
    return job.record("lease.json") or {}


def over(job):
    held = lease(job)
    return not is_running(held["pid"], held["pid_start"], held["boot_id"])


SPLIT = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
  MIG 3g.20gb     Device  0: (UUID: MIG-b1)
  MIG 3g.20gb     Device  1: (UUID: MIG-b2)
"""


@pytest.fixture
def placed(attempt):
    """``placed(number, take, total)``: attempts of several jobs on one host."""
    made = []

    def make(number=1, take=1, total=2, script=IDLE, **changes):
        if not made:
            first = attempt(script)
        else:
            first = made[0]
            first = type(first)(first.root, json.loads(json.dumps(first.config)))
        job_dir = f"{first.root}/jobs/job-{number}"
        changes = {
            "job": f"job-{number}",
            "marker": f"orc-job-{number}-a1",
            "job_dir": job_dir,
            "attempt_dir": f"{job_dir}/a1",
            "hosts": [{"name": "gpu1", "address": "10.0.0.1"}],
            "slots": {"total": {"gpu1": total}, "take": take, "gpus": True},
            **changes,
        }
        made.append(first.write(**changes))
        return made[-1]

    yield make
    for job in made:
        if lease(job) and not over(job):
            signal_process(lease(job)["pid"], signal.SIGKILL)
        until(lambda job=job: not job.remains())


def test_an_agent_is_started_in_the_background_and_says_so_in_one_line(placed):
    job = placed()
    status, answer, _ = start(job)
    assert (status, answer["state"], answer["pid"]) == (0, "held", lease(job)["pid"])
    job.until_log("ready 0")
    os.kill(answer["pid"], signal.SIGTERM)
    until(lambda: over(job))
    assert job.exit()["outcome"] == "preempted"


def test_a_second_copy_is_told_who_has_it(placed):
    job = placed()
    start(job)
    job.until_log("ready")
    status, answer, _ = start(job)
    assert (status, answer["state"], answer["alive"]) == (76, "taken", True)
    assert answer["holder"]["owner"] == "ssh:orc-job-1-a1"
    assert answer["holder"]["pid"] == lease(job)["pid"]
    os.kill(lease(job)["pid"], signal.SIGKILL)
    until(lambda: over(job))
    (job.directory / "secrets.json").write_text("{}")
    assert start(job)[1]["alive"] is False
    assert not (job.directory / "secrets.json").exists(), "nobody is left to remove what was just brought"


def test_slots_are_shared_until_they_are_all_taken_and_come_back(placed):
    first, second, third = placed(1), placed(2), placed(3)
    assert [start(job)[0] for job in (first, second)] == [0, 0]
    first.until_log("ready 0")
    second.until_log("ready 1")
    (third.directory / "secrets.json").write_text("{}")
    status, answer, _ = start(third)
    assert (status, answer) == (78, {"state": "busy", "holders": ["orc-job-1-a1", "orc-job-2-a1"]})
    assert not (third.directory / "secrets.json").exists()
    assert not (third.directory / "node-0/lease.json").exists()
    os.kill(lease(first)["pid"], signal.SIGKILL)
    until(lambda: start(third)[0] == 0, what="the slot of the killed agent")
    third.until_log("ready 0")


def test_a_job_that_takes_the_whole_host_sees_all_devices(placed):
    job = placed(take=2)
    assert start(job)[0] == 0
    job.until_log("ready None")
    assert start(placed(2))[1]["holders"] == ["orc-job-1-a1"]


def test_more_slots_than_the_host_has_are_refused(placed):
    status, answer, _ = start(placed(take=3))
    assert (status, answer["state"]) == (77, "failed")
    assert answer["reason"] == "the job takes 3 slots of this host, which has 2"


def test_gpus_of_a_host_are_taken_by_uuid_and_only_as_many_as_it_has(placed, nvidia_smi):
    nvidia_smi(SPLIT)
    first, second, third = placed(1, total=64), placed(2, total=64, take=2), placed(3, total=64)
    assert [start(job)[0] for job in (first, second)] == [0, 0]
    first.until_log("ready GPU-aaaa")
    second.until_log("ready MIG-b1,MIG-b2")
    assert start(third)[1] == {"state": "busy", "holders": ["orc-job-1-a1", "orc-job-2-a1"]}
    status, answer, _ = start(placed(4, total=64, take=4))
    assert (status, answer["reason"]) == (77, "the job takes 4 GPUs of this host, which has 3")


def test_each_rank_sees_its_own_of_several_mig_devices_also_where_the_job_has_all(placed, nvidia_smi):
    nvidia_smi(SPLIT.partition("\n")[2].replace("GPU 1", "GPU 0"))
    job = placed(1, take=2, total=2, nproc=2)
    assert start(job)[0] == 0
    for rank, name in enumerate(("MIG-b1", "MIG-b2")):
        job.until_log(f"ready {name}\n", rank)


def test_gpus_that_are_whole_are_shown_to_every_rank():
    assert own_part({"CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb"}, 1, 2) == own_part({}, 0, 2) == {}
    assert own_part({"CUDA_VISIBLE_DEVICES": "MIG-b1,MIG-b2"}, 0, 1) == {}  # a process that starts its own
    assert own_part({"CUDA_VISIBLE_DEVICES": "GPU-aaaa,MIG-b2"}, 0, 2) == {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}


def test_a_gpu_is_not_handed_out_under_a_number_where_nvidia_smi_fails(placed, nvidia_smi):
    nvidia_smi("Failed to initialize NVML: Driver/library version mismatch", status=18)
    status, answer, _ = start(placed())
    assert (status, answer["state"]) == (77, "failed")
    assert answer["reason"] == "nvidia-smi -L: Failed to initialize NVML: Driver/library version mismatch"


def test_only_the_gpus_that_the_environment_leaves_are_taken(nvidia_smi):
    nvidia_smi(SPLIT)
    names = ["GPU-aaaa", "MIG-b1", "MIG-b2"]
    assert gpu_names(os.environ) == names
    chosen = {"1": names[1:], "1,0": ["MIG-b1", "MIG-b2", "GPU-aaaa"], "MIG-b2": ["MIG-b2"], "0,-1,1": names[:1]}
    for text, left in {**chosen, "": [], "7": []}.items():
        assert gpu_names({**os.environ, "CUDA_VISIBLE_DEVICES": text}) == left, text


def test_a_linked_attempt_without_its_token_does_not_start(placed):
    job = placed(link=True, nnodes=2)
    status, answer, _ = start(job)
    assert (status, answer["state"]) == (77, "failed")
    assert "link.json is missing" in answer["reason"]
    assert not lease(job)
    assert start(placed(2, link=False, nnodes=1))[0] == 0, "its slot is free"


def test_who_comes_later_learns_where_node_0_can_be_reached(placed):
    job = placed(link=True, nnodes=2)
    (job.directory / "link.json").write_text(json.dumps({"token": TOKEN}))
    first, again = start(job)[1], start(job)[1]
    assert (first["state"], again["state"]) == ("held", "taken")
    assert (again["port"], again["addresses"]) == (first["port"], first["addresses"])


def test_nothing_confidential_stays_after_a_job_of_one_node(placed):
    job = placed(link=True, script="pass", secrets=["TOKEN"])
    (job.directory / "link.json").write_text(json.dumps({"token": TOKEN}))
    (job.directory / "secrets.json").write_text('{"TOKEN": "x"}')
    assert start(job)[0] == 0
    until(lambda: over(job))
    assert job.exit()["outcome"] == "succeeded"
    assert not (job.directory / "link.json").exists()
    assert not (job.directory / "secrets.json").exists()


def test_two_starts_at_once_have_one_winner(placed):
    job = placed(take=2)
    argv = [sys.executable, "-I", "-S", AGENT, "start", job.directory / "agent.json", "--node-rank", "0"]
    argv += ["--owner", "ssh:orc-job-1-a1"]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [json.loads(process.communicate(timeout=60)[0])["state"] for process in both]
    assert answers.count("held") == 1
    assert set(answers) <= {"held", "taken", "busy"}


def test_slots_belong_to_one_machine_though_its_root_be_shared(tmp_path):
    slots = Slots(str(tmp_path))
    assert slots.take(["0", "1"], 1, "orc-a-a1") == []
    assert (tmp_path / "slots" / os.uname().nodename / "0").exists()
    again = Slots(str(tmp_path))
    assert again.take(["0", "1"], 2, "orc-b-a1") == ["orc-a-a1"]
    assert again.held == {}, "all or nothing"
    slots.close()
    assert again.take(["0", "1"], 2, "orc-b-a1") == []
    again.close()
