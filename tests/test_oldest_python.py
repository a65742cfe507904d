"""The oldest Python of ranks: what travels to nodes uses nothing newer, and hosts with older ones are refused."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

import orc.runtime
from orc.launchers.oldest_python import OLDEST_FOR_AGENT, OLDEST_PYTHON, brings_python, python_problem
from orc.launchers.remote.programs import source
from orc.launchers.snapshot.runtime_tree import runtime_files
from orc.launchers.transfer.delivery import PRESENCE, RECEIVER
from orc.launchers.transfer.targets import COLLECTOR

ROOT = Path(__file__).parent.parent
FILES = {path: Path(os.fsdecode(source)) for path, source in runtime_files().items()}
# Of the standard library, newer than the oldest Python: all that this code base could be tempted to use.
NEWER = {
    *("typing.Self", "typing.NotRequired", "typing.Required", "typing.assert_never", "typing.LiteralString"),
    *("typing.Never", "typing.Unpack", "typing.TypeVarTuple", "typing.override", "typing.reveal_type"),
    *("enum.StrEnum", "enum.verify", "enum.ReprEnum", "datetime.UTC", "asyncio.timeout", "asyncio.TaskGroup"),
    *("contextlib.chdir", "hashlib.file_digest", "itertools.batched", "operator.call", "math.exp2", "math.cbrt"),
    *("logging.getLevelNamesMapping", "sys.exception", "tomllib", ".add_note", "ExceptionGroup", "LoggerAdapter[]"),
}


def too_new(tree: ast.AST) -> set[str]:
    """Names of `NEWER` that are used outside of ``if TYPE_CHECKING`` and of a branch for newer versions."""
    used: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if isinstance(node, ast.If) and ("TYPE_CHECKING" in test or "version_info" in test):
            for other in node.orelse:
                used |= too_new(other)
            continue
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            used |= {f".{node.attr}", f"{ast.unparse(node.value)}.{node.attr}"}
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.ClassDef):
            bases = [base.value for base in node.bases if isinstance(base, ast.Subscript)]
            used |= {f"{base.attr}[]" for base in bases if isinstance(base, ast.Attribute)}
        used |= too_new(node)
    return used & NEWER


def test_what_travels_uses_nothing_newer_than_the_oldest_python():
    for path, file in FILES.items():
        oldest = OLDEST_FOR_AGENT if path.startswith("lib/") or "/" not in path else OLDEST_PYTHON
        tree = ast.parse(file.read_bytes(), feature_version=oldest)
        assert not too_new(tree), f"{file}: {too_new(tree)}"
    newer = ast.parse("from typing import Self\ndef f(e): e.add_note('')")
    assert too_new(newer) == {"typing.Self", ".add_note"}


# What is sent to hosts as text, and runs there with bare Python.
SENT = {name for program in (PRESENCE, RECEIVER, COLLECTOR) for name in (program.module, *program.others)} | {
    *("environments.build", "environments.container", "environments.copied", "environments.requirements"),
    *("hosts.probe", "hosts.all_reduce_probe", "hosts.session_probe", "remote.ssh.watchdog"),
}


@pytest.mark.parametrize("name", sorted(SENT))
def test_what_is_sent_as_text_needs_the_oldest_python_of_agents_and_its_standard_library_alone(name):
    tree = ast.parse(source(name), feature_version=OLDEST_FOR_AGENT)
    assert not too_new(tree)
    assert "from __future__ import annotations" in source(name), "X | Y in annotations came with Python 3.10"
    assert "pairwise" not in source(name), "itertools.pairwise came with Python 3.10"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            needed = [str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert {module.split(".")[0] for module in needed} <= {*sys.stdlib_module_names, "orc"}
        elif isinstance(node, ast.Call):
            assert not [word for word in node.keywords if word.arg == "strict"], "zip(strict=) came with Python 3.10"
            if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                assert not isinstance(node.args[1], ast.BinOp), "X | Y came with Python 3.10"


def test_a_python_that_is_too_old_is_refused_with_what_it_would_need():
    assert python_problem((3, 10)) is None
    assert python_problem((3, 9, 18)) == "Python 3.9.18; ranks need 3.10 or newer"
    assert python_problem((3, 9, 18), environment=True) is None
    assert python_problem((3, 8), environment=True) == "Python 3.8; orc's agents need 3.9 or newer"
    assert brings_python({"kind": "conda"})
    assert brings_python({"kind": "venv", "python": "3.12"})
    assert not brings_python({"kind": "venv", "python": None})  # made with the node's
    assert not brings_python(None)
    assert orc.runtime.OLDEST_PYTHON == OLDEST_PYTHON
    stated = ".".join(map(str, OLDEST_PYTHON))
    assert f"Python {stated} or newer" in (ROOT / "docs/how-to/environments.md").read_text()
    assert f"Python {stated} or newer" in (ROOT / "runtime/__init__.py").read_text()
