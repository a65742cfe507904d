"""From a laptop to bare hosts over SSH, end to end through the command line: 2 hosts, one process on each."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from command_line import Orc
from hosts_testbed import HostsTestbed, eventually

from orc.orchestrator.engine import steps

SIZE = ("--set", "resources.nodes=2", "--set", "resources.procs_per_node=1")
# Appends a line to a file beside the working copy; each host has its own.
ONCE = """
import os, pathlib, time
with open(pathlib.Path(os.environ["ORC_JOB_DIR"], "ran"), "a") as file:
    file.write(os.environ["ORC_ATTEMPT"] + os.environ["RANK"] + "\\n")
time.sleep(0.5)
"""
WAITING = """
import signal, sys, time
def end(*_):
    print("saving", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def laptop(hosts: HostsTestbed, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, hosts.cluster(connect_timeout=8))


@pytest.fixture
def another_laptop(laptop: Orc, tmp_path: Path) -> Orc:
    """It shares nothing with the first but the ledger and the cluster."""
    home = tmp_path / "another"
    home.mkdir()
    env = {"ORC_STATE_DIR": str(home / "state"), "ORC_CONFIG_DIR": str(home / "config")}
    laptop.env["ORC_LEDGER_URL"] = env["ORC_LEDGER_URL"] = f"sqlite:///{tmp_path}/ledger.db"
    return Orc(home, laptop.cluster, env)


def runs(hosts: HostsTestbed, job: str) -> list[str]:
    """What the ranks of a job with the script `ONCE` have written, over all hosts: attempt and rank."""
    files = [hosts.root(name) / "jobs" / job / "ran" for name in hosts.names]
    return sorted(line for file in files if file.exists() for line in file.read_text().split())


def test_a_failing_rank_is_named_with_its_host_and_traceback(laptop: Orc) -> None:
    laptop.write_job(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise ValueError('the loss is not a number')\n"
        "time.sleep(1000)\n"  # nobody waits for this one
    )
    laptop("submit", "job.yaml", "--cluster", "lab", *SIZE, "--follow", status=1)
    view = laptop.job("@last")
    failure = view["attempts"][0]["exit"]["first_failure"]
    assert (view["state"], view["attempts"][0]["cause"]) == ("FAILED", "crash")
    assert (failure["rank"], failure["host"], failure["exit_code"]) == (1, "node2", 1)
    text = laptop("status", "@last", status=(0, 1))
    assert "rank 1 on node2 exited with 1" in text
    assert "ValueError: the loss is not a number" in text
    assert 'train.py", line 3' in text


def test_a_job_goes_on_without_the_laptop_and_is_picked_up_by_another(laptop: Orc, another_laptop: Orc) -> None:
    laptop.write_job(WAITING)
    job = laptop.submit(*SIZE)
    another_laptop.until_log(job, 1, "up")
    assert another_laptop.job(job)["attempts"][0]["hosts"] == ["node1", "node2"]
    another_laptop("cancel", job)
    another_laptop("wait", job, status=3)
    assert laptop.job(job)["state"] == "CANCELLED"
    assert [laptop.log(job, rank).split() for rank in (0, 1)] == [["up", "saving"]] * 2


def test_a_laptop_that_has_lost_its_ledger_adopts_its_job_once_the_hosts_answer_again(
    laptop: Orc, hosts: HostsTestbed, tmp_path: Path
) -> None:
    laptop.write_job(ONCE)
    job = laptop.submit(*SIZE)
    for name in hosts.names:
        hosts.fault("cut", name)
    state, kept = Path(laptop.env["ORC_STATE_DIR"]), tmp_path / "kept"
    for name in ("jobs", "store"):
        shutil.copytree(state / name, kept / name)
    back = Orc(laptop.directory, laptop.cluster, {"ORC_STATE_DIR": str(kept)})
    assert "does not answer" in back("adopt", status=1)
    for name in hosts.names:
        hosts.fault("heal", name)
    (adopted,) = json.loads(back("adopt", "--json"))["jobs"]
    assert (adopted["job"], adopted["attempts"]) == (job, 1)
    back("wait", job)
    assert back.job(job)["state"] == "SUCCEEDED"
    assert runs(hosts, job) == ["10", "11"]


@pytest.mark.parametrize("point", ["prepared", "staged", "submitting", "submitted"])
def test_a_laptop_killed_while_it_submits_runs_the_job_once(laptop: Orc, hosts: HostsTestbed, point: str) -> None:
    laptop.write_job(ONCE)
    args = ("submit", "job.yaml", "--cluster", "lab", *SIZE)
    with laptop.start(*args, env={steps.FAULT_POINT: point}) as killed:
        assert killed.wait(240) == -signal.SIGKILL
    (job,) = [job["id"] for job in json.loads(laptop("list", "--json"))["jobs"]]
    laptop("wait", job)
    assert runs(hosts, job) == ["10", "11"]


def test_laptops_killed_at_random_moments_run_each_job_once_or_promised_nothing(
    laptop: Orc, hosts: HostsTestbed
) -> None:
    laptop.write_job(ONCE)
    chance = random.Random(4)
    for _ in range(6):
        with laptop.start("submit", "job.yaml", "--cluster", "lab", *SIZE) as process:
            time.sleep(chance.uniform(0.3, 1.5))
            process.kill()
    jobs = [job["id"] for job in json.loads(laptop("list", "--json"))["jobs"]]
    for job in jobs:
        laptop("wait", job)
        assert runs(hosts, job) == ["10", "11"]


def test_a_submission_that_dies_between_two_hosts_is_completed(laptop: Orc, hosts: HostsTestbed) -> None:
    """The second host falls silent when it has its files; the agent of the first is started; the laptop dies."""
    laptop.write_job(ONCE)
    with laptop.start("submit", "job.yaml", "--cluster", "lab", *SIZE) as process:
        eventually(lambda: list(hosts.root("node2").glob("jobs/*/a1/link.json")), every_s=0.001)
        hosts.fault("drop", "node2")
        eventually(lambda: list(hosts.root("node1").glob("jobs/*/a1/node-0/lease.json")), every_s=0.001)
        process.kill()
    hosts.fault("heal", "node2")
    (job,) = [job["id"] for job in json.loads(laptop("list", "--json"))["jobs"]]
    laptop("wait", job)
    assert runs(hosts, job) == ["10", "11"]


def test_a_second_job_waits_for_the_hosts_and_then_runs(laptop: Orc, hosts: HostsTestbed) -> None:
    laptop.write_job(WAITING)
    whole = ("--set", "resources.nodes=4", "--set", "resources.procs_per_node=1")
    first = laptop.submit(*whole)
    laptop.write_job(ONCE)
    second = laptop.submit(*SIZE)
    view = laptop.job(second)
    assert view["state"] == "QUEUED"
    assert "waiting for" in view["reason"]
    assert first in view["reason"]
    laptop("cancel", first)
    laptop("wait", second)
    assert runs(hosts, second) == ["10", "11"]


def test_an_unreachable_host_is_named(laptop: Orc, hosts: HostsTestbed) -> None:
    hosts.fault("crash", "node2")
    checked = json.loads(laptop("clusters", "check", "lab", "--json", status=1))
    assert [host["name"] for host in checked["hosts"] if not host["reached"]] == ["node2"]
    assert [finding["where"] for finding in checked["findings"] if finding["level"] == "error"] == ["node2"]
    text = laptop("clusters", "check", "lab", status=1)
    assert re.search(r"^node1 +yes +trainer +3\.\d+", text, re.MULTILINE)
    assert re.search(r"^node2 +no", text, re.MULTILINE)


# The first attempt goes on until it is told to end; the next ones end at once.
PATIENT = """
import os, pathlib, time
print("up", flush=True)
while os.environ["ORC_ATTEMPT"] == "1" and not pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
    time.sleep(0.1)
"""


def test_sshd_may_be_stopped_while_a_job_runs(laptop: Orc, hosts: HostsTestbed) -> None:
    laptop.write_job(PATIENT + "print('more', flush=True)\n")
    job = laptop.submit(*SIZE)
    laptop.until_log(job, 1, "up")
    hosts.fault("stop-sshd", "node2")
    hosts.fault("stop-sshd", "node1")
    assert "no answer" in laptop.job(job)["reason"]
    for name in ("node1", "node2"):
        (hosts.root(name) / "jobs" / job / "go").touch()
    hosts.fault("start-sshd", "node1")
    laptop("wait", job)  # node 0 knows how the other one has ended
    hosts.fault("start-sshd", "node2")
    assert laptop.job(job)["state"] == "SUCCEEDED"
    assert laptop.log(job, 1) == "up\nmore\n"


def test_a_changed_host_key_refuses_the_host_and_says_so(laptop: Orc, hosts: HostsTestbed) -> None:
    hosts.fault("rekey", "node2")
    laptop.write_job(ONCE)
    args = ("--set", "resources.options.ssh.hosts=[node1, node2]")
    with laptop.start("submit", "job.yaml", "--cluster", "lab", *SIZE, *args) as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode not in (0, 70)
    assert "node2" in err
    assert "host key" in err
    assert "Traceback" not in err
