"""Worked examples with the numbers that are documented, as a script meets them: by public names, in real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

pytestmark = pytest.mark.distributed


MISMATCH = """\
import json, os, torch
from orc.runtime import Accelerator, DistributedOperationException, broadcast

accelerator = Accelerator()
try:
    broadcast(torch.zeros([(1, 5), (1, 2, 5)][accelerator.process_index]))
    text = "nothing was raised"
except DistributedOperationException as error:
    text = str(error)
with open(f"{os.environ['RESULTS']}/rank{accelerator.process_index}.json", "w") as file:
    json.dump([accelerator.ctx.config.debug_mode, text], file)
"""
JOB = {"name": "mismatch", "script": "train.py", "launcher": "python", "resources": {"procs_per_node": 2}}


@pytest.mark.parametrize(
    "words",
    [["launch", "--debug", "-n", "2", "train.py"], ["submit", "job.yaml", "--follow"]],
    ids=["the flag", "the job file"],
)
def test_debug_mode_names_mismatched_shapes_however_it_is_switched_on(words, tmp_path):
    (tmp_path / "train.py").write_text(MISMATCH)
    results = tmp_path / "results"
    results.mkdir()
    job = JOB | {"runtime": {"debug_mode": True}, "env": {"RESULTS": str(results)}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = subprocess.run(
        [sys.executable, "-m", "orc.orchestrator.cli.main", *words],
        cwd=tmp_path,
        env=os.environ | {"RESULTS": str(results)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        switched_on, message = json.loads((results / f"rank{rank}.json").read_text())
        assert switched_on is True
        assert message.startswith("Cannot apply desired operation due to shape mismatches.")
        assert "Operation: `orc.runtime.broadcast`" in message
        assert "Process 0: [1, 5]" in message
        assert "Process 1: [1, 2, 5]" in message
