"""Transformers' Trainer, unmodified, gives on the runtime what it gives on the real accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

SCENARIOS = Path(__file__).with_name("trainer_scenarios.py")
ORC = Path(sys.executable).with_name("orc")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_trainer_gives_the_numbers_of_the_reference(processes: int, tmp_path: Path) -> None:
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ORC_RUN", "ACCELERATE_"))}
    runs = {"reference": [], "runtime": ["--stand-in", "accelerate"]}
    started = {
        name: subprocess.Popen(
            [ORC, "launch", "-n", str(processes), *options, SCENARIOS, tmp_path / f"{name}.json", tmp_path / name],
            env=env | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, options in runs.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for name, process in started.items():
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-3000:]
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    for scenario, expected in found["reference"].items():
        assert "error" not in expected, expected
        assert found["runtime"][scenario] == expected, scenario
    assert len(found["runtime"]) >= 11
