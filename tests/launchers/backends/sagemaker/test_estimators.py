"""Estimators of the SageMaker SDK, or their arguments, as jobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orc.launchers.backends.sagemaker.estimators import load_estimator
from orc.launchers.backends.sagemaker.settings import read_settings
from orc.launchers.errors import SpecError
from orc.launchers.spec import LoadedJob
from orc.orchestrator.client import Client


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "scripts").mkdir(parents=True)
    (directory / "train.py").touch()
    (directory / "scripts" / "tune.py").touch()
    return directory


@pytest.fixture
def load(cluster, source) -> Any:
    def made(estimator: Any = None, **more: Any) -> LoadedJob:
        given = {"entry_point": "train.py", "source_dir": str(source)} if estimator is None else estimator
        if isinstance(given, dict):
            given = {**given, **more.pop("given", {})}
        return load_estimator(given, cluster(), **more)

    return made


def test_the_documented_configuration_and_a_script_are_a_job(documented, cluster, source) -> None:
    own = cluster(profile="xxxxx")
    given = {**documented, "entry_point": "train.py", "source_dir": source}
    loaded = load_estimator({**given, "hyperparameters": {"epochs": 3, "fp16": True}}, own)
    assert (loaded.spec.name, loaded.spec.script) == ("accelerate-sagemaker-1", "train.py")
    assert loaded.workdir == source
    assert loaded.spec.argv == ("--epochs", "3", "--fp16", "True")
    found = read_settings(own, loaded.spec)
    assert (found.instance_type, found.role, found.transformers_version) == ("ml.p3.16xlarge", "xxxxx", "4.17.0")
    assert (found.use_spot_instances, found.max_wait) == (True, 86400)


def test_an_object_with_an_estimators_attributes_is_the_same_as_its_arguments(load, cluster, source) -> None:
    class Estimator(SimpleNamespace):
        def hyperparameters(self) -> dict[str, str]:
            return {"epochs": "3"}

        def fit(self) -> None:
            raise AssertionError("nobody asked for this")

    made = Estimator(
        entry_point="train.py",
        source_dir=str(source),
        instance_type="ml.g5.xlarge",
        instance_count=2,
        framework_version="2.5.1",
        use_spot_instances=True,
        max_run=60,
        max_wait=120,
        distribution={"torch_distributed": {"enabled": True}},
        sagemaker_session=object(),
        container_log_level=20,
        debugger_hook_config=None,
        tags=[],
        git_config=None,
    )
    loaded = load(made)
    found = read_settings(cluster(), loaded.spec)
    assert (found.instance_type, found.instance_count, found.pytorch_version) == ("ml.g5.xlarge", 2, "2.5.1")
    assert (found.use_spot_instances, found.max_wait, found.distribution.kind) == (True, 120, "torchrun")
    assert loaded.spec.argv == ("--epochs", "3")


def test_an_objects_own_configurations_are_parts_of_the_request(load, cluster, source) -> None:
    class Board:
        def _to_request_dict(self) -> dict[str, str]:
            return {"S3OutputPath": "s3://my-models/board"}

    made = SimpleNamespace(entry_point="train.py", source_dir=str(source), tensorboard_output_config=Board())
    for estimator in (made, vars(made)):
        found = read_settings(cluster(), load(estimator).spec)
        assert found.tensorboard_output_config == {"S3OutputPath": "s3://my-models/board"}


def test_an_object_that_asks_for_what_cannot_be_is_refused(load, cluster, source) -> None:
    made = SimpleNamespace(entry_point="train.py", source_dir=str(source), git_config={"repo": "x"})
    with pytest.raises(SpecError, match="git_config cannot be carried"):
        read_settings(cluster(), load(made).spec)


def test_values_become_the_texts_that_the_sdk_makes_of_them(load) -> None:
    values = {"lr": 0.1, "flag": False, "name": "x y", "sizes": [1, 2], "shift": -1, "none": None, "odd": "--x"}
    loaded = load(given={"hyperparameters": values})
    assert loaded.spec.argv == (
        *("--lr", "0.1", "--flag", "False", "--name", "x y", "--sizes", "[1, 2]", "--shift=-1", "--odd=--x"),
    )


def test_inputs_are_locations_mappings_or_the_sdks_own(load, cluster) -> None:
    data = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://my-data/x", "S3DataDistributionType": None}}
    own = SimpleNamespace(config={"DataSource": data, "ContentType": "text/csv"})
    loaded = load(inputs={"train": "s3://my-data/train", "val": own})
    assert read_settings(cluster(), loaded.spec).model_dump(exclude_unset=True)["inputs"] == {
        "train": {"s3_data": "s3://my-data/train"},
        "val": {"s3_data": "s3://my-data/x", "s3_data_type": "S3Prefix", "content_type": "text/csv"},
    }
    found = read_settings(cluster(), load(inputs="s3://my-data/x").spec)
    assert found.model_dump(exclude_unset=True)["inputs"] == {"training": {"s3_data": "s3://my-data/x"}}


def test_tables_are_read_when_the_job_is_made(load, cluster, tmp_path) -> None:
    (tmp_path / "metrics.tsv").write_text("loss\tloss=([0-9.]+)\n")
    loaded = load(given={"sagemaker_metrics_file": str(tmp_path / "metrics.tsv")})
    assert read_settings(cluster(), loaded.spec).metric_definitions == ({"Name": "loss", "Regex": "loss=([0-9.]+)"},)


def test_a_script_may_lie_anywhere_in_its_directory(load, source) -> None:
    assert load({"entry_point": "scripts/tune.py", "source_dir": str(source)}).spec.script == "scripts/tune.py"
    assert load({"entry_point": str(source / "scripts" / "tune.py")}).workdir == source / "scripts"


PROBLEMS = {
    "no script": ({"entry_point": None}, "there is no entry_point"),
    "missing script": ({"entry_point": "nothing.py"}, "there is no file"),
    "in S3": ({"source_dir": "s3://b/source.tar.gz"}, "is not on this machine"),
    "another region": ({"region": "eu-west-1"}, "region = eu-west-1, but that of the cluster sm is us-east-1"),
    "another bucket": ({"bucket": "x"}, "bucket describes the cluster"),
    "hyperparameters": ({"hyperparameters": [1]}, "expected a mapping"),
    "given twice": ({"max_run": 1, "additional_args": {"max_run": 2}}, "max_run is given twice"),
    "a bad name": ({"base_job_name": "???"}, "needs at least one letter"),
}


@pytest.mark.parametrize("why", PROBLEMS)
def test_an_estimator_that_is_no_job_says_why(why, load) -> None:
    given, what = PROBLEMS[why]
    with pytest.raises(SpecError) as caught:
        load(given=given)
    assert what in caught.value.what


def test_a_client_submits_an_estimator_to_a_platform_that_has_them_and_to_no_other(
    cluster, source, orc_home, monkeypatch
) -> None:
    (orc_home / "config").mkdir(parents=True)
    entry = {"sm": cluster().model_dump(mode="json", include={"kind", "options"})}
    (orc_home / "config" / "clusters.yaml").write_text(yaml.safe_dump(entry))
    sent = []
    monkeypatch.setattr(Client, "submit", lambda self, loaded, **_: sent.append(loaded))
    given = {"entry_point": "train.py", "source_dir": str(source)}
    with Client() as client:
        client.submit_estimator(given, cluster="sm", inputs="s3://my-data/x", name="mine")
        with pytest.raises(SpecError, match="local is of kind local, which has no estimators"):
            client.submit_estimator(given, cluster="local")
    (loaded,) = sent
    assert (loaded.spec.name, loaded.spec.script, loaded.spec.cluster) == ("mine", "train.py", "sm")
