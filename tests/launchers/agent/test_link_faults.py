"""Agents on real hosts of their own: cuts, power losses, reboots, full disks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts_testbed import USER, HostsTestbed, eventually

from orc.launchers.agent.records import read_json
from orc.launchers.snapshot.runtime_tree import runtime_files

from .conftest import TOKEN

pytestmark = pytest.mark.hosts

IDLE = """
import os, sys, time
print("ready", os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
print("done", flush=True)
"""


class Job:
    """One attempt on the first hosts of the testbed, each with an attempt directory of its own."""

    def __init__(self, testbed: HostsTestbed, script: str, nnodes: int, **changes) -> None:
        self.testbed, self.names = testbed, testbed.names[:nnodes]
        root = f"/home/{USER}/orc"
        self.config = {
            "format": 1,
            "job": "job-1",
            "name": "job",
            "attempt": 1,
            "marker": "orc-job-1-a1",
            "root": root,
            "job_dir": f"{root}/jobs/job-1",
            "attempt_dir": f"{root}/jobs/job-1/a1",
            "code_tree": f"{root}/store/trees/code",
            "runtime_tree": f"{root}/store/trees/runtime",
            "nnodes": nnodes,
            "nproc": 1,
            "python": sys.executable,
            "command": {"spawn": "ranks", "launcher": [], "program": ["{python}", "train.py"], "env": {}},
            "env": {},
            "secrets": [],
            "setup": [],
            "grace_s": 1.0,
            "heartbeat_s": 1.0,
            "peer_timeout_s": 60.0,
            "link": True,
            "hosts": [{"name": name, "address": testbed.address(name)} for name in self.names],
            **changes,
        }
        for name in self.names:
            tree = self.outside(name, "runtime_tree")
            tree.mkdir(parents=True)
            for path, source in runtime_files().items():
                if path == "__main__.py" or path.startswith("lib/orc/launchers/agent/"):
                    (tree / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, tree / path)
            self.outside(name, "code_tree").mkdir()
            (self.outside(name, "code_tree") / "train.py").write_text(script)
            self.outside(name, "attempt_dir").mkdir(parents=True)
            (self.outside(name, "attempt_dir") / "agent.json").write_text(json.dumps(self.config))

    def outside(self, name: str, key: str) -> Path:
        """A directory of the configuration on host *name*, seen from here."""
        return self.testbed.home(name) / os.path.relpath(self.config[key], f"/home/{USER}")

    def start(self) -> None:
        hub = {}
        for node, name in enumerate(self.names):
            (self.outside(name, "attempt_dir") / "link.json").write_text(json.dumps({"token": TOKEN, **hub}))
            self.testbed.run_on(name, "chown", "-R", USER, f"/home/{USER}/orc")
            agent_json = f"{self.config['attempt_dir']}/agent.json"
            words = f"{self.config['runtime_tree']} start {agent_json} --node-rank {node} --owner ssh:orc-job-1-a1"
            argv = ["ssh", "-F", str(self.testbed.ssh_config), name, f"{sys.executable} -I -S {words}"]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
            answer = json.loads(done.stdout or "{}")
            assert answer.get("state") == "held", done.stderr
            if not node:
                assert self.testbed.address(name) in answer["addresses"]
                hub = {"hub": {"port": answer["port"], "addresses": answer["addresses"]}}
        for node in range(len(self.names)):
            eventually(lambda node=node: self.log(node).startswith("ready"))

    def log(self, node: int) -> str:
        path = self.outside(self.names[node], "attempt_dir") / f"logs/rank-{node}.log"
        return path.read_text() if path.exists() else ""

    def node_log(self, node: int) -> str:
        path = self.outside(self.names[node], "attempt_dir") / f"logs/node-{node}.log"
        return path.read_text() if path.exists() else ""

    def exit(self, node: int) -> dict | None:
        return read_json(str(self.outside(self.names[node], "attempt_dir") / f"node-{node}/exit.json"))

    def until_exit(self, node: int, timeout_s: float = 120) -> dict:
        return eventually(lambda: self.exit(node), timeout_s=timeout_s)

    def until_empty(self, node: int) -> None:
        eventually(lambda: not self.testbed.processes(self.names[node]))

    def go(self) -> None:
        for name in self.names:
            (self.outside(name, "job_dir") / "work/go").touch()


@pytest.fixture
def job(hosts):
    return lambda script=IDLE, nnodes=3, **changes: Job(hosts, script, nnodes, **changes)


def test_hosts_meet_at_the_address_and_interface_that_lead_to_node_0(job, hosts):
    three = job()
    three.start()
    three.go()
    assert [three.until_exit(node)["outcome"] for node in range(3)] == ["succeeded"] * 3
    first = hosts.address(three.names[0])
    assert [three.log(node) for node in range(3)] == [f"ready {first} eth0\ndone\n"] * 3


@pytest.mark.parametrize("verb", ["drop", "cut"])
@pytest.mark.parametrize("node", [0, 2])
def test_a_cut_of_five_seconds_ends_nothing(job, hosts, verb, node):
    three = job(peer_timeout_s=20.0, heartbeat_s=2.0)
    three.start()
    hosts.fault(verb, three.names[node])
    time.sleep(5.0)
    hosts.fault("heal", three.names[node])
    time.sleep(2.0)
    assert [three.exit(node) for node in range(3)] == [None] * 3, three.node_log(node)
    three.go()
    assert [three.until_exit(node)["outcome"] for node in range(3)] == ["succeeded"] * 3
    everybody = three.outside(three.names[0], "attempt_dir")
    eventually(lambda: all((everybody / f"node-{node}/exit.json").exists() for node in range(3)))


@pytest.mark.parametrize("node", [0, 2])
def test_a_cut_that_never_heals_stops_both_sides(job, hosts, node):
    three = job(peer_timeout_s=8.0)
    three.start()
    hosts.fault("drop", three.names[node])
    for other in range(3):
        record = three.until_exit(other)
        assert (record["outcome"], record["peer_lost"]) == ("peer", True)
        three.until_empty(other)
    if node:
        assert f"node {node} has been silent for 8 s" in three.exit(0)["reason"]
        assert "node 0 has been silent for 8 s" in three.exit(node)["reason"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_power_loss_is_a_node_failure(job, hosts, node):
    three = job(peer_timeout_s=8.0)
    three.start()
    hosts.fault("crash", three.names[node])
    for other in {0, 1, 2} - {node}:
        record = three.until_exit(other)
        assert (record["outcome"], record["lost_node"]) == ("peer", node)
        three.until_empty(other)


@pytest.mark.parametrize("node", [0, 1])
def test_a_rebooted_host_says_that_its_agent_is_gone(job, hosts, node):
    three = job(peer_timeout_s=400.0)
    three.start()
    hosts.fault("crash", three.names[node])
    time.sleep(1.0)
    hosts.fault("boot", three.names[node])
    for other in {0, 1, 2} - {node}:
        assert three.until_exit(other)["lost_node"] == node


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_agent_takes_its_ranks_along_and_is_noticed_long_before_its_silence_is(job, hosts, node):
    three = job(peer_timeout_s=400.0)
    three.start()
    hosts.fault("kill-procs", three.names[node], "store/trees/runtime start")
    three.until_empty(node)
    for other in {0, 1, 2} - {node}:
        record = three.until_exit(other)
        assert (record["outcome"], record["lost_node"]) == ("peer", node)


def test_a_killed_rank_is_the_first_failure_everywhere(job, hosts):
    three = job()
    three.start()
    hosts.fault("kill-procs", three.names[1], "train.py")
    assert three.until_exit(1)["first_failure"]["signal"] == "SIGKILL"
    for other in (0, 2):
        assert "rank 1 was killed by SIGKILL" in three.until_exit(other)["reason"]
