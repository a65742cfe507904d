"""What reading a job file may import: every ``orc render`` and ``orc submit`` pays for it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

HEAVY = {"torch", "sqlalchemy", "jinja2", "rich", "paramiko", "fabric", "psutil", "platformdirs"}
HEAVY |= {"difflib", "hypothesis", "orc.runtime.accelerator"}

PROGRAM = """
import json, sys
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import get_cluster
from orc.launchers.commands import build_command
job = load_job("job.yaml").spec
get_cluster(job.cluster)
build_command(job)
print(json.dumps(sorted(sys.modules)))
"""


def test_a_job_file_is_read_without_heavy_imports(job_files: Any) -> None:
    job_files.load("name: x\nscript: train.py\nargs: {lr: 0.1}\nenv: {A: '${job.name}'}\nresources: {time: 2h}\n")
    # What an installation imports by its .pth files is not our doing; what comes on top of it is.
    before = subprocess.run(
        [sys.executable, "-c", "import json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        check=True,
    )
    after = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    imported = set(json.loads(after.stdout)) - set(json.loads(before.stdout))
    assert "orc.launchers.spec.interpolation" in imported
    assert imported & HEAVY == set()


def test_a_job_file_without_references_needs_no_code_for_them(job_files: Any) -> None:
    job_files.load("name: x\nscript: train.py\n")
    after = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    unused = {f"orc.launchers.spec.{name}" for name in ("interpolation", "problems")}
    assert set(json.loads(after.stdout)) & unused == set()
