"""The table of stock images against the SDK, and what is said of versions that do not go together."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.sagemaker.aws import stock_image
from orc.launchers.backends.sagemaker.images import (
    HUGGINGFACE,
    PYTORCH,
    REGISTRIES,
    Image,
    is_pending,
    pending,
    python_of,
)
from orc.launchers.errors import BackendError, RenderError

pytest.importorskip("sagemaker")


def image(pytorch: str | None = None, transformers: str | None = None, python: str | None = None, **more) -> Image:
    kind = more.get("instance_type", "ml.p3.2xlarge")
    return Image(pytorch, transformers, python, kind.startswith("ml.p"), kind, more.get("region", "us-east-1"))


@pytest.fixture(scope="module")
def sdk() -> Callable[[str], dict[str, Any]]:
    """The SDK's own table of training images of a framework; importing the SDK to ask it takes seconds."""
    found = importlib.util.find_spec("sagemaker.core")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent / "image_uri_config"
    return lambda name: json.loads((home / f"{name}.json").read_text())["training"]["versions"]


def test_every_pytorch_image_is_in_the_sdks_table(sdk) -> None:
    versions = sdk("pytorch")
    for version, python in PYTORCH.items():
        entry = versions[version]
        assert (entry["py_versions"], entry["repository"]) == ([python], "pytorch-training"), version
        for region in REGISTRIES:
            assert entry["registries"][region] == REGISTRIES[region], (version, region)
    assert list(PYTORCH)[-1] == list(versions)[-1]


def test_every_image_with_transformers_is_in_the_sdks_table(sdk) -> None:
    versions = sdk("huggingface")
    for (transformers, torch), (python, rest) in HUGGINGFACE.items():
        entry = versions[transformers][f"pytorch{torch}"]
        assert (entry["py_versions"], entry["container_version"]) == ([python], {"gpu": rest}), (transformers, torch)
        assert entry["repository"] == "huggingface-pytorch-training"


@pytest.mark.parametrize(
    ("pytorch", "transformers", "python", "more"),
    [
        ("2.5.1", None, "py311", {}),
        ("2.10.0", None, "py313", {"instance_type": "ml.c5.xlarge"}),
        ("2.1.0", None, "py310", {"region": "cn-north-1"}),
        ("1.10.2", "4.17.0", "py38", {}),
        ("2.8.0", "4.56.2", "py312", {}),
    ],
)
def test_the_sdk_makes_the_same_of_an_entry(pytorch, transformers, python, more) -> None:
    one = image(pytorch, transformers, python, **more)
    assert one.uri == stock_image(one, "test")


def test_a_short_version_is_the_newest_that_begins_with_it() -> None:
    assert image("2.5").uri == image("2.5.1").uri
    assert image(None, "4.46").uri == image("2.3.0", "4.46.1").uri
    assert image().uri == image(list(PYTORCH)[-1]).uri


def test_versions_without_an_image_are_left_to_the_sdk_which_refuses_them_by_name() -> None:
    unknown = image("2.99.0")
    assert is_pending(unknown.uri)
    assert pending(unknown.uri) == unknown
    with pytest.raises(BackendError, match="no stock image") as caught:
        stock_image(unknown, "cluster sm")
    assert "2.99.0" in caught.value.what
    assert is_pending(image("2.5.1", region="mx-central-1").uri)


def test_versions_that_contradict_each_other_are_refused_with_those_that_go_together() -> None:
    with pytest.raises(RenderError, match="has py38, not py310") as caught:
        assert image("1.10.2", None, "py310").uri
    assert "py_version: py38" in caught.value.hint
    with pytest.raises(RenderError, match=r"Transformers 4.17.0 and PyTorch 2.5.1") as caught:
        assert image("2.5.1", "4.17.0").uri
    assert "1.10.2" in caught.value.hint
    with pytest.raises(RenderError, match="for GPUs alone"):
        assert image("2.3.0", "4.46.1", instance_type="ml.c5.xlarge").uri


def test_the_python_of_an_image_is_read_from_its_tag() -> None:
    assert python_of(image("2.5.1").uri) == (3, 11)
    assert python_of(image("1.10.2", "4.17.0").uri) == (3, 8)
    assert python_of("123.dkr.ecr.us-east-1.amazonaws.com/mine:1") is None
