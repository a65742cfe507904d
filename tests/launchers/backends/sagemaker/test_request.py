"""The plans for SageMaker, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes them anew; read the diff before a commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from golden_plans import compare

from orc.launchers.backends import open_backend
from orc.launchers.backends.base import Snapshot
from orc.launchers.backends.sagemaker.names import MAX_NAME, partition_of, training_job_name
from orc.launchers.backends.sagemaker.rendering import checkpoints_of, hyperparameters
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.snapshot.manifest import Bundle
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import get_cluster

SNAPSHOT = Snapshot(Bundle.of([]), Bundle.of([]))
EVERYTHING = {
    "instance_type": "ml.p3.8xlarge",
    "image_uri": "registry.example.org/train:1",
    "volume_size": 200,
    "volume_kms_key": "alias/volume",
    "training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/plan",
    "use_spot_instances": True,
    "max_run": "2h",
    "max_wait": "10h",
    "max_pending": "1h",
    "inputs": {
        "train": "s3://my-data/train",
        "val": {"s3_data": "s3://my-data/val", "distribution": "ShardedByS3Key", "content_type": "text/csv"},
        "shared": {"file_system_id": "fs-0123456789abcdef0", "file_system_type": "FSxLustre", "directory_path": "/x"},
        "list": {
            "s3_data": "s3://my-data/list.json",
            "s3_data_type": "AugmentedManifestFile",
            "attribute_names": ["source", "label"],
            "record_wrapping": "RecordIO",
            "input_mode": "Pipe",
            "compression": "None",
            "shuffle_seed": 7,
        },
    },
    "input_mode": "FastFile",
    "metric_definitions": {"loss": "loss=([0-9.]+)"},
    "enable_sagemaker_metrics": True,
    "output_path": "s3://my-models/digits",
    "output_kms_key": "alias/output",
    "disable_output_compression": True,
    "checkpoint_s3_uri": "s3://my-models/checkpoints/",
    "checkpoint_local_path": "/opt/ml/kept",
    "subnets": ["subnet-1", "subnet-2"],
    "security_group_ids": "sg-1",
    "enable_network_isolation": True,
    "encrypt_inter_container_traffic": True,
    "environment": {"NCCL_DEBUG": "INFO"},
    "max_retry_attempts": 2,
    "tags": {"team": "vision"},
    "tensorboard_output_config": {"S3OutputPath": "s3://my-models/board"},
    "profiler_config": {
        "S3OutputPath": "s3://my-models/profile",
        "ProfilingIntervalInMilliseconds": 500,
        "ProfilingParameters": {"DetailedProfilingConfig": "{}"},
    },
    "disable_profiler": False,
    "experiment_config": {"ExperimentName": "digits"},
    "training_repository_credentials_provider_arn": "arn:aws:lambda:us-east-1:123456789012:function:credentials",
    "enable_infra_check": True,
    "enable_remote_debug": False,
    "enable_session_tag_chaining": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smallest": {},
    "documented": {"args": ["--epochs", "3", "--fp16", "True"]},
    "two-nodes": {
        "resources": {"nodes": 2, "procs_per_node": 2, "time": "1:00:00"},
        "secrets": ["WANDB_API_KEY"],
        "setup": ["echo ready"],
        "env": {"NOTE": "it's $5 ~here"},
        "checkpoint": {"every": 100, "keep": 2},
        "tags": {"team": "nlp", "odd tag!": "not for AWS"},
        "grace": 90,
    },
    "everything": {"own": EVERYTHING, "resources": {"nodes": 3}},
    "kept-warm": {
        "own": {
            "keep_alive_period_in_seconds": "30m",
            "instance_placement_config": {
                "EnableMultipleJobs": True,
                "PlacementSpecifications": [{"UltraServerId": "u-1", "InstanceCount": 1}],
            },
        }
    },
    "mpi": {
        "own": {"distribution": {"mpi": {"enabled": True, "processes_per_host": 4, "custom_mpi_options": "-x A -x B"}}},
        "resources": {"nodes": 2},
    },
}


@pytest.fixture
def shaped(documented) -> Any:
    """The arguments of one of SHAPES."""
    given = {**dict.fromkeys(("account", "bucket", "role", "instance_type")), **documented}
    return lambda name: {**({"options": given} if name == "documented" else {}), **SHAPES[name]}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_what_its_golden_file_says(shape, plan, shaped) -> None:
    compare(f"sagemaker/{shape}.json", plan(**shaped(shape)))


def test_rendering_gives_the_same_bytes_and_holds_no_secret(plan) -> None:
    first, second = (plan(secrets=["TOKEN"], resources={"nodes": 2}) for _ in range(2))
    assert first.digest == second.digest
    assert '"token"' not in json.dumps(first.to_dict())


def test_rendering_asks_no_network_and_makes_the_same_request_without_the_libraries_of_aws(tmp_path) -> None:
    program = """
