"""What the programs of other libraries give, with the reference package and with the stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "programs" / "run.py"


@pytest.fixture(scope="session")
def figures(tmp_path_factory):
    """Results of all programs, with the reference package and with the stand-in, in 1 and 2 processes."""
    found, started = {}, {}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_", "ACCELERATE_"))}
    for which in ("reference", "orc"):  # side by side: the ranks of each often wait for each other
        folder = tmp_path_factory.mktemp(which)
        env |= {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        command = [sys.executable, str(RUN), which, str(folder)]
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        started[which] = folder, process
    try:
        for which, (folder, process) in started.items():
            assert process.wait(timeout=1000) == 0, (folder / "errors").read_text()[-6000:]
            found[which] = json.loads((folder / "results.json").read_text())
    finally:
        for _, process in started.values():
            process.kill()
            process.wait()
    return found
