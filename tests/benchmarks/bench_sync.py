"""Bringing a project to four SSH hosts: cold and unchanged, against rsync to all of them in parallel.

    python tests/benchmarks/bench_sync.py [turns]

as root: it brings up a hosts testbed (tests/testbed/hosts) of its own and measures on that testbed's laptop. Contents
are random, so that nobody gains by compressing. Connecting is part of every measurement on both sides; of ours, so is
scanning the working tree.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTBED = HERE.parent / "testbed" / "hosts"
sys.path[:0] = [str(HERE), str(TESTBED), str(TESTBED.parent)]

from harness import Row, on_a_laptop, report  # noqa: E402
from hosts_testbed import HostsTestbed  # noqa: E402

from orc.launchers.backends.ssh import SshBackend  # noqa: E402
from orc.launchers.snapshot.content_store import ContentStore  # noqa: E402
from orc.launchers.transfer.delivery import SyncReport, raise_first, sync  # noqa: E402

TURNS = 5
COLD_BUDGET, UNCHANGED_BUDGET_S = 1.5, 1.0


def make_project(directory: Path, files: int, size: int) -> Path:
    """*files* files, most of them small, of *size* bytes in all."""
    numbers = random.Random(1)
    weights = [numbers.lognormvariate(0, 1.5) for _ in range(files)]
    for number, weight in enumerate(weights):
        path = directory / f"package_{number % 20}/module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.randbytes(max(1, round(weight / sum(weights) * size))))
    return directory


class Lab:
    """The hosts, and both ways to bring a project to them."""

    def __init__(self, hosts: HostsTestbed, scratch: Path) -> None:
        self.hosts = hosts
        self.scratch = scratch
        self.store = ContentStore(scratch / "state/store")

    def orc(self, project: Path, root: str = "orc") -> tuple[float, dict[str, SyncReport]]:
        """Seconds and reports of a sync that starts with nothing connected and the tree unread."""
        began = time.perf_counter()
        bundle = self.store.snapshot(project).bundle
        with closing(SshBackend(self.hosts.cluster(root=f"/home/trainer/{root}"))) as backend:
            targets = backend.stores()
            reports = sync([bundle], self.store, targets.roots, pythons=targets.pythons)
            took = time.perf_counter() - began
        raise_first(reports)
        return took, reports

    def rsync(self, project: Path, name: str = "project") -> float:
        """Seconds until all hosts have it, as the directory *name*."""
        shell = f"ssh -F {self.hosts.ssh_config}"
        began = time.perf_counter()
        running = [
            subprocess.Popen(["rsync", "-a", "-e", shell, f"{project}/", f"{host}:{name}/"])
            for host in self.hosts.names
        ]
        assert [process.wait() for process in running] == [0] * len(running)
        return time.perf_counter() - began


def cold(lab: Lab, turns: int) -> list[Row]:
    project = make_project(lab.scratch / "project", 500, 20_000_000)
    ours, theirs = [], []
    for turn in range(turns + 1):
        # A new place each time: for some seconds after files were removed, making new ones is slow (ext4).
        other = lab.rsync(project, f"project-{turn}")
        mine, _ = lab.orc(project, f"orc-{turn}")
        if turn:  # the first warms the caches of both
            ours.append(mine)
            theirs.append(other)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    middle_of = statistics.median
    return [
        Row(
            "sync of 500 new files, 20 MB, to 4 hosts",
            "rsync in parallel",
            middle_of(ours) * 1e3,
            middle_of(theirs) * 1e3,
            "ms",
            ratio,
            COLD_BUDGET,
        ),
    ]


def unchanged(lab: Lab, turns: int) -> list[Row]:
    project = make_project(lab.scratch / "large", 10_000, 20_000_000)
    lab.orc(project)
    lab.rsync(project)
    time.sleep(2)  # hashes of files younger than this are not remembered
    lab.orc(project)
    ours, theirs = [], []
    for _ in range(turns):
        mine, reports = lab.orc(project)
        assert all(not report.new for report in reports.values())
        ours.append(mine)
        theirs.append(lab.rsync(project))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return [
        Row(
            "sync of 10,000 unchanged files to 4 hosts",
            "rsync in parallel",
            statistics.median(ours),
            statistics.median(theirs),
            "s",
            ratio,
            UNCHANGED_BUDGET_S,
            "ours",
        )
    ]


def measure(turns: int) -> None:
    """On the laptop."""
    hosts = HostsTestbed(Path(os.environ["HOSTS_LAPTOP"]))
    with tempfile.TemporaryDirectory() as directory:
        lab = Lab(hosts, Path(directory))
        try:
            report([*cold(lab, turns), *unchanged(lab, turns)])
        finally:
            hosts.clean()


if __name__ == "__main__":
    sys.exit(on_a_laptop(__file__, measure, TURNS, "rsync"))
