"""The container of SageMaker as its program sees it: hosts, variables, secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orc.launchers.backends.sagemaker import entry
from orc.launchers.containers.program import Failure

RESOURCES = {
    "current_host": "algo-2",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "network_interface_name": "eth0",
}


def test_hosts_are_counted_by_their_numbers() -> None:
    assert entry.host_order(RESOURCES["hosts"]) == ["algo-1", "algo-2", "algo-10"]  # type: ignore[arg-type]


def test_the_documented_variables_are_derived_from_the_files_of_the_container() -> None:
    hyperparameters = {"epochs": "3", "lr": "0.1", "use-cuda": "true", "name": "a b", "tags": '["x"]'}
    found = entry.sagemaker_variables(RESOURCES, {"train": {}, "my-data": {}}, hyperparameters)
    expected = {
        "SM_CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_HOST_COUNT": "3",
        "SM_HOSTS": '["algo-1", "algo-2", "algo-10"]',
        "SM_MASTER_ADDR": "algo-1",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge",
        "SM_CHANNELS": '["my-data", "train"]',
        "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
        "SM_CHANNEL_MY_DATA": "/opt/ml/input/data/my-data",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_HP_EPOCHS": "3",
        "SM_HP_USE_CUDA": "true",
        "SM_HP_NAME": "a b",
        "SM_HP_TAGS": '["x"]',
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    assert {name: found[name] for name in expected} == expected
    assert json.loads(found["SM_HPS"]) == {"epochs": 3, "lr": 0.1, "use-cuda": True, "name": "a b", "tags": ["x"]}
    assert json.loads(found["SM_USER_ARGS"])[:4] == ["--epochs", "3", "--lr", "0.1"]
    assert json.loads(found["SM_TRAINING_ENV"])["channel_input_dirs"]["train"] == "/opt/ml/input/data/train"


def test_without_boto3_in_the_image_secrets_of_secrets_manager_are_a_clear_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = {"backend": {"secrets": {"from": "secretsmanager", "id": "orc/x", "region": "us-east-1"}}}
    with pytest.raises(Failure, match="the image has no boto3"):
        entry.secrets(config)


def test_secrets_that_come_by_the_channel_are_not_asked_for() -> None:
    assert entry.secrets({"backend": {"secrets": {"from": "channel"}}}) is None
    assert entry.secrets({}) is None
