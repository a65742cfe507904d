"""Launches that become jobs: on the hosts of DeepSpeed's file, and on Amazon SageMaker."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.accelerate.merge import Values
from orc.launchers.accelerate.remote_launch import HOSTS, SAGEMAKER, JobOfLaunch, job_of, place_of
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.launch import LocalLaunch

SAGEMAKER_FILE = {
    "compute_environment": "AMAZON_SAGEMAKER",
    "ec2_instance_type": "ml.m5.large",
    "iam_role_name": "training",
    "region": "us-east-1",
    "num_machines": 2,
    "mixed_precision": "bf16",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("worker-0 slots=2\nworker-1 slots=2\nworker-2 slots=2\n")
    (tmp_path / "uneven").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    (tmp_path / "twice").write_text("worker-0\n\nme@worker-0 slots=2  # again\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    return tmp_path


def made(
    values: dict[str, Any], *program: str, place: str = HOSTS, nproc: int | None = None, **request: Any
) -> JobOfLaunch:
    launch = LocalLaunch(program or ("code/train.py", "--lr", "${x}"), **request)
    found = Values({"deepspeed_hostfile": "hosts", **values} if place == HOSTS else values)
    return job_of(place, found, launch, nproc=nproc, runtime={"seed": 7}, where="")


def test_a_host_file_makes_a_job_on_its_hosts(folder: Path) -> None:
    flags = {"zero_stage": 2, "cpu": True, "env": ["A=b=c"], "mixed_precision": "bf16"}
    one = made({**flags, "deepspeed_exclusion_filter": "worker-1", "deepspeed_multinode_launcher": "pdsh"})
    assert one.cluster == {"kind": "ssh", "options": {"hostfile": str(folder / "hosts")}, "python": sys.executable}
    assert one.directory == folder
    assert one.job == {
        "name": "train",
        "cluster": one.name,
        "script": "code/train.py",
        "args": ["--lr", "$${x}"],
        "env": {"A": "b=c"},
        "resources": {"nodes": 2, "procs_per_node": 2, "options": {"ssh": {"hosts": ["worker-0", "worker-2"]}}},
        "runtime": {"mixed_precision": "bf16", "use_cpu": True, "deepspeed": {"zero_stage": 2}, "seed": 7},
    }
    two = made({"deepspeed_inclusion_filter": "worker-2@worker-0", "num_processes": 2}, "-m", nproc=None, module=True)
    assert (two.name, two.job["module"]) == (one.name, "-m")  # the same file is the same cluster
    assert two.job["resources"]["options"]["ssh"]["hosts"] == ["worker-0", "worker-2"]
    assert (two.job["resources"]["nodes"], two.job["resources"]["procs_per_node"]) == (2, 1)
    three = made({"num_machines": 2, "deepspeed_multinode_launcher": "openmpi"}, nproc=3)
    assert (three.job["resources"]["nodes"], three.job["resources"]["gpus_per_node"]) == (2, 3)
    assert "options" not in three.job["resources"]
    assert three.job["launcher"] == {"kind": "deepspeed", "options": {"launcher": "openmpi"}}


def test_a_file_of_sagemaker_makes_a_job_there(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("far away") / "far.py"
    script.touch()
    one = made(SAGEMAKER_FILE, str(script), place=SAGEMAKER)
    assert (one.job["script"], one.directory, one.job["resources"]) == ("far.py", script.parent, {"nodes": 2})
    assert one.cluster["options"].items() >= {"ec2_instance_type": "ml.m5.large", "region": "us-east-1"}.items()


def test_the_place_follows_from_what_is_given() -> None:
    assert place_of(SAGEMAKER_FILE, deepspeed=False) == SAGEMAKER
    assert place_of({"deepspeed_hostfile": "hosts"}, deepspeed=True) == HOSTS
    for values in ({"deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "standard"}, {}):
        assert place_of({"deepspeed_multinode_launcher": "pdsh", **values} | values, deepspeed=True) is None
    assert place_of({"deepspeed_hostfile": "hosts"}, deepspeed=False) is None
    with pytest.raises(LaunchError, match="needs --deepspeed_hostfile"):
        place_of({"deepspeed_inclusion_filter": "worker-1"}, deepspeed=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deepspeed_inclusion_filter": "worker-3"}, "has no host 'worker-3', did you mean 'worker-2'?"),
        ({"deepspeed_inclusion_filter": "worker-1:0,1"}, "slots are not chosen by number"),
        ({"deepspeed_exclusion_filter": "worker-0@@"}, "expected hosts with @ between them"),
        ({"deepspeed_exclusion_filter": "worker-0@worker-1@worker-2"}, "leaves no host"),
        ({"deepspeed_inclusion_filter": "worker-0", "deepspeed_exclusion_filter": "worker-1"}, "exclude each other"),
        ({"deepspeed_hostfile": "twice"}, "worker-0 is listed twice"),
        ({"num_machines": 4}, "--num_machines 4, and there are 3 hosts: worker-0, worker-1, worker-2"),
        ({"num_processes": 4}, "--num_processes 4 is not a multiple of the 3 machines"),
        ({"deepspeed_hostfile": "uneven"}, "the hosts have different numbers of slots"),
        ({"deepspeed_multinode_launcher": "mvapich"}, "mpich can"),
        ({"log_dir": "logs"}, "--log_dir is of launches on this machine; each process has its own log"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        made(values)
    with pytest.raises(LaunchError, match="ec2_instance_type decides it"):
        made(SAGEMAKER_FILE, place=SAGEMAKER, nproc=2)
