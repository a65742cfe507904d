"""Other users of the machine can look into nothing that the commands leave, whatever the umask is."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from orc.launchers.foreground.launch import runtime_path

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_directories_of_a_submission_and_of_a_launch_are_private(orc, job_file, orc_home, umask):
    before = os.umask(umask)
    try:
        assert orc("submit", job_file("name: n\ncommand: 'true'\n"), "--follow").code == 0
        runtime_path()
    finally:
        os.umask(before)
    state = orc_home / "state"
    made = {path.relative_to(state).parts[0] for path in state.iterdir() if path.is_dir()}
    assert {"jobs", "python-path", "store"} <= made
    below_private = ("__pycache__",)  # Python's own, inside of a tree that nobody else can enter
    loose = [
        str(path.relative_to(state))
        for path in [state, *state.rglob("*")]
        if path.is_dir() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert [path for path in loose if Path(path).name not in below_private] == []


def _mode(call: ast.Call) -> int | None:
    return next((k.value.value for k in call.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)), None)


def test_no_code_counts_on_a_mode_for_the_parents_of_a_directory():
    """Python gives *mode* to the last directory alone: `strict_modes.make_private` gives it to all."""
    found = []
    for room in ("launchers", "orchestrator"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                parents = any(k.arg == "parents" for k in node.keywords) and node.func.attr == "mkdir"
                if parents and _mode(node) == 0o700:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
