"""From a laptop to the first all-reduce on four SSH hosts, against ssh, rsync and torchrun by hand; 64 hosts started.

    python tests/benchmarks/bench_hosts.py [turns]

as root: it brings up a hosts testbed (tests/testbed/hosts) of its own and measures on that testbed's laptop. By hand
means: to all hosts in parallel `rsync` of the project and then `torchrun` over `ssh`, with the address and port of the
first host known beforehand. `orc submit` does the same job: same script, same virtual environment, same number of
ranks, `launcher: torchrun`. Both are warm: the hosts have the project already. Connecting is part of both.

64 hosts are simulated by four: 16 addresses and 16 roots each, so that 64 logins are made, 64 stores filled and 64
agents started. Started means that all ranks have begun. One machine does for 64 what 64 would do each for itself, so
the row says more about its processors than about a real cluster. What nobody can do without is measured beside it: 64
logins that start a Python which imports json, and 64 ranks.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parent / "testbed" / "hosts"
sys.path[:0] = [str(HERE), str(TESTBED), str(TESTBED.parent), str(HERE.parent / "e2e")]

from command_line import Orc  # noqa: E402
from harness import Row, on_a_laptop, paired, report  # noqa: E402
from hosts_testbed import HostsTestbed, eventually  # noqa: E402

from orc.launchers.remote.ssh.fanout import LIMIT  # noqa: E402

TURNS = 5
SUBMIT_BUDGET, START_BUDGET_S = 1.15, 10.0
PORT = 29511
SCRIPT = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
if dist.get_rank() == 0:
    print("first all-reduce", time.time(), flush=True)
dist.destroy_process_group()
"""
BEGIN = """
import os, pathlib, time
print("begun", time.time(), flush=True)
"""


def first_all_reduce(text: str) -> float | None:
    """When it was, from what rank 0 has printed."""
    lines = [line for line in text.splitlines() if "first all-reduce" in line]
    return float(lines[0].split()[-1]) if lines else None


