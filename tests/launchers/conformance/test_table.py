"""The page that says which behaviour is tested on which backend is made from the tests themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parent / "table.py"


def test_the_table_of_backends_is_that_of_the_conformance_tests() -> None:
    # In a process of its own: pytest collects there, with no selection of this run.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, str(TABLE)], capture_output=True, text=True, cwd=TABLE.parents[3], env=env, timeout=300
    )
    advice = f"docs/reference/backends.md is not current; make it so with\n  python {TABLE} --write"
    assert done.returncode == 0, f"{advice}\n{done.stdout}{done.stderr}"