import socket, sys
from orc.launchers.backends import open_backend
from orc.launchers.backends.base import Snapshot
from orc.launchers.errors import RenderError
from orc.launchers.snapshot.scan import Bundle
from orc.launchers.spec.clusters import Cluster
from orc.launchers.ids import AttemptId
from orc.launchers.snapshot.manifest import Entry
from orc.launchers.spec import JobSpec
socket.socket.connect = None
options = {"region": "us-east-1", "role": "r", "instance_type": "ml.c5.xlarge"}
backend = open_backend(Cluster(name="sm", kind="sagemaker", options=options))
snapshot = Snapshot(Bundle.of([Entry.link("a", "b")]), Bundle.of([]))
print(backend.render(JobSpec(name="x", script="t.py"), snapshot, AttemptId("x-000000", 1)).to_dict())
heavy = {"boto3", "sagemaker", "torch", "tarfile"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    (tmp_path / "botocore.py").write_text("raise ModuleNotFoundError")
    made = []
    for path in ("", str(tmp_path)):
        env = {**os.environ, "ORC_STATE_DIR": "/nonexistent/state", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "[]"
        made.append(done.stdout)
    assert made[0] == made[1]


def test_what_the_api_would_refuse_is_named_by_its_key_with_the_place_of_the_value(tmp_path, monkeypatch) -> None:
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(
        "sm:\n  kind: sagemaker\n  options:\n    region: us-east-1\n    role: arn:aws:iam::1:role/x\n"
        "    instance_type: ml.c5.xlarge\n"
    )
    (tmp_path / "t.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: x\nscript: t.py\nresources:\n  options:\n    sagemaker:\n      input_mode: Slow\n")
    backend, job = open_backend(get_cluster("sm", clusters)), load_job(file).spec
    with pytest.raises(RenderError, match=r"input_mode: 'Slow' is none of its values .*FastFile") as caught:
        backend.render(job, SNAPSHOT, AttemptId("x-000000", 1))
    assert caught.value.where == f"{file}:6:19"
    with pytest.raises(RenderError, match=r"role: 'arn:aws:iam::1:role/x' does not match arn:") as caught:
        backend.render(job.model_copy(update={"resources": {}}), SNAPSHOT, AttemptId("x-000000", 1))
    assert caught.value.where == f"{clusters}:5:11"


def test_arguments_beyond_the_limits_of_the_api_are_refused_with_the_way_around_them(plan) -> None:
    for args in ({f"n{number}": 1 for number in range(101)}, {"text": "x" * 2501}, {"n" * 257: 1}):
        with pytest.raises(RenderError, match=r"arguments: .* at most") as caught:
            plan(args=args)
        assert "arguments: plain" in caught.value.hint


@pytest.mark.parametrize(
    ("job", "base", "expected"),
    [
        ("digits-k3f9a2", None, "orc-digits-k3f9a2-a12"),
        ("digits-k3f9a2", "train", "train-k3f9a2-a12"),
        ("x" * 40 + "-k3f9a2", None, "orc-" + "x" * 40 + "-k3f9a2-a12"),
        ("digits-k3f9a2", "b" * 60, "b" * 52 + "-k3f9a2-a12"),
    ],
)
def test_names_of_training_jobs_follow_from_the_attempt(job, base, expected) -> None:
    name = training_job_name(AttemptId(job, 12), base)
    assert name == expected
    assert len(name) <= MAX_NAME


def test_long_names_are_cut_and_stay_apart() -> None:
    long = [training_job_name(AttemptId("x" * 60 + end, 123456), None) for end in ("a", "b")]
    assert all(len(name) <= MAX_NAME for name in long)
    assert long[0] != long[1]
    plain = [training_job_name(AttemptId(job, 1), "base") for job in ("mine", "yours")]
    assert plain[0] != plain[1]


def test_the_account_is_left_open_where_nobody_has_named_it(request_for) -> None:
    made = request_for(options={"account": None, "bucket": None})
    assert made["RoleArn"] == "arn:aws:iam::<account>:role/training"
    assert made["OutputDataConfig"]["S3OutputPath"].startswith("s3://sagemaker-us-east-1-<account>/orc/jobs/")
    made = request_for(options={"role": "arn:aws:iam::210987654321:role/x", "account": None})
    assert "<account>" not in json.dumps(made)


def test_a_file_system_is_mounted_whatever_way_the_other_channels_come(request_for) -> None:
    vpc = {"subnets": "subnet-1", "security_group_ids": "sg-1"}
    made = request_for({**vpc, "input_mode": "FastFile", "inputs": {"shared": FILE_SYSTEM, "train": "s3://b-c/x"}})
    *_, shared, train = made["InputDataConfig"]
    assert (shared["InputMode"], train.get("InputMode")) == ("File", None)
    assert made["AlgorithmSpecification"]["TrainingInputMode"] == "FastFile"


def test_the_longest_time_of_a_job_stays_within_what_aws_allows(request_for) -> None:
    assert request_for(resources={"time": "28d"})["StoppingCondition"] == {"MaxRuntimeInSeconds": 28 * 86400}


def test_other_parts_of_aws_have_other_names(request_for) -> None:
    made = request_for(options={"region": "cn-north-1"})
    assert made["RoleArn"].startswith("arn:aws-cn:iam::")
    assert ".dkr.ecr.cn-north-1.amazonaws.com.cn/" in made["AlgorithmSpecification"]["TrainingImage"]


def test_the_jobs_own_time_limit_comes_before_sagemakers(request_for, agents_for) -> None:
    limit = {"resources": {"time": "1h"}, "grace": 20}
    assert request_for(**limit)["StoppingCondition"] == {"MaxRuntimeInSeconds": 3680}
    assert agents_for(**limit)["deadline_s"] == 3600


def test_requirements_beside_the_script_are_installed_first(agents_for) -> None:
    install = "python3 -m pip install --disable-pip-version-check -r requirements.txt"
    assert agents_for(setup=["echo x"])["setup"] == [install, "echo x"]
    assert agents_for(python="/opt/py", setup=[])["setup"][0].startswith("/opt/py -m pip")
    assert agents_for({"install_requirements": False})["setup"] == []
    assert agents_for(environment={"venv": {"requirements": "requirements.txt"}})["setup"] == []


def test_arguments_as_they_are_make_no_hyperparameters(request_for, agents_for) -> None:
    own, args = {"arguments": "plain"}, ["--flag", "value"]
    assert "HyperParameters" not in request_for(own, args=args)
    assert agents_for(own, args=args)["command"]["program"][-2:] == args


def test_secrets_are_named_and_where_they_are_is_said(agents_for) -> None:
    assert agents_for(secrets=["TOKEN"])["backend"]["secrets"] == {"from": "channel"}
    kept = agents_for(None, {"secrets": "secretsmanager"}, secrets=["TOKEN"])["backend"]["secrets"]
    assert kept == {"from": "secretsmanager", "id": "orc/orc-digits-k3f9a2-a1", "region": "us-east-1"}
    assert "backend" not in agents_for()


FILE_SYSTEM = {"file_system_id": "fs-0123456789abcdef0", "file_system_type": "EFS", "directory_path": "/x"}
MANIFEST = {"s3_data": "s3://b-c/x", "s3_data_type": "AugmentedManifestFile", "attribute_names": ["label"]}
REFUSALS = {
    "no role": ({}, {"role": None}, {}, "no execution role"),
    "no instance type": ({}, {"instance_type": None}, {}, "no instance type"),
    "unknown instance type": ({"instance_type": "ml.c5.xlrage"}, {}, {}, "did you mean 'ml.c5.xlarge'"),
    "elastic": ({}, {}, {"resources": {"nodes": "1:2"}}, "fixed number of instances"),
    "long grace": ({}, {}, {"grace": 300}, "120 seconds"),
    "containers": ({}, {}, {"environment": {"container": {"image": "x"}}}, "in a container already"),
    "two counts": ({"instance_count": 3}, {}, {"resources": {"nodes": 2}}, "instance_count = 3"),
    "too many GPUs": ({}, {}, {"resources": {"gpus_per_node": 1}}, "1 GPUs per node"),
    "too many cores": ({}, {}, {"resources": {"cpus_per_proc": 5}}, "5 CPU cores"),
    "too much memory": ({}, {}, {"resources": {"memory": "64G"}}, "GiB of memory"),
    "wait without spot": ({"max_wait": 60}, {}, {}, "spot instances alone"),
    "short wait": ({"use_spot_instances": True, "max_wait": 60, "max_run": 120}, {}, {}, "is less than"),
    "two limits": ({"max_run": 60}, {}, {"resources": {"time": "1h"}}, "max_run = 60"),
    "half a VPC": ({"subnets": ["subnet-1"]}, {}, {}, "given together"),
    "lost checkpoints": ({}, {}, {"checkpoint": {"dir": "/data/ckpt"}}, "is lost"),
    "data parallel": ({"distributed_type": "DATA_PARALLEL"}, {}, {}, "does not run on ml.c5.xlarge"),
    "two launchers": ({"distribution": {"mpi": {"enabled": True}}}, {}, {"launcher": "python"}, "launcher: python"),
    "trainium": ({"instance_type": "ml.trn1.2xlarge"}, {}, {}, "AWS's own accelerators"),
    "a file": ({"inputs": {"train": "file:///data"}}, {}, {}, "cannot read file:///data"),
    "a flag": ({}, {}, {"args": {"verbose": True}}, "the flag --verbose has no value"),
    "warm spot": ({"use_spot_instances": True, "keep_alive_period_in_seconds": 60}, {}, {}, "exclude each other"),
    "own disks": ({"instance_type": "ml.g5.xlarge", "volume_kms_key": "k"}, {}, {}, "Leave volume_kms"),
    "a registry without a VPC": ({"training_repository_access_mode": "Vpc"}, {}, {}, "from a VPC alone"),
    "many variables": ({"environment": {f"A{n}": "x" for n in range(100)}}, {}, {}, "it takes 100 at most"),
    "a month": ({}, {}, {"resources": {"time": "29d"}}, "28 days"),
    "secrets without a network": (
        {"enable_network_isolation": True},
        {"secrets": "secretsmanager"},
        {"secrets": ["TOKEN"]},
        "cannot ask Secrets Manager",
    ),
    "a file system without a VPC": ({"inputs": {"shared": FILE_SYSTEM}}, {}, {}, "from a VPC alone"),
    "a manifest in files": ({"inputs": {"list": MANIFEST}}, {}, {}, "input_mode Pipe, not File"),
    "compressed files": ({"inputs": {"a": {"s3_data": "s3://b-c/x", "compression": "Gzip"}}}, {}, {}, "not File"),
    "many tags": ({"tags": {f"t{n}": "x" for n in range(50)}}, {}, {}, "53 entries; it takes 50 at most"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_sagemaker_cannot_carry_is_refused_before_anything_is_sent(why, plan) -> None:
    own, options, spec, what = REFUSALS[why]
    with pytest.raises(RenderError) as caught:
        plan(own, options, **spec)
    assert what in f"{caught.value.what} {caught.value.hint}"
    assert caught.value.where


PROCESSES = {
    "CPU": ({}, {}, (1, "torchrun")),
    "all GPUs": ({"instance_type": "ml.g5.12xlarge"}, {}, (4, "torchrun")),
    "as asked": ({"instance_type": "ml.g5.12xlarge"}, {"resources": {"procs_per_node": 2}}, (2, "torchrun")),
    "nothing to distribute": ({"instance_type": "ml.g5.12xlarge", "distributed_type": "NO"}, {}, (1, "torchrun")),
    "on the CPU": ({"instance_type": "ml.g5.12xlarge", "use_cpu": True}, {}, (1, "torchrun")),
    "mpi": ({"distribution": {"mpi": {"enabled": True, "processes_per_host": 3}}}, {}, (3, "mpirun")),
}


@pytest.mark.parametrize("why", PROCESSES)
def test_processes_follow_from_the_instances_and_the_distribution(why, agents_for) -> None:
    own, spec, (nproc, launcher) = PROCESSES[why]
    found = agents_for(own, **spec)
    assert found["nproc"] == nproc
    assert ("torch.distributed.run" in found["command"]["launcher"]) == (launcher == "torchrun")


@pytest.mark.parametrize("name", ["local", "local_gpu"])
def test_the_local_mode_of_the_sdk_is_refused_with_the_way_to_run_the_image_here(name, plan) -> None:
    with pytest.raises(RenderError, match=f"instance_type: {name} is the local mode") as error:
        plan({"instance_type": name, "image_uri": "mine:1"})
    assert "--cluster local --set environment.container=mine:1" in error.value.hint


def test_the_partition_of_a_region_is_the_one_that_botocore_knows() -> None:
    import boto3

    session = boto3.Session(region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    regions = {
        region: partition
        for partition in session.get_available_partitions()
        for region in session.get_available_regions("sts", partition)
    }
    assert len(regions) > 30
    assert {region: partition_of(region) for region in regions} == regions


def test_the_checkpoints_of_a_job_are_in_s3_and_a_directory_of_its_own_beside_its_records(cluster, job) -> None:
    place = "s3://my-bucket/orc/jobs/digits-k3f9a2/checkpoints"
    assert checkpoints_of(job(), "digits-k3f9a2", cluster()) == place
    own = job(checkpoint={"dir": "mine"})
    assert checkpoints_of(own, "digits-k3f9a2", cluster()) == f"{place}/.orc/digits-k3f9a2/mine"


# -- arguments that are hyperparameters, and arguments that cannot be


def read(*argv: str) -> dict[str, str]:
    return hyperparameters(argv, "digits: args")


def test_named_arguments_become_texts_and_booleans_are_explicit() -> None:
    assert read("--epochs", "3", "--fp16", "True") == {"epochs": "3", "fp16": "True"}


def test_both_spellings_of_a_value_and_negative_numbers_are_understood() -> None:
    assert read("--lr=0.1", "--shift", "-1e-3", "-b", "32", "--empty=") == {
        "lr": "0.1",
        "shift": "-1e-3",
        "b": "32",
        "empty": "",
    }


def test_no_arguments_are_no_hyperparameters() -> None:
    assert read() == {}


@pytest.mark.parametrize("argv", [["--flag"], ["--epochs", "3", "--flag"], ["--flag", "--epochs", "3"]])
def test_a_bare_flag_is_refused_with_what_to_write(argv) -> None:
    with pytest.raises(RenderError, match="the flag --flag has no value") as caught:
        read(*argv)
    assert "--flag True" in caught.value.hint
    assert "arguments: plain" in caught.value.hint
    assert caught.value.where == "digits: args"


@pytest.mark.parametrize("argv", [["value"], ["--epochs", "3", "value"], ["--", "value"]])
def test_a_positional_is_refused(argv) -> None:
    with pytest.raises(RenderError, match="has no name") as caught:
        read(*argv)
    assert "--name value" in caught.value.hint


def test_several_values_of_one_name_are_refused_with_a_way_out() -> None:
    with pytest.raises(RenderError) as caught:
        read("--tags", "a", "b")
    assert "--tags a,b" in caught.value.hint


def test_a_name_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RenderError, match="--tag is given twice"):
        read("--tag", "a", "--tag=b")