class Lab:
    """Both ways to run the script on four hosts."""

    def __init__(self, hosts: HostsTestbed, scratch: Path, launcher: str = "torchrun") -> None:
        self.hosts = hosts
        self.project = scratch / f"project-{launcher}"
        for number in range(200):
            path = self.project / f"package_{number % 10}/module_{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"VALUE = {number}\n" * 100)
        (self.project / "logs").mkdir()
        self.laptop = Orc(self.project, hosts.cluster())
        size = {"nodes": len(hosts.names), "procs_per_node": 1}
        self.laptop.write_job(SCRIPT, launcher=launcher, resources=size)

    def orc(self) -> float:
        """Seconds from `orc submit` to the first all-reduce."""
        began = time.time()
        job = self.laptop.submit()
        log = self.hosts.root(self.hosts.names[0]) / "jobs" / job / "a1/logs/rank-0.log"
        took = eventually(lambda: log.exists() and first_all_reduce(log.read_text()), every_s=0.02) - began
        self.laptop("wait", job)
        return took

    def by_hand(self) -> float:
        """Seconds from the first command to the first all-reduce."""
        ssh = f"ssh -F {self.hosts.ssh_config}"
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes {len(self.hosts.names)} --nproc-per-node 1"
        meet = f"--master-addr {self.hosts.address(self.hosts.names[0])} --master-port {PORT}"
        began = time.time()
        running = [
            subprocess.Popen(
                f"rsync -a -e '{ssh}' {self.project}/ {host}:by-hand/ && {ssh} {host} "
                f"'cd by-hand && {torchrun} --node-rank {rank} {meet} train.py'",
                shell=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(self.hosts.names)
        ]
        said = [process.communicate() for process in running]
        assert [process.returncode for process in running] == [0] * len(running), said
        at = first_all_reduce(said[0][0])
        assert at is not None, said
        return at - began


def to_first_all_reduce(hosts: HostsTestbed, scratch: Path, turns: int) -> list[Row]:
    rows = []
    for launcher, budget in (("torchrun", SUBMIT_BUDGET), ("python", None)):
        lab = Lab(hosts, scratch, launcher)
        ours, theirs, ratio = paired(lab.orc, lab.by_hand, turns)
        what = f"orc submit to 4 hosts ({launcher}), first all-reduce"
        rows.append(Row(what, "ssh, rsync, torchrun by hand", ours, theirs, "s", ratio, budget))
    return rows


@contextmanager
def simulated(hosts: HostsTestbed, directory: Path, count: int) -> Iterator[list[dict[str, Any]]]:
    """*count* hosts with addresses and roots of their own, and the SSH configuration for them in *directory*."""
    each = count // len(hosts.names)
    prefix = hosts.address(hosts.names[0]).rpartition(".")[0]
    config = []
    found: list[dict[str, Any]] = []
    for node, name in enumerate(hosts.names):
        addresses = [f"{prefix}.{100 + each * node + number}" for number in range(each)]
        hosts.run_on(name, "/bin/sh", "-c", " && ".join(f"ip addr replace {a}/24 dev eth0" for a in addresses))
    for number in range(count):  # in turn: neighbours are logged in to at the same time
        node, own = number % len(hosts.names), f"sim{number}"
        address = f"{prefix}.{100 + each * node + number // len(hosts.names)}"
        found.append({"name": own, "address": address, "root": f"/home/trainer/{own}"})
        config += [f"Host {own}", f"    HostName {address}", f"    HostKeyAlias {hosts.names[node]}"]
    config += ["Host *", "    User trainer", f"    IdentityFile {hosts.identity}", "    IdentitiesOnly yes"]
    config += [f"    UserKnownHostsFile {hosts.known_hosts}"]
    (directory / "ssh_config").write_text("\n".join(config))
    try:
        yield found
    finally:
        for name in hosts.names:
            own = hosts.address(name)
            hosts.run_on(name, "/bin/sh", "-c", f"ip addr flush dev eth0 secondary; ip addr replace {own}/24 dev eth0")


def bare(hosts: HostsTestbed, described: list[dict[str, Any]], scratch: Path) -> float:
    """Seconds in which plain `ssh`, to as many hosts at a time as orc, has run a Python on each that imports json and
    starts one that prints what a rank prints."""
    rank = f"import json, subprocess, sys; subprocess.run([sys.executable, '-c', {BEGIN!r}])"
    command = shlex.join([sys.executable, "-I", "-S", "-c", rank])

    def start(host: dict[str, Any]) -> float:
        argv = ["ssh", "-F", str(scratch / "ssh_config"), host["name"], command]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
        return float(done.stdout.split()[1])

    began = time.time()
    with ThreadPoolExecutor(LIMIT) as pool:
        return max(pool.map(start, described)) - began


def started(hosts: HostsTestbed, scratch: Path, count: int = 64, turns: int = 3) -> Row:
    """`orc submit` of a job of *count* nodes, on hosts that have the files."""
    project = scratch / "many"
    project.mkdir()
    with simulated(hosts, scratch, count) as described:
        options = {"hosts": described, "ssh_config": str(scratch / "ssh_config"), "connect_timeout": 10}
        laptop = Orc(project, hosts.cluster(**options))
        laptop.write_job(BEGIN, resources={"nodes": count, "procs_per_node": 1})
        ours, least = [], []
        for _ in range(turns + 1):
            began = time.time()
            job = laptop.submit()
            logs = [
                hosts.home(hosts.names[node % len(hosts.names)]) / f"sim{node}/jobs/{job}/a1/logs/rank-{node}.log"
                for node in range(count)
            ]
            ours.append(max(eventually(lambda logs=logs: begun(logs), timeout_s=300, every_s=0.2)) - began)
            laptop("wait", job)
            least.append(bare(hosts, described, scratch))
    what, other = f"orc submit to {count} simulated hosts, all begun", "ssh and two Pythons on each"
    mine, theirs = statistics.median(ours[1:]), statistics.median(least[1:])  # the first brings the files
    return Row(what, other, mine, theirs, "s", mine / theirs, START_BUDGET_S, "ours")


def begun(logs: list[Path]) -> list[float]:
    """When all ranks have begun; empty as long as one has not."""
    words = [log.read_text().split() if log.exists() else [] for log in logs]
    return [float(said[1]) for said in words] if all(len(said) > 1 for said in words) else []


def measure(turns: int) -> None:
    """On the laptop."""
    hosts = HostsTestbed(Path(os.environ["HOSTS_LAPTOP"]))
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(ORC_STATE_DIR=f"{directory}/state", ORC_CONFIG_DIR=f"{directory}/config")
        try:
            report([*to_first_all_reduce(hosts, Path(directory), turns), started(hosts, Path(directory))])
        finally:
            hosts.clean()


if __name__ == "__main__":
    sys.exit(on_a_laptop(__file__, measure, TURNS))
