"""What is said about a TPU before it is asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from orc.launchers.backends.tpu.preflight import _old_python


@pytest.mark.parametrize(
    ("runtime_version", "agent", "refused"),
    [
        ("tpu-vm-base", {}, True),
        ("tpu-vm-pt-1.13", {"python": None}, True),
        ("tpu-vm-base", {"python": "~/venv/bin/python"}, False),
        ("tpu-vm-base", {"environment": {"kind": "container"}}, False),
        ("tpu-ubuntu2204-base", {}, False),
        ("v2-alpha-tpuv6e", {}, False),
    ],
)
def test_software_whose_python_cannot_start_ranks_is_refused(
    runtime_version: str, agent: dict[str, Any], refused: bool
) -> None:
    plan: Any = SimpleNamespace(files=[SimpleNamespace(host="worker-0", content=json.dumps(agent))])
    found = list(_old_python(plan, runtime_version))
    assert [finding.level for finding in found] == ["error"] * refused
    assert all("Python 3.8; ranks need 3.10 or newer" in finding.what and finding.hint for finding in found)
