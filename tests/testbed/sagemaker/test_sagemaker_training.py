"""The stand-in for SageMaker: what its containers see, and how they end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sagemaker_containers import unsupported_reason
from sagemaker_training import PlatformSettings, Training

pytestmark = [pytest.mark.xdist_group("sagemaker")]


class Directory:
    """Objects of S3 as files: ``s3://bucket/key`` is ``<root>/bucket/key``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, uri: str) -> Path:
        return self.root / uri.removeprefix("s3://")

    def fetch(self, uri: str, directory: Path) -> None:
        if (source := self.path(uri)).is_dir():
            shutil.copytree(source, directory, dirs_exist_ok=True)

    def put(self, uri: str, path: Path) -> None:
        self.path(uri).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, self.path(uri))


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if why := unsupported_reason():
        pytest.skip(f"no containers here: {why}")


def request(script: str, hosts: int = 1, **more: Any) -> dict[str, Any]:
    """A training job whose containers run a shell script."""
    return {
        "TrainingJobName": "a-job",
        "AlgorithmSpecification": {"ContainerEntrypoint": ["/bin/sh", "-c", script]},
        "ResourceConfig": {"InstanceCount": hosts, "InstanceType": "ml.c5.xlarge"},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        **more,
    }


class Ran:
    """A job that has ended: its states and what each host has said."""

    def __init__(self, state: dict[str, Any], said: dict[str, list[str]], storage: Directory) -> None:
        self.state = state
        self.said = said
        self.storage = storage

    @property
    def statuses(self) -> list[str]:
        return [each["Status"] for each in self.state["SecondaryStatusTransitions"]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    """``run(request, when={"algo-1 says": "stop"})``: to its end; leaves a control file when a host has said a line."""

    def run(asked: dict[str, Any], *, when: dict[str, str] | None = None, **platform: Any) -> Ran:
        directory = tmp_path / "job"
        directory.mkdir()
        storage = Directory(tmp_path / "s3")
        said: dict[str, list[str]] = {}

        def listen(stream: str, lines: list[str]) -> None:
            said.setdefault(stream.rpartition("/")[2].rpartition("-")[0], []).extend(lines)
            for line in lines:
                if order := (when or {}).get(line):
                    (directory / order).touch()

        training = Training(asked, directory, storage, PlatformSettings(**platform), on_output=listen)
        training.run()
        assert list(directory.glob("run-*")) == []
        return Ran(training.state, said, storage)

    return run


def test_hosts_have_a_name_an_address_processes_and_files_of_their_own(run: Callable[..., Ran]) -> None:
    script = """
        hostname; getent hosts algo-1 algo-2 | wc -l; getent hosts "$(hostname)" | cut -d' ' -f1; echo "pid $$"
        touch "/tmp/of-$(hostname)" "/opt/ml/model/of-$(hostname)" "/dev/shm/of-$(hostname)"
        ls /tmp /opt/ml/model /dev/shm | grep of-; ls /opt/ml; whoami
        grep -c current_host /opt/ml/input/config/resourceconfig.json
    """
    ran = run(request(script, hosts=2))
    assert ran.state["TrainingJobStatus"] == "Completed", ran.said
    for number in (1, 2):
        name = f"algo-{number}"
        expected = [name, "2", f"127.0.1.{number}", "pid 1", *[f"of-{name}"] * 3]
        expected += ["checkpoints", "input", "model", "output", "root", "1"]
        assert ran.said[name] == expected


def test_a_job_cannot_change_the_python_of_this_machine(run: Callable[..., Ran]) -> None:
    ran = run(request(f"touch {sys.prefix}/made-by-a-job && echo changed; test -x {sys.executable} && echo there"))
    assert ran.said["algo-1"][-1] == "there"
    assert "changed" not in ran.said["algo-1"]
    assert not Path(sys.prefix, "made-by-a-job").exists()


def test_a_host_that_fails_ends_the_others_and_its_explanation_is_shown(run: Callable[..., Ran]) -> None:
    with socket.create_server(("127.0.1.1", 0)) as free:  # the address of algo-1
        port = free.getsockname()[1]
    script = f"""
        exec {sys.executable} - <<'END'
import os, pathlib, signal, socket, sys, time
def told(*_):
    os.write(1, b"told\\n")
    os._exit(1)
if socket.gethostname() == "algo-1":
    signal.signal(signal.SIGTERM, told)
    with socket.create_server(("algo-1", {port})) as ready:
        while True:
            ready.accept()
while True:
    try:
        socket.create_connection(("algo-1", {port}), timeout=5).close()
        break
    except OSError:
        time.sleep(0.05)
pathlib.Path("/opt/ml/output/failure").write_text("rank 1 on algo-2 exited with 42")
sys.exit(42)
END
    """
    ran = run(request(script, hosts=2))
    assert ran.state["TrainingJobStatus"] == "Failed"
    assert ran.state["FailureReason"] == "AlgorithmError: rank 1 on algo-2 exited with 42, exit code: 42"
    assert ran.said["algo-1"] == ["told"]


def test_a_stop_lets_the_hosts_end_and_kills_what_does_not(run: Callable[..., Ran]) -> None:
    script = """
        if [ "$(hostname)" = algo-1 ]; then trap 'echo saved; exit 0' TERM; else trap '' TERM; fi
        echo ready; while :; do sleep 0.1; done
    """
    ran = run(request(script, hosts=2), when={"ready": "stop"}, grace_s=1.5)
    assert (ran.state["TrainingJobStatus"], ran.state["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert ran.statuses == ["Starting", "Downloading", "Training", "Stopping", "Uploading", "Stopped"]


def test_the_time_limit_of_the_request_ends_the_job(run: Callable[..., Ran]) -> None:
    ran = run(request("sleep 600", StoppingCondition={"MaxRuntimeInSeconds": 1}), grace_s=0.2)
    assert (ran.state["TrainingJobStatus"], ran.state["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")


def test_an_interrupted_spot_job_finds_its_checkpoints_again(run: Callable[..., Ran]) -> None:
    script = """
        cd /opt/ml/checkpoints
        if [ -e state ]; then echo "again: $(cat state)"; exit 0; fi
        trap 'echo seven > state; exit 1' TERM; echo ready; while :; do sleep 0.1; done
    """
    kept = {"S3Uri": "s3://bucket/kept", "LocalPath": "/opt/ml/checkpoints"}
    ran = run(request(script, CheckpointConfig=kept, EnableManagedSpotTraining=True), when={"ready": "interrupt"})
    assert ran.state["TrainingJobStatus"] == "Completed"
    assert ran.said["algo-1"] == ["ready", "again: seven"]
    assert ran.statuses.count("Interrupted") == 1
    assert ran.storage.path("s3://bucket/kept/state").read_bytes() == b"seven\n"


def test_nothing_survives_what_holds_the_containers(tmp_path: Path) -> None:
    asked = request("(sleep 4711 &) ; sleep 4711")
    directory = tmp_path / "job"
    directory.mkdir()
    training = Training(asked, directory, Directory(tmp_path), PlatformSettings(env={"MARK": str(tmp_path)}))
    thread = threading.Thread(target=training.run)
    thread.start()
    until(lambda: len(sleepers(tmp_path)) == 2)
    (machine,) = [pid for pid in processes() if str(directory).encode() in command(pid) and parent(pid) == os.getpid()]
    os.kill(machine, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    until(lambda: sleepers(tmp_path) == [])
    assert training.state["FailureReason"] == "InternalServerError: the containers were killed"
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def command(pid: int) -> bytes:
    return read(pid, "cmdline")


def parent(pid: int) -> int:
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def sleepers(mark: Path) -> list[int]:
    return [
        pid
        for pid in processes()
        if b"4711" in command(pid)
        and f"MARK={mark}".encode() in read(pid, "environ")
        and command(pid).startswith(b"sleep")
    ]


def until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
