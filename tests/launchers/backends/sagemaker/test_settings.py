"""What may be written under the options of clusters and jobs, and what is said of everything else."""

from __future__ import annotations

import pytest

from orc.launchers.backends import open_backend
from orc.launchers.backends.sagemaker.settings import CLUSTER_KEYS, ELSEWHERE, REFUSED, known_names, read_settings
from orc.launchers.errors import LaunchError, SpecError
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import get_cluster


def test_the_documented_configuration_is_read_as_it_is(cluster, job, documented) -> None:
    given = dict.fromkeys(cluster().options)  # nothing but the documented keys
    found = read_settings(cluster(**{**given, **documented}), job())
    assert (found.place.profile, found.place.region) == ("xxxxx", "us-east-1")
    assert (found.instance_type, found.instance_count, found.role) == ("ml.p3.16xlarge", 1, "xxxxx")
    assert (found.pytorch_version, found.transformers_version, found.py_version) == ("1.10.2", "4.17.0", "py38")
    assert (found.base_job_name, found.distributed_type) == ("accelerate-sagemaker-1", "DATA_PARALLEL")
    assert (found.mixed_precision, found.use_cpu, found.image_uri) == ("fp16", False, None)
    assert (found.use_spot_instances, found.max_wait, found.enable_network_isolation) == (True, 86400, True)


def test_a_jobs_values_go_over_the_clusters(settings) -> None:
    found = settings({"instance_type": "ml.g5.xlarge", "max_run": "2h"}, volume_size=100, max_run=60)
    assert (found.instance_type, found.volume_size, found.max_run) == ("ml.g5.xlarge", 100, 7200)


def test_environment_and_tags_are_joined(settings) -> None:
    found = settings(
        {"environment": {"A": "2"}, "tags": [{"Key": "team", "Value": "nlp"}]},
        environment={"A": "1", "B": 3},
        tags={"team": "vision", "cost": "x1"},
    )
    assert found.environment == {"A": "2", "B": "3"}
    assert found.tags == {"team": "nlp", "cost": "x1"}


def test_a_jobs_distribution_replaces_the_clusters_in_the_other_form_too(settings) -> None:
    found = settings({"distribution": {"torch_distributed": {"enabled": True}}}, distributed_type="DATA_PARALLEL")
    assert (found.distribution.kind, found.distributed_type) == ("torchrun", None)


def test_a_jobs_versions_replace_the_clusters_image(settings) -> None:
    assert settings({"pytorch_version": "2.6.0"}, image_uri="mine:1").image_uri is None


def test_an_unknown_key_is_answered_with_the_nearest(settings) -> None:
    with pytest.raises(SpecError, match="unknown key 'use_spot_instance', did you mean 'use_spot_instances'"):
        settings({"additional_args": {"use_spot_instance": True}})
    with pytest.raises(SpecError, match="unknown key 'ec2_instance', did you mean 'ec2_instance_type'"):
        settings(ec2_instance="ml.c5.xlarge")


