"""tests/run.sh runs all parts and ends what it starts: here with programs that only look like Python and Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orc.launchers.agent.processes import prctl

HERE = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36
PYTHON = """#!/bin/bash
# The tests on Slurm start a cluster, which is a daemon; then they wait to be interrupted, if they are asked to.
echo "$*" >>"$TREE/calls"
[[ "$*" == *--part=slurm* ]] || exit 0
"$TREE/tests/testbed/slurm/up.sh"
[ -n "$WAITS" ] || exit 0
sleep 300 & # in the background: what comes while a command in the foreground starts would be lost
trap 'kill $!; exit 2' INT
touch "$TREE/waits"
wait
"""
UP = """#!/bin/bash
mkdir -p "$SLURM_TESTBED_DIR/run"
file=$SLURM_TESTBED_DIR/run/slurmctld.pid
# Like a daemon: who reads its number may be sure that it has left this process group.
setsid bash -c 'echo "$$ 0" >"$0.new" && mv "$0.new" "$0" && exec sleep 300' "$file" </dev/null >/dev/null 2>&1 &
until [ -e "$file" ]; do sleep 0.01; done
"""
HOSTS = """#!/bin/bash
echo "$* on $HOSTS_TESTBED_DIR" >>"$TREE/calls"
"""
DOWN = """#!/bin/bash
read -r pid _ <"$SLURM_TESTBED_DIR/run/slurmctld.pid" && kill "$pid" && rm "$SLURM_TESTBED_DIR/run/slurmctld.pid"
"""


def _hear_all_signals() -> None:
    """Ignore and block none in the program that follows, whatever the process of these tests does."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Tree:
    """A project directory with nothing in it but what run.sh calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pid_file = directory / "slurm/run/slurmctld.pid"
        self.env = {**os.environ, "TREE": str(directory), "WAITS": "", "SLURM_TESTBED_DIR": str(directory / "slurm")}
        for name, text in (
            (".venv/bin/python", PYTHON),
            ("tests/testbed/slurm/up.sh", UP),
            ("tests/testbed/slurm/down.sh", DOWN),
            ("tests/testbed/hosts/pytest.sh", HOSTS),
        ):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        shutil.copy(HERE / "run.sh", directory / "tests")

    def start(self, **env: str) -> subprocess.Popen[str]:
        argv = [str(self.directory / "tests/run.sh")]
        return subprocess.Popen(
            argv, env={**self.env, **env}, text=True, start_new_session=True, preexec_fn=_hear_all_signals
        )

    def cluster_up(self) -> None:
        subprocess.run([self.directory / "tests/testbed/slurm/up.sh"], env=self.env, check=True)

    def cluster_down(self) -> None:
        subprocess.run([self.directory / "tests/testbed/slurm/down.sh"], env=self.env, check=False, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.cluster_down()


@pytest.fixture
def orphans_are_not_reaped() -> Iterator[None]:
    """As in a container whose first process does not reap: what is orphaned stays a zombie of its process group."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0)


def until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cluster_that_the_tests_have_started_is_ended(tree: Tree) -> None:
    assert tree.start().wait(60) == 0
    assert not tree.pid_file.exists()


@pytest.mark.usefixtures("orphans_are_not_reaped")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_after_an_interruption_as_well(tree: Tree, number: signal.Signals) -> None:
    process = tree.start(WAITS="1")
    until((tree.directory / "waits").exists)
    process.send_signal(number)
    assert process.wait(20 * 3) == 128 + number
    assert not tree.pid_file.exists()


def test_a_cluster_that_was_up_before_stays(tree: Tree) -> None:
    tree.cluster_up()
    (tree.directory / "tests/testbed/slurm/up.sh").write_text("#!/bin/bash\n")
    assert tree.start().wait(60) == 0
    pid = int(tree.pid_file.read_text().split()[0])
    os.kill(pid, 0)


def test_every_part_that_tests_are_divided_into_is_run_once(tree: Tree, pytestconfig: pytest.Config) -> None:
    assert tree.start(HOSTS_TESTBED_DIR="/hosts").wait(60) == 0
    calls = (tree.directory / "calls").read_text().splitlines()
    ran = [word.removeprefix("--part=") for call in calls for word in call.split() if word.startswith("--part=")]
    divided = pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    assert divided is not None
    assert sorted(ran) == sorted(divided.PARTS)
    # Two parts on the same hosts would wait for each other's turns.
    testbeds = [call.rpartition(" on ")[2] for call in calls if " on " in call]
    assert len(testbeds) == len(set(testbeds)) == 2


@pytest.mark.parametrize("mark", ["hosts", "slurm"])
def test_a_test_on_a_testbed_where_no_part_looks_is_refused(mark: str) -> None:
    with tempfile.TemporaryDirectory(dir=HERE) as directory:
        path = Path(directory) / "test_lost.py"
        path.write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_it() -> None:\n    pass\n")
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(path)]
        refused = subprocess.run(command, cwd=HERE.parent, text=True, capture_output=True)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "name its directory in tests/conftest.py" in refused.stderr
