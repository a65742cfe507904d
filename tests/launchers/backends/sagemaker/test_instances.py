"""The table of instance types against what AWS's own packages know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orc.launchers.backends.sagemaker.instances import instances

botocore = pytest.importorskip("botocore.session")


def test_every_type_that_trains_is_in_the_table_and_no_other() -> None:
    model = botocore.get_session().get_service_model("sagemaker")
    assert set(model.shape_for("TrainingInstanceType").enum) == set(instances())


def test_the_sdk_counts_the_same_gpus() -> None:
    import importlib.util

    found = importlib.util.find_spec("sagemaker.core")
    assert found is not None
    assert found.origin is not None
    table = Path(found.origin).parent / "image_uri_config" / "instance_gpu_info.json"
    compared = 0
    for region in json.loads(table.read_text()).values():
        for name, info in region.items():
            if name in instances():  # the SDK has a misspelt one
                compared += 1
                assert instances()[name].gpus == info["Count"], name
    assert compared > 100


def test_sizes_are_read() -> None:
    big = instances()["ml.p3.16xlarge"]
    assert (big.vcpus, big.memory_gib, big.gpus, big.neuron) == (64, 488, 8, False)
    assert instances()["ml.trn1.2xlarge"].neuron
    assert all(each.vcpus >= 2 and each.memory_gib >= 4 for each in instances().values())
