"""Training jobs on this machine: what the containers see, how they end; and the service that stands in for AWS."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.sagemaker.local import containers, open_local_service
from orc.launchers.backends.sagemaker.local.docker import kill_command, network_command, run_command
from orc.launchers.backends.sagemaker.local.service import LocalService
from orc.launchers.backends.sagemaker.local.storage import LocalStorage
from orc.launchers.backends.sagemaker.local.training import PlatformSettings, Training
from orc.launchers.backends.sagemaker.service import NameTaken
from orc.launchers.errors import BackendError

GOLDEN = Path(__file__).resolve().parents[2] / "golden/sagemaker/docker.json"


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if why := containers.unsupported_reason():
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

    def __init__(self, state: dict[str, Any], said: dict[str, list[str]], storage: LocalStorage) -> None:
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
        storage = LocalStorage(tmp_path / "s3")
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


def test_the_directories_of_this_machine_in_opt_are_still_there(run: Callable[..., Ran]) -> None:
    ours = sorted(name for name in os.listdir("/opt") if name != "ml")
    ran = run(request("ls /opt"))
    assert ran.said["algo-1"] == sorted([*ours, "ml"])


def test_a_private_network_has_no_way_out_and_hosts_reach_each_other_in_it(run: Callable[..., Ran]) -> None:
    script = f"""
        grep -v -e face -e Inter /proc/net/dev | cut -d: -f1
        {sys.executable} - <<'END'
import json, socket
if json.load(open("/opt/ml/input/config/resourceconfig.json"))["current_host"] == "algo-1":
    with socket.create_server(("algo-1", 29411)) as server:
        print(server.accept()[0].recv(5).decode())
else:
    while True:
        try:
            socket.create_connection(("algo-1", 29411)).sendall(b"hello")
        except ConnectionRefusedError:
            continue
        break
END
    """
    ran = run(request(script, hosts=2))
    assert [line.strip() for line in ran.said["algo-1"]] == ["lo", "hello"]


def test_a_job_cannot_change_the_python_of_this_machine(run: Callable[..., Ran]) -> None:
    ran = run(request(f"touch {sys.prefix}/made-by-a-job && echo changed; test -x {sys.executable} && echo there"))
    assert ran.said["algo-1"][-1] == "there"
    assert "changed" not in ran.said["algo-1"]
    assert not Path(sys.prefix, "made-by-a-job").exists()


def test_variables_of_whoever_submits_do_not_reach_the_containers(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    monkeypatch.setenv("MY_OWN", "x")
    ran = run(request("env | sort", Environment={"GIVEN": "by the request"}))
    names = {line.partition("=")[0] for line in ran.said["algo-1"]}
    assert {"AWS_SECRET_ACCESS_KEY", "MY_OWN"}.isdisjoint(names)
    assert "GIVEN=by the request" in ran.said["algo-1"]
    assert "TRAINING_JOB_NAME=a-job" in ran.said["algo-1"]


def test_the_model_of_all_hosts_and_their_outputs_are_kept(run: Callable[..., Ran], tmp_path: Path) -> None:
    ran = run(request("echo x > /opt/ml/model/$(hostname); echo y > /opt/ml/output/data/z", hosts=2))
    assert ran.statuses == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert ran.state["ModelArtifacts"] == {"S3ModelArtifacts": "s3://bucket/output/a-job/output/model.tar.gz"}
    with tarfile.open(ran.storage.path("s3://bucket/output/a-job/output/model.tar.gz")) as tar:
        assert sorted(tar.getnames()) == ["algo-1", "algo-2"]
    with tarfile.open(ran.storage.path("s3://bucket/output/a-job/output/output.tar.gz")) as tar:
        assert set(tar.getnames()) == {"z"}


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


def test_a_program_that_is_not_there_is_a_failure_that_names_it(run: Callable[..., Ran]) -> None:
    asked = request("")
    asked["AlgorithmSpecification"]["ContainerEntrypoint"] = ["no-such-program"]
    ran = run(asked)
    assert (ran.state["TrainingJobStatus"], ran.state["FailureReason"][-14:]) == ("Failed", "exit code: 127")
    assert ran.said["algo-1"] == [
        "the container of algo-1 cannot be started: no-such-program: No such file or directory"
    ]


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
    assert ran.storage.read("s3://bucket/kept/state") == b"seven\n"


def test_a_directory_of_this_machine_can_be_a_channel(run: Callable[..., Ran], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "numbers").write_text("1 2 3\n")
    source = {"S3DataSource": {"S3Uri": f"file://{data}"}}
    ran = run(
        request(
            "cat /opt/ml/input/data/train/numbers", InputDataConfig=[{"ChannelName": "train", "DataSource": source}]
        )
    )
    assert ran.said["algo-1"] == ["1 2 3"]


def test_nothing_survives_what_holds_the_containers(tmp_path: Path) -> None:
    asked = request("(sleep 4711 &) ; sleep 4711")
    directory = tmp_path / "job"
    directory.mkdir()
    training = Training(asked, directory, LocalStorage(tmp_path), PlatformSettings(env={"MARK": str(tmp_path)}))
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


# --- the service


@pytest.fixture
def service(tmp_path: Path) -> LocalService:
    made = open_local_service("contract", tmp_path)
    assert isinstance(made, LocalService)
    return made


def ended(service: LocalService, name: str) -> dict[str, Any]:
    """The job's last description."""
    found: list[dict[str, Any]] = []

    def over() -> bool:
        described = service.describe(name)
        assert described is not None
        found.append(described)
        return described["TrainingJobStatus"] in ("Completed", "Failed", "Stopped")

    until(over)
    return found[-1]


