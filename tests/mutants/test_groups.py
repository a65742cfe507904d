"""The groups of mutants name files that there are: a module that has moved would be measured as nothing."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
GROUPS = configparser.ConfigParser()
GROUPS.read(Path(__file__).with_name("groups.ini"))


@pytest.mark.parametrize("name", GROUPS.sections())
def test_modules_and_tests_of_a_group_are_there(name: str) -> None:
    named = [*GROUPS[name]["modules"].split(), *GROUPS[name]["tests"].split()]
    assert [path for path in named if not (PROJECT / path).is_file()] == []
    assert len(set(named)) == len(named)
