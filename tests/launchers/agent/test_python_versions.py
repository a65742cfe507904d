"""An agent and its ranks under the oldest Python that ranks can have and under the newest that this machine has."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import FILES, Attempt

# Imports what needs no torch, and, where there is one, trains a step.
RANK = """
import importlib, importlib.util, json, logging, sys
from orc.runtime.core import config, enums, errors, names, parsing, fsdp_settings, deepspeed_keys
from orc.runtime.launch.environment import detect
assert f"{enums.DistributedType.NO}|{str(enums.DistributedType.NO)}" == "NO|NO" and enums.DistributedType.NO == "NO"
both = errors.group_errors("two", [ValueError("first"), KeyError("second")])
assert isinstance(both, Exception)
assert config.resolve({}, {"ORC_MIXED_PRECISION": "bf16"}).mixed_precision == "bf16"
if importlib.util.find_spec("torch"):
    import torch
    from orc.runtime import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
print(json.dumps(list(sys.version_info[:2])))
"""


def interpreters() -> list[str]:
    """The oldest Python of ranks and the newest, as far as this machine has them, and the one that runs the tests."""
    found = [sys.executable]
    for version in ("3.10", "3.13"):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        found += [str(path) for path in pyenv[-1:]] or [path for path in [shutil.which(f"python{version}")] if path]
    return found


@pytest.mark.parametrize("python", interpreters())
def test_an_agent_and_its_ranks_run_under_it(
    python: str, attempt: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = attempt(RANK, nproc=2, python=python, env={"MASTER_ADDR": "127.0.0.1"})
    for path, source in FILES.items():
        target = Path(job.config["runtime_tree"], path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(os.fsdecode(source), target)
    monkeypatch.setattr(sys, "executable", python)  # of the agent
    assert job.run() == 0, (job.log(0), job.log(1), job.node_log())
    versions = [json.loads(job.log(rank).splitlines()[-1]) for rank in (0, 1)]
    assert versions[0] == versions[1]
