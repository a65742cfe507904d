"""Comparing versions."""

import importlib.metadata

import pytest
import torch

from orc.runtime import compare_versions, is_torch_version


@pytest.mark.parametrize(
    ("left", "operation", "right", "expected"),
    [
        ("0.9.1", ">=", "0.10", False),
        ("1.10", ">", "1.9", True),
        ("2.0.0rc1", "<", "2.0.0", True),
        ("1.0", "==", "1.0.0", True),
        ("2.13.0+cpu", "==", "2.13.0", True),
        ("2.13.0+cpu", "!=", "2.13.0+cu121", True),
        ("1.0", "<=", "1.0", True),
    ],
)
def test_versions_are_ordered_as_numbers(left, operation, right, expected):
    assert compare_versions(left, operation, right) is expected


def test_a_library_is_looked_up():
    installed = importlib.metadata.version("pytest")
    assert compare_versions("pytest", "==", installed)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-library", ">", "1")


def test_the_version_of_torch():
    assert is_torch_version(">=", "2.4")
    assert not is_torch_version("<", "2.4")
    assert is_torch_version("==", torch.__version__)


def test_bad_questions():
    with pytest.raises(ValueError, match=r"must be one of \['>', '>=', '==', '!=', '<=', '<'\], received =>"):
        compare_versions("1.0", "=>", "1.0")
    with pytest.raises(ValueError, match="'new' is no version"):
        compare_versions("1.0", ">", "new")
