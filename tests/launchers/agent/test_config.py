"""``agent.json``: one schema for those who write it and those who read it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from orc.launchers.agent.config import AgentConfig, load_config
from orc.launchers.agent.errors import LaunchFailure

LEAST: dict[str, Any] = {
    **dict.fromkeys(("job", "name", "marker", "root", "job_dir", "attempt_dir", "code_tree", "runtime_tree"), "x"),
    "format": 1,
    "attempt": 1,
    "nnodes": 2,
    "nproc": 4,
    "command": {"spawn": "ranks"},
}


def test_what_is_not_given_has_its_default_and_is_not_written():
    config = AgentConfig(LEAST)
    assert (config.nnodes, config.env, config.link, config.deadline_s, config.preempt_exit) == (2, {}, False, None, 75)
    assert config.to_dict() == LEAST


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 2}, "format 2, this agent reads format 1"),
        ({"format": None}, "format None"),
        ({"nodes": 3}, "unknown key nodes"),
        ({"nproc": "4"}, "nproc is no int"),
        ({"env": None}, r"env is no dict\[str, str\]"),
        ({"deadline_s": "soon"}, "deadline_s is no float"),
    ],
)
def test_what_no_agent_could_follow_is_refused(change, complaint):
    with pytest.raises(LaunchFailure, match=f"agent.json: {complaint}"):
        AgentConfig({**LEAST, **change})


def test_what_is_missing_is_named():
    with pytest.raises(LaunchFailure, match="no value for job, command"):
        AgentConfig({key: value for key, value in LEAST.items() if key not in ("job", "command")})


def test_a_configuration_is_not_changed_but_copied():
    config = AgentConfig(LEAST)
    with pytest.raises(AttributeError, match="nnodes"):
        config.nnodes = 3
    assert (config.replace(nnodes=3).nnodes, config.nnodes) == (3, 2)


def test_the_number_of_nodes_may_come_from_the_scheduler(tmp_path, monkeypatch):
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**LEAST, "nnodes_from": "NODES_HERE"}))
    assert load_config(os.fspath(path)).nnodes == 2
    monkeypatch.setenv("NODES_HERE", "7")
    assert load_config(os.fspath(path)).nnodes == 7
