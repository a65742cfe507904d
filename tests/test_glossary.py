"""The words of the field: the glossary's terms are in use, private words and ambiguous summaries are not."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.spec.job import JobSpec
from orc.orchestrator.cli.main import COMMANDS

REPOSITORY = Path(__file__).resolve().parent.parent
GLOSSARY = REPOSITORY / "docs" / "reference" / "glossary.md"
ROWS = [line.strip("| \n").split(" | ") for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")][1:]
# Words that meant something to their author alone, as parts of public names.
PRIVATE_WORDS = {"Hand", "Sight", "Look", "Cannot", "Gone", "Broken", "Refused", "Witness"}
PRIVATE_WORDS |= {"beside", "complain", "culprit", "culprits"}
# ... and such as are fine as a part of another name.
PRIVATE_NAMES = {"Side", "Kept", "Found", "Why", "Needs", "Change", "Waiting", "Elsewhere"}
PRIVATE_NAMES |= {"meet", "reach", "look", "why"}
EXEMPT = {"CannotPadNestedTensorWarning"}  # documented by others
VAGUE = re.compile(r"(What|Whether|Who|Whom|Whose|Which|Where|Why|How|When|One|Whoever)\b")
NO_ONE = re.compile(r".*\b(somebody|someone|anybody|nobody)\b", re.IGNORECASE)


def used(name: str) -> bool:
    """Return True for a Python name, a key of a job file or a command that exists."""
    if name.startswith("orc."):
        module, _, attribute = name.rpartition(".")
        while True:
            try:
                found: Any = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, more = module.rpartition(".")
                attribute = f"{more}.{attribute}"
        *owners, last = attribute.split(".")
        owner = reduce(getattr, owners, found)
        fields = [field.name for field in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
        return hasattr(owner, last) or last in fields
    if name.startswith("orc "):
        return name.split()[1] in COMMANDS
    kind: Any = JobSpec
    for key in name.removesuffix(":").split("."):
        hints = {**getattr(kind, "__annotations__", {})}
        if key not in hints:
            return False
        kind = getattr(importlib.import_module(JobSpec.__module__), str(hints[key]), None)
    return name.endswith(":")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_term_has_its_equivalents_and_is_used_as_the_glossary_says(row: list[str]) -> None:
    term, meaning, *others, name = row
    assert len(others) == 3
    assert meaning.endswith(".")
    assert used(name.strip("`")), f"{term}: {name} does not exist"


def test_the_glossary_is_short_and_has_each_term_once() -> None:
    terms = [row[0] for row in ROWS]
    assert len(terms) == len(set(terms)) <= 40


def sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ("launchers", "orchestrator", "runtime", "templates"):
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            yield path.relative_to(REPOSITORY).as_posix(), ast.parse(path.read_text())


def test_public_names_have_no_private_words() -> None:
    found = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if (
                isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name[0] != "_"
                and node.name not in EXEMPT
            ):
                words = set(re.findall(r"[A-Z][a-z]*", node.name) if node.name[0].isupper() else node.name.split("_"))
                found += (
                    [f"{path}:{node.lineno}: {node.name}"]
                    if words & PRIVATE_WORDS or node.name in PRIVATE_NAMES
                    else []
                )
    assert found == []


def test_summaries_name_a_noun_and_a_verb() -> None:
    found = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                ours = path.startswith(
                    ("launchers", "orchestrator")
                )  # the runtime has the phrases of its documentation
                if NO_ONE.match(text) or (ours and VAGUE.match(text)):
                    found.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert found == []
