"""The program that runs on the hosts: what it may need, and what the laptop makes of its end."""

from __future__ import annotations

import ast
import sys

import pytest

from orc.launchers.remote.programs import full_name, source
from orc.launchers.remote.shipped import CODE
from orc.launchers.remote.ssh import remote_hand
from orc.launchers.transfer import program

SYNC, COLLECT = ((each.module, *each.others) for each in (program._SYNC, program._COLLECT))
SHIPPED = sorted({*SYNC, *COLLECT})


@pytest.mark.parametrize("name", SHIPPED)
def test_what_travels_is_python_3_9_and_needs_the_standard_library_only(name: str) -> None:
    tree = ast.parse(source(name), feature_version=(3, 9))
    needed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            needed |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            assert not node.keywords, f"line {node.lineno}: zip(strict=) came with Python 3.10"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            assert not isinstance(node.args[1], ast.BinOp), f"line {node.lineno}: X | Y came with Python 3.10"
    ours = {full_name(module) for module in SHIPPED}
    assert not {module for module in needed - ours if module.split(".")[0] not in sys.stdlib_module_names}
    assert "from __future__ import annotations" in source(name)


@pytest.mark.parametrize("modules", [SYNC, COLLECT])
def test_nothing_is_missing_on_the_way(modules: tuple[str, ...]) -> None:
    """But for what only the other program needs, and asks for inside of a function."""
    for name in modules:
        tree = ast.parse(source(name))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orc."):
                assert str(node.module) in map(full_name, modules)


def test_the_program_is_small() -> None:
    """It goes to every host with every sync."""
    assert len(program._SYNC.packed()) < 22_000
    assert len(program._SYNC.packed(CODE)) < remote_hand.CHUNK  # one frame
