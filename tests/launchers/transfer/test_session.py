"""The program that runs on the hosts: what it may need, and how small it is."""

from __future__ import annotations

import ast

import pytest

from orc.launchers.remote.programs import full_name, source
from orc.launchers.transfer.delivery import PRESENCE, RECEIVER
from orc.launchers.transfer.targets import COLLECTOR

PROGRAMS = [(each.module, *each.others) for each in (PRESENCE, RECEIVER, COLLECTOR)]


@pytest.mark.parametrize("modules", PROGRAMS)
def test_nothing_is_missing_on_the_way(modules: tuple[str, ...]) -> None:
    for name in modules:
        for node in ast.walk(ast.parse(source(name))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("orc."):
                assert str(node.module) in map(full_name, modules)


def test_the_program_is_small() -> None:
    """It goes to every host with every sync."""
    assert len(RECEIVER.packed) < 20_000