def said(service: LocalService, name: str) -> list[str]:
    """Everything its containers have printed."""
    found = []
    for stream in service.streams(name):
        token = None
        while True:
            lines, following = service.events(stream, token)
            found += lines
            if not lines and following == token:
                break
            token = following
    return found


def test_objects_are_written_read_and_removed(service: LocalService) -> None:
    uri = "s3://bucket/a/b.json"
    assert service.get(uri) is None
    service.put(uri, b"0123")
    service.put("s3://bucket/a/c", b"c")
    assert (service.get(uri), service.get(uri, 2), service.exists(uri)) == (b"0123", b"23", True)
    assert service.get_many([uri, "s3://bucket/none", "s3://bucket/a"], 4) == {uri: b"0123"}
    assert service.get_many([uri], 3) == {}
    assert service.get(uri, 1, 2) == b"12"
    service.delete(uri)
    service.delete(uri)
    assert not service.exists(uri)
    for wrong in ("s3://bucket/../../etc/passwd", "/etc/passwd", "s3://"):
        with pytest.raises(BackendError, match="not an address in S3"):
            service.get(wrong)


def test_a_job_runs_detached_and_is_described_as_the_api_does_it(service: LocalService) -> None:
    tags = [{"Key": "orc:marker", "Value": "m"}]
    service.create(request("echo hello; printf 'no end'", Tags=tags, Environment={"A": "b"}))
    with pytest.raises(NameTaken):
        service.create(request("echo hello"))
    described = ended(service, "a-job")
    assert described["TrainingJobStatus"] == "Completed"
    assert described["Environment"] == {"A": "b"}
    assert described["CreationTime"] <= described["TrainingStartTime"] <= described["TrainingEndTime"]
    assert Path(described["ModelArtifacts"]["S3ModelArtifacts"]).is_file()
    assert service.tags(described["TrainingJobArn"]) == {"orc:marker": "m"}
    until(lambda: said(service, "a-job") == ["hello", "no end"])
    assert [job["TrainingJobName"] for job in service.summaries()] == ["a-job"]
    assert list(service.summaries(name_contains="other")) == []
    assert list(service.summaries(since=time.time() + 60)) == []
    assert service.describe("another") is None
    service.stop("a-job")
    service.stop("another")


def test_a_job_is_stopped_from_elsewhere(service: LocalService) -> None:
    service.create(request("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"))
    until(lambda: said(service, "a-job") == ["ready"])
    service.stop("a-job")
    assert ended(service, "a-job")["TrainingJobStatus"] == "Stopped"
    assert said(service, "a-job") == ["ready", "saved"]


def test_a_job_whose_process_was_killed_has_failed_and_leaves_no_container(service: LocalService) -> None:
    mark = service.directory
    service.create(request("echo ready; sleep 4711", Environment={"MARK": str(mark)}))
    until(lambda: len(sleepers(mark)) == 1)
    (driver,) = [pid for pid in processes() if str(service.jobs / "a-job").encode() in command(pid).split(b"\0")]
    os.kill(driver, signal.SIGKILL)
    described = ended(service, "a-job")
    assert described["FailureReason"] == "InternalServerError: the process that ran the containers was killed"
    until(lambda: sleepers(mark) == [])


def test_what_is_in_s3_is_not_fetched_and_said_to_be_missing(service: LocalService) -> None:
    for uri, expected in (
        ("s3://theirs/data", "the input train is not on this machine: s3://theirs/data"),
        ("file:///no/such/directory", "the input train is no directory"),
    ):
        channel = {"ChannelName": "train", "DataSource": {"S3DataSource": {"S3Uri": uri}}}
        with pytest.raises(BackendError, match=expected):
            service.create(request("true", InputDataConfig=[channel]))
    assert service.describe("a-job") is None


def test_where_user_namespaces_are_not_allowed_that_is_said_with_what_to_do(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        containers, "unsupported_reason", lambda: "this machine does not allow user namespaces: not permitted"
    )
    with pytest.raises(BackendError, match="containers cannot be simulated here: this machine does not") as error:
        service.create(request("true"))
    assert "unprivileged_userns_clone" in error.value.hint
    assert service.describe("a-job") is None


# --- docker


def test_docker_is_asked_for_by_name_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="needs docker") as error:
        open_local_service("docker", tmp_path).create(request("true"))
    assert "--local-contract" in error.value.hint


def test_the_commands_for_docker(tmp_path: Path) -> None:
    host = {
        "name": "algo-1",
        "ml": "/state/run-1/algo-1/ml",
        "scratch": "/state/run-1/algo-1/scratch",
        "argv": ["python3", "-I", "-S", "/opt/ml/input/data/orc/entry.py"],
        "binds": {"input/data/train": "/home/ada/data"},
        "env": {"PATH": "/usr/bin", "HOME": "/tmp", "TRAINING_JOB_NAME": "orc-digits-k3f9a2-a1", "NAME": "a\nb"},
    }
    spec = {"job": "orc-digits-k3f9a2-a1", "image": "pytorch:2", "network": "host", "gpus": False, "hosts": [host]}
    found = {
        "network": network_command(spec),
        "private network": network_command({**spec, "network": "private"}),
        "run": run_command(spec, host),
        "run with GPUs": run_command({**spec, "gpus": True}, host),
        "term": kill_command(spec["job"], "algo-1", "SIGTERM"),  # type: ignore[arg-type]
    }
    text = json.dumps(found, indent=2) + "\n"
    if os.environ.get("ORC_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), f"{GOLDEN} differs; ORC_UPDATE_GOLDEN=1 accepts the new text"
