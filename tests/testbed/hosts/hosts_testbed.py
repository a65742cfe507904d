"""Fixtures for the hosts testbed next to this file: `hosts_testbed` (the running hosts), `hosts` (one test's turn).

Tests that ask for them run in the testbed's laptop, where ``pytest.sh`` puts them; elsewhere they are skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from polling import until

HERE = Path(__file__).resolve().parent
USER = "trainer"
_LONGEST_S = 900
# What mends a host that a fault has broken, in the order in which it works.
_CURES = {
    "crash": "boot",
    "hang-sshd": "resume-sshd",
    "full": "unfull",
    "deny-key": "allow-key",
    "rekey": "unrekey",
    "skew": "unskew",
    "stop-sshd": "start-sshd",
    **dict.fromkeys(("cut", "drop", "isolate", "block", "slow", "rate"), "heal"),
}


class HostsTestbed:
    """The running hosts, reached from the laptop, and ways to break them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = tuple(sorted((p.name for p in (directory / "hosts").iterdir()), key=lambda n: int(n[4:])))
        self.ssh_config = directory / "client" / "ssh_config"
        self.known_hosts = directory / "client" / "known_hosts"
        self.identity = directory / "client" / "id_ed25519"
        self._broken: dict[tuple[str, str], tuple[str, ...]] = {}

    def address(self, host: str) -> str:
        """Its IPv4 address in the testbed's network."""
        return socket.gethostbyname(host)

    def free_address(self, number: int) -> str:
        """An address of the testbed's network that nobody has; *number*, its last part, is 100 or more."""
        return self._network + str(number)

    @property
    def laptop(self) -> str:
        """The launching machine's address in the testbed's network."""
        return self._network + "2"

    @property
    def _network(self) -> str:
        return self.address("node1").removesuffix("11")

    def home(self, host: str) -> Path:
        """The user's home on *host*, seen from outside."""
        return self.directory / "hosts" / host / "home"

    def root(self, host: str) -> Path:
        """The root of `cluster` on *host*, seen from outside."""
        return self.home(host) / "orc"

    def cluster(self, *, root: str = f"/home/{USER}/orc", python: str = sys.executable, **options: Any) -> Any:
        """An orc `Cluster` of all hosts, or of ``hosts=[...]``; *options* go into its ``options:``."""
        from orc.launchers.spec.clusters import Cluster

        return Cluster(
            name="lab",
            kind="ssh",
            root=root,
            python=python,
            options={"hosts": list(self.names), "ssh_config": str(self.ssh_config), **options},
        )

    def fault(self, verb: str, host: str, *arguments: str) -> str:
        """Break or mend *host*, see ``fault.sh``. What is broken at the end of the test is mended then."""
        done = subprocess.run(
            [str(HERE / "fault.sh"), verb, host, *arguments],
            env={**os.environ, "HOSTS_TESTBED_DIR": str(self.directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"fault.sh {verb} {host}: {done.stderr}"
        cure = _CURES.get(verb)
        if cure == "unfull":
            self._broken[cure, host] = arguments[1:2]
        elif cure:
            self._broken[cure, host] = ()
        else:
            self._broken.pop((verb, host), None)
        return done.stdout

    def mend(self, *, everything: bool = False) -> None:
        """Undo the faults of this test, or whatever may be broken by a run that was killed."""
        if everything:
            up = subprocess.run([str(HERE / "fault.sh"), "status"], capture_output=True, text=True, check=True).stdout
            for host in self.names:
                if f"{host} down" in up:
                    self._broken["boot", host] = ()
                for cure in ("resume-sshd", "allow-key", "heal", "start-sshd"):
                    self._broken[cure, host] = ()
                if "LD_PRELOAD" in (self.directory / "hosts" / host / "ssh" / "sshd_config").read_text():
                    self._broken["unskew", host] = ()
                if (self.directory / "hosts" / host / "key.orig").exists():
                    self._broken["unrekey", host] = ()
                mounts = self.run_on(host, "cat", "/proc/self/mounts") if f"{host} down" not in up else ""
                if f"tmpfs /home/{USER} tmpfs" in mounts:
                    self._broken["unfull", host] = ()
        for cure in dict.fromkeys(_CURES.values()):
            for broken, host in [key for key in self._broken if key[0] == cure]:
                self.fault(broken, host, *(self._broken[broken, host] if broken == "unfull" else ()))
                self._broken.pop((broken, host), None)

    def run_on(self, host: str, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        """Standard output of a command that root runs on *host*, not through SSH."""
        done = subprocess.run(
            [str(HERE / "enter.sh"), host, *argv],
            env={**os.environ, "HOSTS_TESTBED_DIR": str(self.directory)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{host}: {argv}: {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def processes(self, host: str) -> dict[int, str]:
        """The user's processes on *host*: command lines by process id as seen from outside. Not the SSH sessions."""
        record = (self.directory / "pids" / host).read_text().split()
        try:
            namespace = os.readlink(f"/proc/{record[0]}/ns/pid")
            uid = int((self.home(host)).stat().st_uid)
        except FileNotFoundError:
            return {}
        found = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdecimal():
                continue
            try:
                if entry.stat().st_uid != uid or os.readlink(f"{entry.path}/ns/pid") != namespace:
                    continue
                command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ends just now
                continue
            if command and not command.startswith("sshd: "):
                found[int(entry.name)] = command
        return found

    def lease(self, job: str, host: str) -> tuple[Path, dict[str, Any]]:
        """Where the agent of the job's first attempt on *host* keeps its records, seen from outside, and who it is."""
        found = [
            (path.parent, json.loads(path.read_text()))
            for path in self.root(host).glob(f"jobs/{job}/a1/node-*/lease.json")
        ]
        (own,) = [(directory, lease) for directory, lease in found if lease["host"] == host]
        return own

    def agent(self, job: str, host: str) -> psutil.Process:
        """The agent of the job's first attempt on *host*, by this machine's process number."""
        _, lease = self.lease(job, host)

        def is_it(process: psutil.Process) -> bool:
            directory = Path(f"/proc/{process.pid}")
            try:
                space, status = os.readlink(directory / "ns" / "pid"), (directory / "status").read_text()
            except OSError:  # it has just ended, or is nobody's to look at
                return False
            number = re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)
            return number is not None and space == lease["pid_ns"] and int(number[1]) == lease["pid"]

        (found,) = filter(is_it, psutil.process_iter())
        return found

    def leftovers(self) -> list[str]:
        """What no test may leave: processes of the user, and files that a writer did not finish."""
        found = [
            f"{host}: process {pid}: {command[:200]}"
            for host in self.names
            for pid, command in self.processes(host).items()
        ]
        for host in self.names:
            found += [f"{host}: {path.relative_to(self.home(host))}" for path in _unfinished(self.root(host))]
        return found

    def clean(self) -> None:
        """End the user's processes and empty the homes."""
        for host in self.names:
            for pid in self.processes(host):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for entry in self.home(host).iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _unfinished(root: Path) -> list[Path]:
    """What a writer below a cluster's *root* has not finished."""
    while True:
        try:
            return [*root.glob("store/tmp/*"), *root.glob("jobs/*/**/*.tmp"), *root.glob("jobs/*/**/.*.tmp")]
        except FileNotFoundError:  # of a directory that somebody has just removed
            continue


eventually = partial(until, timeout_s=150, every_s=0.05)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the hosts carries the mark, and all of them go to one worker of pytest-xdist.

    They may take long: what limits them is what they wait for.
    """
    for item in items:
        if "hosts_testbed" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.hosts)
        if item.get_closest_marker("hosts"):
            item.add_marker(pytest.mark.xdist_group("hosts"))
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_LONGEST_S))


@pytest.fixture(scope="session")
def hosts_testbed() -> HostsTestbed:
    """The running hosts, mended."""
    directory = os.environ.get("HOSTS_LAPTOP")
    if not directory:
        pytest.skip("needs SSH hosts: run tests/testbed/hosts/pytest.sh as root")
    testbed = HostsTestbed(Path(directory))
    with (testbed.directory / ".turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        testbed.mend(everything=True)
        testbed.clean()
    return testbed


@pytest.fixture
def hosts(hosts_testbed: HostsTestbed, request: pytest.FixtureRequest) -> Iterator[HostsTestbed]:
    """The hosts, healthy and for this test alone, homes empty. Fails a test that leaves something running."""
    assert request.node.get_closest_marker("hosts"), "mark the test, or the parameter that asks for hosts, with `hosts`"
    with (hosts_testbed.directory / ".turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield hosts_testbed
        hosts_testbed.mend()
        deadline = time.monotonic() + 60
        while (left := hosts_testbed.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        hosts_testbed.clean()
        assert not left, "the test left on the hosts:\n" + "\n".join(left)
