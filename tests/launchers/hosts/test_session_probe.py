"""What runs on the nodes with bare Python, sent as text or beside the agent."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from orc import launchers
from orc.launchers.hosts.session_probe import device_memory

PROGRAMS = (
    "environments/build.py",
    "environments/container.py",
    "environments/copied.py",
    "environments/requirements.py",
    "hosts/probe.py",
    "hosts/all_reduce_probe.py",
    "hosts/promised_speed.py",
    "hosts/session_probe.py",
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_nodes_are_python_3_9_and_import_the_standard_library_only(name: str) -> None:
    tree = ast.parse((Path(launchers.__file__).parent / name).read_text(), feature_version=(3, 9))
    imported = {
        module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported <= {*sys.stdlib_module_names, "orc"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & {"pairwise", "batched", "StrEnum"}  # newer than 3.9
    strict = [
        call for call in ast.walk(tree) if isinstance(call, ast.Call) and any(k.arg == "strict" for k in call.keywords)
    ]
    assert strict == []  # zip(strict=) is 3.10


def test_the_memory_of_a_gpu_is_what_its_rank_has_told_of_in_numbers(tmp_path: Path) -> None:
    (tmp_path / "device-3.json").write_text('{"name": "L4", "memory_allocated": 3, "memory_reserved": "much"}')
    assert device_memory(str(tmp_path), "3") == {"memory_allocated": 3}
    assert device_memory(str(tmp_path), "4") == device_memory(str(tmp_path), "") == {}
