"""Transformers' Trainer, peft and device maps on a GPU: the stand-in gives the numbers of the reference package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda_only  # on CPUs they run with more libraries, and in two processes
RUN = Path(__file__).parents[1] / "runtime" / "stand_ins" / "programs" / "run.py"
TRAINER = ("plain", "bf16", "accumulation", "gradient_checkpointing", "workers", "split_batches")
TRAINER += ("resume_in_mid_epoch", "classification", "automatic_batch_size", "fsdp")
PROGRAMS = {
    "trainer": [f"with_trainer.{name}" for name in TRAINER],
    "others": ["with_peft.trainer", "with_peft.loop", "with_device_maps.on_gpu"],
}


def close(mine, theirs):
    """Whether two results are equal, numbers nearly so: kernels add in another order."""
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(close(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(close, mine, theirs))
    return mine == pytest.approx(theirs, rel=2e-3, abs=2e-4) if isinstance(theirs, float) else mine == theirs


@pytest.mark.parametrize("programs", PROGRAMS)
def test_programs_give_the_numbers_of_the_reference(tmp_path, programs):
    for name in ("accelerate", "transformers", "peft"):
        pytest.importorskip(name)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_", "ACCELERATE_"))}
    env |= {"HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    runs = {}
    for which in ("reference", "orc"):  # side by side: they import for seconds
        folder = tmp_path / which
        folder.mkdir()
        command = [sys.executable, str(RUN), which, str(folder), *PROGRAMS[programs]]
        with (folder / "errors").open("w") as errors:
            env["HF_HOME"] = str(folder / "home")
            runs[which] = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
    results = {}
    for which, run in runs.items():
        assert run.wait(timeout=200) == 0, which + (tmp_path / which / "errors").read_text()[-6000:]
        results[which] = json.loads((tmp_path / which / "results.json").read_text())["1"]
    mine, theirs = results["orc"], results["reference"]
    assert set(theirs) == set(PROGRAMS[programs])
    different = {name: (mine[name], theirs[name]) for name in theirs if not close(mine[name], theirs[name])}
    assert not different
