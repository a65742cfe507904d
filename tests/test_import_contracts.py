"""What import-linter cannot say: what a file that travels may need, and what start-up may load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNTIME_NEEDS = {"orc", "torch", "numpy", "safetensors"}
# Optional packages: imported where they are used, never with the module.
RUNTIME_CAN_USE = {"aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboardX", "trackio", "wandb"}
RUNTIME_CAN_USE |= {"boto3", "botocore", "fsspec"}


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports anywhere, relative imports as ``.``."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module)


def test_the_agent_needs_the_standard_library_alone() -> None:
    names = {name.partition(".")[0] for name in imported(ROOT / "launchers/agent.py")}
    assert names <= sys.stdlib_module_names
    assert "json" in names


def imported_on_use(path: Path) -> set[str]:
    """Full names of the modules that a file imports inside functions, or for type checkers alone."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or typing_only:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    names |= {alias.name for alias in inner.names}
                elif isinstance(inner, ast.ImportFrom):
                    names.add(str(inner.module))
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "runtime").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_runtime_needs_torch_and_itself_alone(path: Path) -> None:
    on_use = imported_on_use(path)
    for name in imported(path):
        top = name.partition(".")[0]
        allowed = sys.stdlib_module_names | RUNTIME_NEEDS | (RUNTIME_CAN_USE if name in on_use else set())
        assert top in allowed, f"{path} imports {name}"
        assert top != "orc" or name.startswith("orc.runtime"), f"{path} imports {name}"


def test_importing_the_whole_launch_layer_loads_nothing_heavy() -> None:
    code = """
import importlib, json, pkgutil, sys
import orc.launchers
for module in pkgutil.walk_packages(orc.launchers.__path__, "orc.launchers."):
    importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    heavy = {
        "torch",
        "numpy",
        "sqlalchemy",
        "alembic",
        "jinja2",
        "rich",
        "paramiko",
        "fabric",
        "psutil",
        "platformdirs",
    }
    heavy |= {"boto3", "sagemaker", "google.cloud", "submitit", "pathspec", "importlib.metadata"}
    assert "orc.launchers.snapshot.content_store" in loaded
    assert loaded & heavy == set()
