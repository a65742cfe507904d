"""Launchers inside a Slurm allocation: with its variables around them, they must not start steps of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.backends.base import Backend, Phase

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

WITHOUT_MLFLOW = Path(__file__).parents[2] / "testbed" / "without"


@pytest.fixture
def backend_under_test(slurm_backend: Backend) -> Backend:
    return slurm_backend


@pytest.mark.parametrize(
    ("kind", "options", "program"),
    [
        ("mpirun", {"program": "mpirun.mpich"}, "mpirun.mpich"),
        ("deepspeed", {"launcher": "slurm"}, "sh"),
        ("deepspeed", {"launcher": "pdsh"}, "pdsh"),
        ("torchrun", {"rdzv_backend": "c10d"}, "sh"),
    ],
    ids=["MPICH", "deepspeed", "pdsh", "c10d"],
)
def test_ranks_know_who_they_are(kind: str, options: dict[str, Any], program: str, run) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} (Debian: mpich, pdsh)")
    job, seen = run(
        """
        import json, os
        print(json.dumps([os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]))
        """,
        nodes=2,
        procs=2,
        launcher={"kind": kind, "options": options},
        env={"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(WITHOUT_MLFLOW)},
    )
    assert seen.phase is Phase.SUCCEEDED, job.all_logs()
    assert [json.loads(job.log(rank)) for rank in range(4)] == [
        [str(rank), str(rank % 2), "4", "2"] for rank in range(4)
    ]