def test_a_mistake_is_named_with_its_line_and_column(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("ORC_CLUSTERS", raising=False)
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("sm:\n  kind: sagemaker\n  options:\n    region: us-east-1\n    volume_sise: 30\n")
    with pytest.raises(SpecError) as caught:
        open_backend(get_cluster("sm", clusters)).render(None, None, None)
    assert caught.value.where == f"{clusters}:5:5"
    clusters.write_text(
        "sm:\n  kind: sagemaker\n  options:\n    region: us-east-1\n    additional_args:\n      max_run: x\n"
    )
    with pytest.raises(SpecError, match="max_run: ") as caught:
        read_settings(get_cluster("sm", clusters))
    assert caught.value.where == f"{clusters}:6:16"
    (tmp_path / "t.py").touch()
    file = tmp_path / "job.yaml"
    file.write_text("name: x\nscript: t.py\nresources:\n  options:\n    sagemaker:\n      max_wait: -1\n")
    clusters.write_text("sm:\n  kind: sagemaker\n  options:\n    region: us-east-1\n")
    with pytest.raises(SpecError, match="max_wait: expected") as caught:
        read_settings(get_cluster("sm", clusters), load_job(file).spec)
    assert caught.value.where == f"{file}:6:17"


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_carried_is_refused_by_name_with_the_reason(settings, name) -> None:
    with pytest.raises(SpecError, match=f"{name} cannot be carried: ") as caught:
        settings({"additional_args": {name: "x"}})
    assert REFUSED[name] in caught.value.what


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_argument_with_another_place_is_sent_there(settings, name) -> None:
    with pytest.raises(SpecError, match=f"{name} has another place") as caught:
        settings({name: "x"})
    assert ELSEWHERE[name] in caught.value.hint


def test_what_configuration_files_say_about_debugging_is_read(settings) -> None:
    assert settings({"debug": False}) == settings({})
    with pytest.raises(SpecError, match="debug: True is a setting of the job") as caught:
        settings({"debug": True})
    assert "debug_mode: true" in caught.value.hint


def test_arguments_that_are_switched_off_are_no_wish(settings) -> None:
    assert settings({"debugger_hook_config": False, "rules": [], "max_wait": None}).max_wait is None


@pytest.mark.parametrize("name", CLUSTER_KEYS)
def test_what_describes_the_cluster_is_not_for_jobs(settings, name) -> None:
    with pytest.raises(SpecError, match=f"{name!r} describes the cluster"):
        settings({name: "x"})


def test_one_setting_under_two_names_is_refused(settings) -> None:
    with pytest.raises(SpecError, match="given twice, also as instance_type"):
        settings({"instance_type": "ml.c5.xlarge", "additional_args": {"ec2_instance_type": "ml.c5.2xlarge"}})


FILE_SYSTEM = {"file_system_id": "fs-0123456789abcdef0", "file_system_type": "EFS", "directory_path": "/x"}
BAD = {
    "instance_count": [0, True, "x"],
    "role": ["arn:aws:iam::1:role/x", "a b"],
    "pytorch_version": ["two", 2, 2.10],
    "transformers_version": [4.10],
    "image_uri": ["x" * 256],
    "training_plan": ["mine"],
    "instance_placement_config": [{"PlacementSpecifications": [{}]}, {"Racks": 1}],
    "experiment_config": [{"ExperimentNam": "x"}, {"ExperimentName": "a_b"}, "digits"],
    "tensorboard_output_config": [{}, {"S3OutputPath": "/tmp"}],
    "profiler_config": [
        {"ProfilingIntervalInMilliseconds": "often"},
        {"ProfilingParameters": {"LocalPath": 7}},
        {"S3OutputPath": "s3://my-data/x", "Rules": []},
    ],
    "training_repository_credentials_provider_arn": ["credentials"],
    "py_version": ["3.8"],
    "base_job_name": ["under_score", "-x"],
    "volume_size": [0, 1.5],
    "use_spot_instances": ["maybe", 1],
    "mixed_precision": ["fp17", 16],
    "max_run": [0, "soon"],
    "max_pending": [60],
    "keep_alive_period_in_seconds": [100_000],
    "output_path": ["/tmp/x"],
    "checkpoint_local_path": ["checkpoints"],
    "subnets": ["a b", [f"subnet-{n}" for n in range(17)]],
    "security_group_ids": [[f"sg-{n}" for n in range(6)]],
    "environment": [{"1A": "x"}, {"SM_HOSTS": "x"}, {"A": "x" * 513}, "A=1"],
    "tags": [{"orc:x": "1"}, {"a": "é€\n"}, "team"],
    "metric_definitions": [{"loss": "x" * 501}, {"": "x"}, "loss"],
    "inputs": [
        *({"orc": "s3://bucket/x"}, {"a b": "s3://bucket/x"}, {"a": {"s3_data": "x"}}, {"a": {}}),
        {"a": f"s3://bucket/{'x' * 1024}"},
        {"a": {"s3_data": "s3://bucket/x", "attribute_names": ["label"]}},
        {"a": {"s3_data": "s3://bucket/x", "s3_data_type": "AugmentedManifestFile"}},
        {"a": {**FILE_SYSTEM, "input_mode": "Pipe"}},
        {"a": {**FILE_SYSTEM, "file_system_id": "fs-0123456789abcdef01234"}},
    ],
    "input_mode": ["Slow"],
    "arguments": ["bare"],
    "distributed_type": ["MODEL_PARALLEL", "FSDP"],
    "compute_environment": ["LOCAL_MACHINE"],
    "distribution": [
        "mpi",
        {"horovod": {"enabled": True}},
        {"smdistributed": {"modelparallel": {"enabled": True}}},
        {"mpi": {"enabled": True, "processes": 2}},
        {"mpi": {"enabled": True}, "torch_distributed": {"enabled": True}},
    ],
    "additional_args": ["x"],
}


def test_a_version_that_yaml_has_made_a_number_of_is_what_it_can_only_be(settings) -> None:
    assert settings({"pytorch_version": 2.6}).pytorch_version == "2.6"
    assert settings({"pytorch_version": "2.1"}).pytorch_version == "2.1"
    with pytest.raises(SpecError, match=r"2\.1 may have been written as 2\.10, .*; put it in quotes"):
        settings({"pytorch_version": 2.10})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_that_cannot_be_is_refused_with_its_key(plan, name, value) -> None:
    with pytest.raises(LaunchError) as caught:
        plan({"subnets": "subnet-1", "security_group_ids": "sg-1", name: value})
    assert name in caught.value.what
    assert "resources.options.sagemaker" in caught.value.where


PLACES = {"region": "mars", "account": "1", "bucket": "B", "endpoint_url": "x", "secrets": "env", "prices": {"a": "x"}}


@pytest.mark.parametrize(("name", "value"), PLACES.items())
def test_a_cluster_that_cannot_be_is_refused_with_its_key(settings, name, value) -> None:
    with pytest.raises(SpecError, match=rf"{name}(\.a)?: "):
        settings(**{name: value})


def test_a_cluster_without_a_region_or_with_a_root_says_what_to_write(cluster) -> None:
    with pytest.raises(SpecError, match="has no region"):
        open_backend(cluster(region=None))
    with pytest.raises(SpecError, match="has a root") as caught:
        open_backend(cluster().model_copy(update={"root": "/x"}))
    assert "bucket" in caught.value.hint


def test_tables_of_inputs_and_metrics_are_read_beside_the_clusters_file(tmp_path) -> None:
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(
        "sm:\n  kind: sagemaker\n  options:\n    region: us-east-1\n"
        "    sagemaker_inputs_file: inputs.tsv\n    sagemaker_metrics_file: metrics.tsv\n"
    )
    (tmp_path / "inputs.tsv").write_text(
        "channel_name\tdata_location\ntrain\ts3://my-data/train\n\nval\ts3://my-data/v\n"
    )
    (tmp_path / "metrics.tsv").write_text("metric_name\tmetric_regex\naccuracy\t'accuracy': (0.[0-9]+)\n")
    found = read_settings(get_cluster("sm", clusters))
    assert {name: channel.s3_data for name, channel in found.inputs.items()} == {
        "train": "s3://my-data/train",
        "val": "s3://my-data/v",
    }
    assert found.metric_definitions == ({"Name": "accuracy", "Regex": "'accuracy': (0.[0-9]+)"},)
    (tmp_path / "inputs.tsv").write_text("train s3://my-data/train\n")
    with pytest.raises(SpecError, match="separated by a tab") as caught:
        read_settings(get_cluster("sm", clusters))
    assert caught.value.where == f"{tmp_path / 'inputs.tsv'}:1"
    (tmp_path / "inputs.tsv").unlink()
    with pytest.raises(SpecError, match="cannot read") as caught:
        read_settings(get_cluster("sm", clusters))
    assert caught.value.where == f"{clusters}:5:5"


def test_no_name_has_two_meanings() -> None:
    names = [*known_names(), *ELSEWHERE, *REFUSED]
    assert len(names) == len(set(names))
