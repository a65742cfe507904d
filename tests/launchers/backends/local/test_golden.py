"""The local backend's plans, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes them anew; read the diff before a commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from golden_plans import SNAPSHOT, compare

from orc.launchers.agent.config import AgentConfig
from orc.launchers.attempts.agent_config import agent_file
from orc.launchers.backends.local.backend import LocalBackend
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

SHAPES: dict[str, dict[str, Any]] = {
    "smallest": {"script": "train.py"},
    "everything": {
        "module": "pkg.train",
        "args": {"lr": 0.1, "note": 'it\'s $5 "here" – ü', "verbose": True},
        "launcher": {"kind": "torchrun", "options": {"monitor_interval": 0.5}},
        "resources": {"nodes": 2, "procs_per_node": 4, "cpus_per_proc": 3, "time": "1:30:00"},
        "env": {"A": "b c", "CLUSTER_SAYS": "job"},
        "secrets": ["WANDB_API_KEY"],
        "setup": "pip list",
        "runtime": {"mixed_precision": "bf16", "gradient_accumulation_steps": 4},
        "checkpoint": {"dir": "saved/here", "every": 100, "keep": 3, "resume": "never"},
        "grace": 90,
    },
    "python-launcher": {"script": "train.py", "launcher": "python", "checkpoint": {"dir": "/scratch/checkpoints"}},
    "shell-command": {"command": "nvidia-smi; ./run.sh", "launcher": "python"},
}
CLUSTER = Cluster(
    name="local",
    kind="local",
    root="/home/ada/.local/state/orc",
    python="/opt/venv/bin/python",
    env={"CLUSTER_SAYS": "cluster", "HTTP_PROXY": "http://proxy:3128"},
    setup=["module load cuda"],
)


@pytest.fixture
def backend(monkeypatch) -> LocalBackend:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setenv("ORC_CONFIG_DIR", "/home/ada/.config/orc")
    return LocalBackend(CLUSTER, state_dir=Path("/home/ada/.local/state/orc"))


def render(backend: LocalBackend, **spec: Any) -> Plan:
    job = JobSpec.model_validate({"name": "digits", **spec})
    return backend.render(job, SNAPSHOT, AttemptId("digits-k3f9a2", 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_what_its_golden_file_says(backend, shape):
    compare(f"local/{shape}.json", render(backend, **SHAPES[shape]))


def test_rendering_touches_nothing_and_gives_the_same_bytes(backend, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert render(backend, script="train.py").digest == render(backend, script="train.py").digest
    assert render(backend, script="train.py").digest != render(backend, script="train2.py").digest
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/home/ada").exists()


@pytest.mark.parametrize(
    ("spec", "cluster", "complaint"),
    [
        ({"resources": {"nodes": "1:4"}}, {}, "fixed number"),
        ({"resources": {"options": {"local": {"partition": "x"}}}}, {}, "partition"),
        ({"checkpoint": {"dir": "~/saved"}}, {}, "~/saved"),
        ({"launcher": "no_such"}, {}, "no_such"),
        ({}, {"options": {"partition": "x"}}, "partition"),
    ],
)
def test_what_cannot_be_carried_is_refused(spec, cluster, complaint):
    with pytest.raises(RenderError, match=complaint):
        render(LocalBackend(Cluster(name="here", kind="local", root="/r", **cluster)), script="train.py", **spec)


def test_checkpoints_may_go_to_an_object_store(backend):
    plan = render(backend, script="train.py", checkpoint={"dir": "s3://bucket/run"})
    assert plan.env["ORC_CHECKPOINT_DIR"] == "s3://bucket/run"


def test_text_that_is_no_unicode_is_refused():
    plan = render(LocalBackend(Cluster(name="here", kind="local", root="/r")), script="train.py")
    with pytest.raises(RenderError, match="not valid UTF-8"):
        agent_file(AgentConfig({**json.loads(plan.files[0].content), "env": {"X": "caf\udce9"}}))
