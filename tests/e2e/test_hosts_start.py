"""An agent on a host over SSH: whoever started it has left nothing in it, and it can be seen for what it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_line import Orc
from hosts_testbed import HostsTestbed, eventually

SIGPIPE_AND_SIGXFSZ = 1 << 12 | 1 << 24  # ignored by every Python
STANDARD = (1 << 31) - 1  # the others are the business of the C library, and of who has started sshd
WAITING = """
import time
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))], flush=True)
while True:
    time.sleep(0.1)
"""
# Stopped meanwhile: it opens and closes files all the time.
SEEN = """
import json, os, signal, sys, time
there, state = "/proc/" + sys.argv[1], ""
os.kill(int(sys.argv[1]), signal.SIGSTOP)
while state != "T":
    time.sleep(0.001)
    stat = open(there + "/stat").read().rpartition(")")[2].split()
    state = stat[0]
status = dict(line.split(":", 1) for line in open(there + "/status").read().splitlines())
files = {fd: os.readlink(there + "/fd/" + fd) for fd in os.listdir(there + "/fd")}
local = {"socket:[" + line.split()[6] + "]" for line in open("/proc/net/unix").read().splitlines()[1:]}
print(json.dumps({
    "command": [word for word in open(there + "/cmdline").read().split(chr(0)) if word],
    "parent": int(stat[1]), "group": int(stat[2]), "session": int(stat[3]), "terminal": int(stat[4]),
    "ignored": int(status["SigIgn"], 16), "threads": int(status["Threads"]),
    "files": files, "local": [path for path in files.values() if path in local],
    "environment": sorted(word.partition("=")[0] for word in open(there + "/environ").read().split(chr(0)) if word),
}))
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


@pytest.fixture
def laptop(hosts: HostsTestbed, tmp_path: Path) -> Orc:
    directory = tmp_path / "job"
    directory.mkdir()
    return Orc(directory, hosts.cluster(connect_timeout=8, peer_timeout=10))


def test_an_agent_belongs_to_nobody_and_is_seen_for_what_it_is(laptop: Orc, hosts: HostsTestbed) -> None:
    laptop.write_job(WAITING, resources={"nodes": 1, "procs_per_node": 1})
    job = laptop.submit()  # connected no more
    attempt = hosts.root("node1") / "jobs" / job / "a1"
    log = attempt / "logs/rank-0.log"
    blocked, ignored = json.loads(eventually(lambda: log.exists() and log.read_text().replace("'", '"')))
    assert (int(blocked, 16), int(ignored, 16) & STANDARD) == (0, SIGPIPE_AND_SIGXFSZ)

    pid = json.loads((attempt / "node-0/lease.json").read_text())["pid"]
    eventually(lambda: not any("exec(" in command for command in hosts.processes("node1").values()))
    seen = json.loads(hosts.run_on("node1", sys.executable, "-c", SEEN, str(pid)))
    tree = json.loads((attempt / "agent.json").read_text())["runtime_tree"]
    there = f"/home/trainer/orc/jobs/{job}/a1"
    orders = ["start", f"{there}/agent.json", "--node-rank", "0", "--owner", f"ssh:orc-{job}-a1"]
    assert seen["command"] == [sys.executable, "-I", "-S", tree, *orders]
    assert (seen["parent"], seen["session"], seen["group"], seen["terminal"]) == (1, pid, pid, 0)
    assert (seen["ignored"] & STANDARD, seen["threads"]) == (SIGPIPE_AND_SIGXFSZ, 1)
    assert seen["files"]["0"] == "/dev/null"
    assert seen["files"]["1"] == seen["files"]["2"] == f"{there}/logs/node-0.log"
    assert seen["local"] == []
    assert len([path for path in seen["files"].values() if path.startswith("pipe:")]) == 2, "to its guard and from it"
    assert not [name for name in seen["environment"] if name.startswith("ORC_")]

    laptop("cancel", job)
    laptop("wait", job, status=3)
    eventually(lambda: not hosts.processes("node1"))
