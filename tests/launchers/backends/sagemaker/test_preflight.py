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
