"""Whatever breaks on the way from a laptop to bare hosts: the training ends with the weights it would have had.

Each test measures how long it took until the fault was noticed and until the training went on, by the machine's clock;
``--junitxml FILE`` keeps the numbers (docs/explanation/faults.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Orc
from exact_training import Course, Training, undisturbed
from hosts_testbed import USER, HostsTestbed, eventually
from sample_traces import TracedJob

from orc.orchestrator.engine import steps

PEER_TIMEOUT_S = 10
RETRY = {"on": ["node_failure", "crash"], "backoff": 0}
SIZE = ("--set", "resources.nodes=2", "--set", "resources.procs_per_node=1")
# Appends a line to a file beside the working copy; each host has its own.
ONCE = """
import os, pathlib, time
with open(pathlib.Path(os.environ["ORC_JOB_DIR"], "ran"), "a") as file:
    file.write(os.environ["ORC_ATTEMPT"] + os.environ["RANK"] + "\\n")
time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def laptop(hosts: HostsTestbed, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, hosts.cluster(connect_timeout=8, peer_timeout=PEER_TIMEOUT_S))


class Watch:
    """Notes when a fault came, and how long it took until something."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self.began = time.time()

    def broken(self) -> None:
        self.began = time.time()

    def note(self, what: str, at: float | None = None) -> None:
        self._record(what, round((at or time.time()) - self.began, 1))

    def resumed(self, training: Training) -> None:
        """Of a training that needed a second attempt."""
        self.note("noticed_s", training.noticed_at())
        self.note("goes_on_s", training.begun_again_at())


@pytest.fixture
def watch(record_property: Callable[[str, object], None]) -> Watch:
    return Watch(record_property)


def runs(hosts: HostsTestbed, job: str) -> list[str]:
    """What the ranks of a job with the script `ONCE` have written, over all hosts: attempt and rank."""
    files = [hosts.root(name) / "jobs" / job / "ran" for name in hosts.names]
    return sorted(line for file in files if file.exists() for line in file.read_text().split())


def go(hosts: HostsTestbed, job: str, host: str) -> None:
    (hosts.root(host) / "jobs" / job / "go").touch()


# -- in mid-training


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "host", "rank"), [("cut", "node2", 1), ("drop", "node1", 0)])
def test_a_link_that_is_cut_or_silent_for_five_seconds_costs_a_training_nothing_but_the_time(
    laptop: Orc, hosts: HostsTestbed, expected: Course, watch: Watch, fault: str, host: str, rank: int
) -> None:
    laptop = Orc(laptop.directory, hosts.cluster(connect_timeout=8, peer_timeout=20))
    training = Training(laptop)
    training.until_it_holds()
    with laptop.start("logs", training.job, "--rank", str(rank), "--follow") as follower:
        hosts.fault(fault, host)
        time.sleep(5)
        hosts.fault("heal", host)
        watch.broken()
        log = hosts.root(host) / "jobs" / training.job / "a1" / "logs" / f"rank-{rank}.log"
        size = log.stat().st_size
        eventually(lambda: log.stat().st_size > size)
        watch.note("goes_on_s")
        go(hosts, training.job, "node1")
        laptop("wait", training.job)
        shown, said = follower.communicate(timeout=240)
    training.check(expected, attempts=1)
    assert shown == training.log(rank, 1), said  # nothing is missing and nothing is shown twice


def check_that_it_moved(training: Training, hosts: HostsTestbed, lost: str, then: list[str]) -> None:
    """From the host that is *lost*; one of those that it has *then* had nothing before."""
    first, second = training.attempts
    assert (first["state"], first["cause"], first["failed_hosts"]) == ("LOST", "node_failure", [lost])
    assert f"no answer from {lost}" in first["reason"]
    assert sorted(second["hosts"]) == then
    manifests = set()
    for name in then:
        directory = hosts.root(name) / "jobs" / training.job / "checkpoints"
        assert sorted(os.listdir(directory)) == ["checkpoint_1", "checkpoint_2"]  # nothing else, hidden or not
        manifests.add((directory / "checkpoint_2" / "manifest.json").read_text())
    assert len(manifests) == 1


@pytest.mark.slow
def test_a_training_goes_on_exactly_without_the_host_of_rank_0_whatever_the_clocks_say(
    laptop: Orc, hosts: HostsTestbed, expected: Course, watch: Watch
) -> None:
    """It held the store, wrote the logs, and loses its power; of those that are left, one's clock is an hour ahead,
    another's an hour behind: nobody waits longer, and times are the laptop's.
    """
    hosts.fault("skew", "node2", "3600")
    hosts.fault("skew", "node3", "-3600")
    training = Training(laptop, retry=RETRY)
    training.until_it_holds()
    watch.broken()
    hosts.fault("crash", "node1")
    laptop("wait", training.job)
    training.check(expected, attempts=2)
    watch.note("noticed_s", training.noticed_at())
    check_that_it_moved(training, hosts, "node1", ["node2", "node3"])
    for attempt in training.attempts:
        assert abs(attempt["started_at"] - time.time()) < 300
        assert abs(attempt["ended_at"] - time.time()) < 300
        assert attempt["started_at"] <= attempt["ended_at"]


def link_cut(hosts: HostsTestbed, job: str, host: str) -> None:
    hosts.fault("cut", host)


def file_system_hung(hosts: HostsTestbed, job: str, host: str) -> None:
    """The next write of the heartbeat does not return, as where a server of files is away."""
    directory, lease = hosts.lease(job, host)
    pipe = directory / "read-by-nobody"
    os.mkfifo(pipe)
    os.chown(pipe, directory.stat().st_uid, -1)

    def in_its_way() -> bool:
        with contextlib.suppress(FileExistsError):
            (directory / f"heartbeat.json.{host}.{lease['pid']}.tmp").hardlink_to(pipe)
            return True
        return False

    eventually(in_its_way, every_s=0.001)


def agent_frozen(hosts: HostsTestbed, job: str, host: str) -> None:
    hosts.agent(job, host).suspend()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "host"), [(link_cut, "node2"), (file_system_hung, "node2"), (agent_frozen, "node1")])
def test_a_host_that_is_cut_off_frozen_or_whose_files_hang_trains_nothing_beside_the_next_attempt(
    laptop: Orc, hosts: HostsTestbed, watch: Watch, fault: Callable[[HostsTestbed, str, str], None], host: str
) -> None:
    """Its rank needs nobody: it trains on until the fence ends it."""
    job = TracedJob(Orc(laptop.directory, hosts.cluster(connect_timeout=4, peer_timeout=4)), hosts)
    fault(hosts, job.id, host)
    watch.broken()
    laptop("wait", job.id)
    assert host not in job.trained(2)
    last, begin = job.check_one_after_the_other(host, watch.began)
    watch.note("fenced_s", last)
    watch.note("goes_on_s", begin)


def agent_killed(hosts: HostsTestbed, job: str, host: str) -> None:
    hosts.fault("kill-procs", host, "store/trees/[^ ]* start")


def rebooted(hosts: HostsTestbed, job: str, host: str) -> None:
    hosts.fault("crash", host)
    hosts.fault("boot", host)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "host"), [(agent_killed, "node1"), (rebooted, "node2")])
def test_a_host_that_says_itself_that_its_agent_is_gone_is_left_out_without_a_fence(
    laptop: Orc, hosts: HostsTestbed, watch: Watch, fault: Callable[[HostsTestbed, str, str], None], host: str
) -> None:
    job = TracedJob(laptop, hosts)
    watch.broken()
    fault(hosts, job.id, host)
    laptop("wait", job.id)
    first, second = laptop.job(job.id)["attempts"]
    assert (first["state"], first["cause"], first["failed_hosts"]) == ("LOST", "node_failure", [host])
    assert f"the agent on {host} was killed or the host restarted" in first["reason"]
    assert sorted(second["hosts"]) == sorted({"node1", "node2", "node3"} - {host})
    _, begin = job.check_one_after_the_other(host)
    watch.note("goes_on_s", begin)


def test_a_job_whose_rank_is_killed_runs_once_more_though_the_laptop_that_sees_it_is_killed_too(
    laptop: Orc, hosts: HostsTestbed, watch: Watch
) -> None:
    """The laptop dies in the middle of the retry, twice, and the next command goes on from there."""
    script = f"{ONCE}\nprint('up', flush=True)\nwhile os.environ['ORC_ATTEMPT'] == '1':\n    time.sleep(0.05)\n"
    laptop.write_job(script, retry=RETRY, resources={"nodes": 2, "procs_per_node": 1}, grace=2)
    job = laptop.submit()
    for rank in (0, 1):
        laptop.until_log(job, rank, "up\n")
    watch.broken()
    hosts.fault("kill-procs", "node2", "train.py")
    for point in ("prepared", "submitted"):
        with laptop.start("wait", job, env={steps.FAULT_POINT: point}) as killed:
            killed.communicate(timeout=240)
            assert killed.returncode in (0, -signal.SIGKILL), point
    laptop("wait", job)
    watch.note("ended_s")
    view = laptop.job(job)
    first, second = view["attempts"]
    assert (first["state"], first["cause"], second["state"]) == ("FAILED", "crash", "SUCCEEDED")
    assert "rank 1 on node2 was killed by SIGKILL" in first["reason"]
    assert runs(hosts, job) == ["10", "11", "20", "21"]


@pytest.mark.slow
def test_a_training_whose_host_has_a_full_disk_goes_on_exactly_on_another(
    laptop: Orc, hosts: HostsTestbed, expected: Course, watch: Watch
) -> None:
    hosts.fault("full", "node2", "600m")
    training = Training(laptop, retry=RETRY)
    training.until_it_holds()
    hosts.run_on("node2", "sh", "-c", f"cat /dev/zero > /home/{USER}/ballast", check=False)
    watch.broken()
    go(hosts, training.job, "node1")  # the next checkpoint cannot be saved
    laptop("wait", training.job)
    training.check(expected, attempts=2)
    watch.resumed(training)
    first, second = training.attempts
    assert (first["state"], first["cause"]) == ("FAILED", "crash")
    assert "rank 1: OSError: [Errno 28] No space left on device" in training.log(0, 1)  # rank 1 had no room to say so
    assert sorted(second["hosts"]) == ["node1", "node3"]


# -- around the sync


@pytest.fixture
def big(laptop: Orc) -> None:
    """Files that do not get smaller by compressing, so that bringing them takes a while."""
    for number in range(6):
        (laptop.directory / f"part-{number}.bin").write_bytes(random.Random(number).randbytes(2_000_000))


def files_begin_to_arrive(hosts: HostsTestbed, host: str) -> bool:
    return any(hosts.root(host).glob("store/tmp/*"))


def is_held(process: subprocess.Popen[str]) -> bool:
    """Whether it has stopped at its ``ORC_FAULT_HOLD``."""
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert stat[0] != "Z", process.communicate()
    return stat[0] == "T"


@pytest.mark.usefixtures("big")
@pytest.mark.parametrize(
    ("point", "healed"),
    [("prepared", False), ("", True), ("", False), ("staged", False), ("submitting", False)],
    ids=["before", "during, healed", "during", "after", "before the start"],
)
def test_a_link_that_is_cut_around_the_sync_costs_another_host_or_a_wait_and_the_job_runs_once(
    laptop: Orc, hosts: HostsTestbed, watch: Watch, point: str, healed: bool
) -> None:
    """For the moments in between: tests/orchestrator/engine/test_links_cut.py."""
    laptop.write_job(ONCE, retry={"on": ["node_failure"], "backoff": 0})
    if not point:
        hosts.fault("rate", "node2", "5mbit")  # so that it takes half a minute
    args = ("submit", "job.yaml", "--cluster", "lab", "--json", *SIZE)
    with laptop.start(*args, env={steps.FAULT_HOLD: point}) as process:
        eventually(lambda: is_held(process) if point else files_begin_to_arrive(hosts, "node2"))
        hosts.fault("cut", "node2")
        watch.broken()
        process.send_signal(signal.SIGCONT)
        if healed:
            time.sleep(5)
            hosts.fault("heal", "node2")
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
    job = json.loads(out)["id"]
    laptop("wait", job)
    watch.note("ended_s")
    last = laptop.job(job)["attempts"][-1]
    assert runs(hosts, job)[-2:] == [f"{last['number']}0", f"{last['number']}1"]
    assert len(runs(hosts, job)) == 2
    if not healed:
        assert last["hosts"] == ["node1", "node3"]


def ended_in_one_attempt(laptop: Orc) -> tuple[str, dict[str, Any], str]:
    """Submit the job and wait for its end; its id, its attempt, and what the submission complained of."""
    with laptop.start("submit", "job.yaml", "--cluster", "lab", "--json", *SIZE) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    job = json.loads(out)["id"]
    laptop("wait", job)
    (attempt,) = laptop.job(job)["attempts"]
    return job, attempt, err


@pytest.mark.usefixtures("big")
@pytest.mark.parametrize("preflight", [True, False], ids=["seen before the sync", "seen by the sync"])
def test_a_host_whose_disk_is_full_is_left_out(laptop: Orc, hosts: HostsTestbed, preflight: bool) -> None:
    laptop = Orc(laptop.directory, hosts.cluster(connect_timeout=8, preflight=preflight))
    hosts.fault("full", "node2", "8m")
    laptop.write_job(ONCE)
    job, attempt, err = ended_in_one_attempt(laptop)
    assert attempt["hosts"] == ["node1", "node3"]
    assert runs(hosts, job) == ["10", "11"]
    assert "node2" in err


# -- hosts that cannot be used


def test_hosts_that_cannot_be_used_are_named_and_left_out(laptop: Orc, hosts: HostsTestbed) -> None:
    hosts.fault("rekey", "node2")
    listed = [
        {"name": "gone", "address": hosts.free_address(250)},
        "node1",
        "node2",
        {"name": "node3", "python": "/usr/bin/python3"},
        "node4",
    ]
    laptop = Orc(laptop.directory, hosts.cluster(hosts=listed, connect_timeout=8))
    laptop.write_job(ONCE)
    job, attempt, err = ended_in_one_attempt(laptop)
    assert attempt["hosts"] == ["node1", "node4"]
    assert runs(hosts, job) == ["10", "11"]
    for host, why in (("gone", "No route|did not answer"), ("node2", "host key has changed"), ("node3", "no torch")):
        assert re.search(rf"warning: .*({why}).*\n +where: {host}\n", err), err

    only = ("--set", "resources.options.ssh.hosts=[node1, node3]")
    with laptop.start("submit", "job.yaml", "--cluster", "lab", *SIZE, *only) as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode not in (0, 70)
    assert "node3" in err
    assert "torch" in err
    states = {one["id"]: one["state"] for one in json.loads(laptop("list", "--json"))["jobs"]}
    assert states.pop(job) == "SUCCEEDED"
    assert list(states.values()) == ["FAILED"], "the refused one is known, and has ended"
