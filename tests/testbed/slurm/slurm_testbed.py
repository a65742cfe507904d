"""Fixtures for the Slurm testbed next to this file: `slurm_testbed` (the running cluster), `slurm` (one test's turn).

Without root or without Slurm the tests that ask for it are skipped, unless ``ORC_REQUIRE_TESTBEDS=1``: then missing
packages are installed and a cluster that does not come up is a failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from polling import until

HERE = Path(__file__).resolve().parent
NODES = ("node1", "node2", "node3", "node4")
_LONGEST_S = 500


class SlurmTestbed:
    """The running cluster: its commands, and ways to make it fail."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "etc" / "slurm.conf"

    def env(self) -> dict[str, str]:
        """This process's environment plus what the Slurm commands need."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        """Standard output of a Slurm command."""
        done = subprocess.run(argv, env=self.env(), capture_output=True, text=True, timeout=timeout_s)
        assert not check or done.returncode == 0, f"{argv}: {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def cluster_options(self, **more: Any) -> dict[str, Any]:
        """``options:`` of an orc cluster that is this one."""
        return {"conf": str(self.conf), **more}

    def jobs(self, name: str) -> list[tuple[str, str]]:
        """``(job id, state)`` of all jobs of that name that the controller remembers."""
        text = self.run("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%A %T")
        return [(job_id, state) for job_id, state in (line.split() for line in text.splitlines())]

    def await_state(self, job_id: str, *states: str, timeout_s: float = 60) -> str:
        """Wait until the job is in one of *states*."""

        def state() -> str | None:
            now = self.run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T")
            return now if now in states else None

        return eventually(state, timeout_s=timeout_s)

    def up(self) -> None:
        """Start what is not running and put every node back to work."""
        started = subprocess.run(
            [str(HERE / "up.sh")], env=self._script_env(), capture_output=True, text=True, timeout=170
        )
        if started.returncode != 0:
            raise RuntimeError(f"up.sh failed:\n{started.stdout}\n{started.stderr}")

    def crash_node(self, name: str) -> None:
        """Cut one node's power; `up` starts it again."""
        subprocess.run(
            [str(HERE / "down.sh"), name], env=self._script_env(), check=True, capture_output=True, timeout=60
        )

    def set_down(self, name: str) -> None:
        """What an administrator does with a bad node: its jobs end at once."""
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=test")

    def resume(self, name: str) -> None:
        """Put a node that was set down back to work."""
        self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)

    def preempt(self, seconds: int = 2) -> str:
        """Put a job on all nodes that jobs in `spot` and `spotgrace` have to make way for; its id."""
        flags = (
            "--partition=cpu",
            "--nodes=4",
            "--exclusive",
            "--time=5",
            "--output=/dev/null",
            "--job-name=important",
        )
        return self.run("sbatch", "--parsable", *flags, f"--wrap=sleep {seconds}")

    def _controller(self) -> int:
        return int((self.directory / "run" / "slurmctld.pid").read_text().split()[0])

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Have the cluster for oneself; other test sessions wait."""
        with (self.directory / ".turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def silent_controller(self, *, at_once: bool = True) -> Iterator[None]:
        """slurmctld takes connections and does not answer, like one that is swapping or waits for its disk.

        Without *at_once* somebody else stops it; it is woken up again at the end all the same.
        """
        pid = self._controller()
        if at_once:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
            eventually(lambda: "UP" in self.run("scontrol", "ping", check=False))

    @contextlib.contextmanager
    def dead_controller(self, *, at_once: bool = True) -> Iterator[None]:
        """slurmctld was shut down: nobody listens. It is started again at the end.

        Not SIGKILL: it saves its state with a delay, so the newest jobs would be lost and their numbers used again.
        """
        pid = self._controller()
        if at_once:
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: has_ended(pid))
        try:
            yield
        finally:
            self.up()

    def ready(self) -> None:
        """Wait until nothing of an earlier test occupies the nodes."""

        def idle() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").split("\n")
            for line in {s for s in states if s.endswith(("down", "drained", "draining", "down*"))}:
                self.resume(line.split()[0])
            return all(line.split()[1] == "idle" for line in states)

        eventually(idle, timeout_s=90)

    def _script_env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_TESTBED_DIR": str(self.directory)}


def has_ended(pid: int) -> bool:
    """Whether the process is gone, but for its parent that has not looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


eventually = partial(until, timeout_s=90, every_s=0.1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the cluster carries the mark, and all of them go to one worker of pytest-xdist.

    They may take long: what limits them is what they wait for.
    """
    for item in items:
        if "slurm_testbed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_LONGEST_S))


@pytest.fixture(scope="session")
def slurm_testbed() -> SlurmTestbed:
    """The running cluster, started when it is not. It is left running: ``down.sh`` stops it."""
    required = os.environ.get("ORC_REQUIRE_TESTBEDS") == "1"
    if not required and os.getuid() != 0:
        pytest.skip("the Slurm testbed needs root")
    if not required and shutil.which("slurmctld", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is None:
        pytest.skip("Slurm is not installed; tests/testbed/slurm/up.sh --install-only does it on Debian and Ubuntu")
    testbed = SlurmTestbed(Path(os.environ.get("SLURM_TESTBED_DIR", "/tmp/slurm-testbed")))
    testbed.directory.mkdir(parents=True, exist_ok=True)
    try:
        with testbed.turn():  # the test of another session may have shut the controller down just now
            testbed.up()
    except RuntimeError as error:
        if required:
            raise
        pytest.skip(str(error).splitlines()[-1])
    return testbed


@pytest.fixture
def slurm(slurm_testbed: SlurmTestbed, request: pytest.FixtureRequest) -> Iterator[SlurmTestbed]:
    """The cluster, idle and for this test alone: test sessions that run side by side take turns."""
    # One that asks for it as it runs carries the mark by hand; else it would run beside those that have it.
    assert request.node.get_closest_marker("slurm"), "mark the test, or the parameter that asks for Slurm, with `slurm`"
    with slurm_testbed.turn():
        slurm_testbed.ready()
        before = set(slurm_testbed.run("squeue", "--noheader", "--format=%A").split())
        yield slurm_testbed
        left = set(slurm_testbed.run("squeue", "--noheader", "--format=%A").split()) - before
        if left:
            slurm_testbed.run("scancel", *sorted(left), check=False)


@pytest.fixture
def slurm_cluster(slurm: SlurmTestbed, tmp_path: Path) -> Any:
    """An orc `Cluster` for the testbed, with a root of its own; ``model_copy(update=...)`` makes variants."""
    from orc.launchers.spec.clusters import Cluster

    return Cluster(
        name="testbed",
        kind="slurm",
        root=str(tmp_path / "root"),
        python=sys.executable,
        options=slurm.cluster_options(query_timeout=10, submit_timeout=20),
    )
