"""The program that runs on the hosts: what it may need, and how small it is."""

from __future__ import annotations

import ast
import sys

import pytest

from orc.launchers.remote.programs import full_name, source
from orc.launchers.transfer.delivery import PRESENCE, RECEIVER
from orc.launchers.transfer.targets import COLLECTOR

PROGRAMS = [(each.module, *each.others) for each in (PRESENCE, RECEIVER, COLLECTOR)]
SHIPPED = sorted({name for names in PROGRAMS for name in names})


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


@pytest.mark.parametrize("modules", PROGRAMS)
def test_nothing_is_missing_on_the_way(modules: tuple[str, ...]) -> None:
    for name in modules:
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orc."):
                assert str(node.module) in map(full_name, modules)


def test_the_program_is_small() -> None:
    """It goes to every host with every sync."""
    assert len(RECEIVER.packed) < 20_000
