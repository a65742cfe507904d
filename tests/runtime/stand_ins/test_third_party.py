"""trl, peft, diffusers and datasets, unmodified, give the numbers of the reference package on the stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
RUN = Path(__file__).parent / "programs" / "run.py"
TOLERANCE = 2e-4  # of float32 sums in another order


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Results of all programs, with the reference package and with the stand-in, in 1 and 2 processes."""
    found = {}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_", "ACCELERATE_"))}
    for which in ("reference", "orc"):
        folder = tmp_path_factory.mktemp(which)
        env |= {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        command = [sys.executable, str(RUN), which, str(folder)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-6000:]
        found[which] = json.loads((folder / "results.json").read_text())
    return found


def close(mine, theirs):
    """Whether two results are equal, numbers nearly so."""
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(close(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(close, mine, theirs))
    return mine == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE) if isinstance(theirs, float) else mine == theirs


@pytest.mark.parametrize(("processes", "programs"), [("1", 12), ("2", 5)])
def test_programs_give_the_numbers_of_the_reference(figures, processes, programs):
    mine, theirs = figures["orc"][processes], figures["reference"][processes]
    assert (len(mine), len(theirs)) == (12 if processes == "1" else 9, programs)
    different = {name: (mine[name], theirs[name]) for name in theirs if not close(mine[name], theirs[name])}
    assert not different


def test_streams_of_two_processes_lose_and_repeat_nothing(figures):
    streams = figures["orc"]["2"]["with_datasets.streams"]
    every = list(range(26))
    assert streams["metrics, dispatch=True"] == streams["metrics, dispatch=False"] == every
    assert figures["orc"]["2"]["with_datasets.split_by_node"]["rows"] == every
