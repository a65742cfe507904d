"""What is said about a plan before it is sent, where AWS itself has nothing to complain about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orc.launchers.backends.sagemaker.preflight import check

ACCOUNT = "123456789012"
NO_COMPLAINTS: Any = SimpleNamespace(
    account=lambda: ACCOUNT, identity=lambda: ACCOUNT, has_bucket=lambda _: True, role_problem=lambda _: ""
)


@pytest.mark.parametrize(
    ("own", "warned"),
    [
        ({"enable_network_isolation": True}, True),
        ({"enable_network_isolation": True, "install_requirements": False}, False),
        ({}, False),
    ],
)
def test_requirements_without_a_network_to_fetch_them_are_pointed_out(
    plan: Any, own: dict[str, Any], warned: bool
) -> None:
    found = check(NO_COMPLAINTS, plan(own), "sm")
    assert [finding.level for finding in found] == (["warning"] if warned else [])
    assert all("cannot install its requirements" in finding.what and finding.hint for finding in found)


OLD = {"pytorch_version": "1.12.1", "py_version": "py38"}


@pytest.mark.parametrize(
    ("image", "version"), [(OLD, "3.8"), ({"pytorch_version": "1.13.1", "py_version": "py39"}, "3.9")]
)
def test_an_image_in_which_no_rank_can_start_is_an_error(plan: Any, image: dict[str, str], version: str) -> None:
    (finding,) = check(NO_COMPLAINTS, plan(image), "sm")
    assert finding.level == "error"
    assert f"the image has Python {version}; ranks need 3.10 or newer" in finding.what
    assert "pytorch_version" in finding.hint
