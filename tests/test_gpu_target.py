"""`make test-gpu` where there is no GPU, and where there is nothing to run it with."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "gpu/run.sh"


@pytest.mark.parametrize(
    ("python", "status", "message"),
    [
        ('[[ "$2" != *is_available* ]]', 0, "test-gpu: SKIPPED: torch sees no CUDA device here\n"),
        ('[[ "$2" != "import pytest" ]]', 1, "has no pytest, which these tests need\n"),
        ('[ "$1" = -c ] || { echo "PYTHONPATH=$PYTHONPATH $*"; exit 3; }', 3, "--confcutdir=tests/gpu tests/gpu -q\n"),
    ],
)
def test_it_skips_itself_by_name_or_runs_what_is_there(tmp_path, python, status, message):
    (tmp_path / "python").write_text(f"#!/bin/bash\n{python}\n")
    (tmp_path / "python").chmod(0o755)
    env = {**os.environ, "PYTHON": str(tmp_path / "python"), "PYTHONPATH": ""}
    done = subprocess.run([SCRIPT, "-q"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status, done.stdout
    assert done.stdout.endswith(message)
    if status == 3:
        assert done.stdout.startswith(f"PYTHONPATH={SCRIPT.parents[2]}/.types ")
