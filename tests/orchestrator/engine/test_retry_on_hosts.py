"""Next attempts by another laptop, and hosts that two ledgers want: on real hosts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import Orc
from hosts_testbed import HostsTestbed, eventually

# The first attempt stays until something happens to it; later ones end well.
FIRST_STAYS = """
import os, time
print("up", flush=True)
while os.environ["ORC_ATTEMPT"] == "1":
    time.sleep(0.1)
"""
FAILS_WHEN_TOLD = """
import os, pathlib, time
print("up", flush=True)
while os.environ["ORC_ATTEMPT"] == "1":
    if pathlib.Path(os.environ["ORC_JOB_DIR"], "go").exists():
        raise SystemExit("told to fail")
    time.sleep(0.1)
print(open("numbers/one.txt").read())
"""
# Says when a job was on a host, in a file that all jobs of that host share.
OCCUPY = """
import os, pathlib, time
log = pathlib.Path(os.environ["ORC_JOB_DIR"]).parent / "occupied"
with open(log, "a") as file:
    file.write(f"+{os.environ['ORC_JOB_ID']}\\n")
    file.flush()
    time.sleep(1.5)
    file.write(f"-{os.environ['ORC_JOB_ID']}\\n")
"""


def nodes(count: int) -> tuple[str, ...]:
    return ("--set", f"resources.nodes={count}", "--set", "resources.procs_per_node=1")


@pytest.fixture
def laptop(hosts: HostsTestbed, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, hosts.cluster(connect_timeout=8, peer_timeout=10))


@pytest.fixture
def stranger(laptop: Orc, tmp_path: Path) -> Orc:
    """Another laptop with a ledger of its own."""
    home = tmp_path / "stranger"
    home.mkdir()
    env = {"ORC_STATE_DIR": str(home / "state"), "ORC_CONFIG_DIR": str(home / "config")}
    return Orc(home, laptop.cluster, env)


@pytest.mark.slow
def test_another_laptop_makes_the_next_attempt_when_the_first_was_thrown_away(
    laptop: Orc, stranger: Orc, hosts: HostsTestbed, tmp_path: Path
) -> None:
    laptop.env["ORC_LEDGER_URL"] = stranger.env["ORC_LEDGER_URL"] = f"sqlite:///{tmp_path}/ledger.db"
    (laptop.directory / "numbers").mkdir()
    (laptop.directory / "numbers" / "one.txt").write_text("the first number")
    laptop.write_job(FAILS_WHEN_TOLD, retry={"on": ["crash"], "max_attempts": 2, "backoff": 0})
    job = laptop.submit(*nodes(2))
    laptop.until_log(job, 0, "up")
    shutil.rmtree(laptop.env["ORC_STATE_DIR"])
    shutil.rmtree(laptop.directory)
    (hosts.root("node1") / "jobs" / job / "go").touch()
    stranger("wait", job)
    assert [a["state"] for a in stranger.job(job)["attempts"]] == ["FAILED", "SUCCEEDED"]
    assert stranger.log(job, 1).split("\n")[-2] == "the first number"


@pytest.mark.slow
def test_two_laptops_with_ledgers_of_their_own_never_share_a_host(
    laptop: Orc, stranger: Orc, hosts: HostsTestbed
) -> None:
    for orc in (laptop, stranger):
        orc.write_job(OCCUPY)
    args = ("submit", "job.yaml", "--cluster", "lab", "--follow", *nodes(4))
    with laptop.start(*args) as one, stranger.start(*args) as two:
        results = [process.communicate(timeout=400) for process in (one, two)]
    assert [process.returncode for process in (one, two)] == [0, 0], results
    views = [orc.job("@last") for orc in (laptop, stranger)]
    assert [len(view["attempts"]) for view in views] == [1, 1]
    for host in hosts.names:
        told = (hosts.root(host) / "jobs" / "occupied").read_text().split()
        assert sorted(told[0:2]) == sorted([f"+{told[0][1:]}", f"-{told[0][1:]}"]), (host, told)
        assert len(told) == 4


@pytest.mark.slow
def test_a_host_that_a_stranger_uses_is_passed_over(laptop: Orc, stranger: Orc, hosts: HostsTestbed) -> None:
    stranger.write_job(FIRST_STAYS)
    theirs = stranger.submit(*nodes(1))
    stranger.until_log(theirs, 0, "up")
    laptop.write_job("print('done')")
    ours = laptop.submit(*nodes(2))
    laptop("wait", ours)
    assert stranger.job(theirs)["attempts"][0]["hosts"] == ["node1"]
    assert laptop.job(ours)["attempts"][0]["hosts"] == ["node2", "node3"]
    laptop.write_job("print('done')")
    all_of_them = laptop.submit(*nodes(4))
    waiting = laptop.job(all_of_them)
    assert waiting["state"] == "PREPARED"
    assert f"held by orc-{theirs}-a1" in waiting["reason"]
    stranger("cancel", theirs)
    laptop("wait", all_of_them)
    eventually(lambda: laptop.job(all_of_them)["state"] == "SUCCEEDED")
    assert len(laptop.job(all_of_them)["attempts"]) == 1
