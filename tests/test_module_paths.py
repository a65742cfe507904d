"""Every module path of ours in a string leads to a module, or to something in one: a move leaves strings behind."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("launchers", "orchestrator", "runtime")
_PATH = re.compile(rf"orc\.({'|'.join(ROOMS)})(\.[A-Za-z_]\w*)+")


def _docstrings(tree: ast.AST) -> set[int]:
    nodes = (
        n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return {id(n.body[0].value) for n in nodes if n.body and isinstance(n.body[0], ast.Expr)}


def _strings() -> list[tuple[str, str]]:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            pieces = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
            skipped = _docstrings(tree) | pieces
            for node in ast.walk(tree):
                if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in skipped:
                    continue
                if _PATH.fullmatch(node.value):
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node.value))
    return found


def _leads_somewhere(path: str) -> bool:
    module, names = path, []
    while True:
        try:
            place = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                return True  # a library that is not installed here
            module, _, name = module.rpartition(".")
            names.insert(0, name)
            if "." not in module:
                return False
    for name in names:
        if not hasattr(place, name):
            return False
        place = getattr(place, name)
    return True


def test_module_paths_in_strings_lead_somewhere():
    strings = _strings()
    assert len(strings) > 10
    assert [(where, path) for where, path in strings if not _leads_somewhere(path)] == []


def test_no_module_is_looked_for_by_a_path_that_is_put_together():
    """`sys.modules.get` answers a wrong path with `None`, and what hangs on it is silently left out."""
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"sys\.modules(\.get\(|\[)f[\"']orc", line)
    ]
    assert lines == []
