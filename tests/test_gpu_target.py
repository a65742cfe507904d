"""`make test-gpu` where there is no GPU, and where there is nothing to run it with."""

import os
import subprocess
import sys
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


def test_what_has_a_meaning_on_the_cpu_passes_there(tmp_path):
    report = tmp_path / "report.md"
    env = {**os.environ, "PYTHON": sys.executable, "ORC_GPU_TESTS_ON": "cpu", "ORC_GPU_REPORT": str(report)}
    others = [f"--ignore={SCRIPT.parent / name}" for name in ("test_libraries.py", "test_programs.py")]  # slow
    done = subprocess.run(
        [SCRIPT, "-q", f"--basetemp={tmp_path / 'runs'}", *others], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    lines = report.read_text().splitlines()
    assert lines[0].startswith("On the CPU, Python ")
    assert any(line.startswith("| test_two_ranks | ") for line in lines)
