"""The plans for SSH hosts, byte for byte. ``ORC_UPDATE_GOLDEN=1`` writes them anew; read the diff before a commit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_plans import SNAPSHOT, compare

from orc.launchers.backends.base import Placement
from orc.launchers.backends.ssh import SshBackend
from orc.launchers.backends.ssh.rendering import config_of, hosts_of
from orc.launchers.errors import RenderError
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster

HOSTS = [
    "node1",
    {"name": "node2", "address": "10.0.0.2", "slots": 4, "python": "~/venv/bin/python"},
    {"name": "node3", "address": "fd00::3", "root": "/fast/orc"},
]
SHAPES: dict[str, dict[str, Any]] = {
    "smallest": {"script": "train.py"},
    "two-nodes": {"script": "train.py", "resources": {"nodes": 2, "procs_per_node": 2}, "launcher": "python"},
    "hosts-that-differ": {
        "script": "train.py",
        "resources": {"nodes": "2:3", "gpus_per_node": 2, "time": "1:30:00"},
        "secrets": ["WANDB_API_KEY"],
        "env": {"NOTE": "it's $5 ~here"},
        "grace": 90,
    },
}


def backend(**options: Any) -> SshBackend:
    hosts = {"hosts": HOSTS, "peer_timeout": 20, **options}
    return SshBackend(Cluster(name="lab", kind="ssh", root="~/orc", python="/opt/python", options=hosts))


def render(placement: Placement | None = None, options: dict[str, Any] | None = None, **spec: Any) -> Plan:
    job = JobSpec.model_validate({"name": "digits", **spec})
    return backend(**(options or {})).render(job, SNAPSHOT, AttemptId("digits-k3f9a2", 1), placement)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_what_its_golden_file_says(shape) -> None:
    same = {} if shape == "hosts-that-differ" else {"hosts": ["node1", {"name": "node2", "slots": 4}]}
    compare(f"ssh/{shape}.json", render(None, same, **SHAPES[shape]))


def test_the_number_of_nodes_is_that_of_the_placement() -> None:
    placed = render(Placement(("node3", "node1"), 2), script="train.py", resources={"nodes": "1:3"})
    config = config_of(placed, "node1")
    assert hosts_of(placed) == ("node3", "node1")
    assert (config["nnodes"], config["min_nodes"]) == (2, 2)
    assert [host["name"] for host in config["hosts"]] == ["node3", "node1"]
    assert [host["address"] for host in config["hosts"]] == ["fd00::3", "node1"]


def test_a_launcher_that_can_go_on_with_fewer_nodes_is_told_how_many() -> None:
    launcher = {"kind": "torchrun", "options": {"rdzv_backend": "c10d", "max_restarts": 1}}
    placed = render(Placement(("node3", "node1"), 2), script="train.py", launcher=launcher, resources={"nodes": "1:3"})
    config = config_of(placed, "node1")
    assert (config["nnodes"], config["min_nodes"]) == (2, 1)


def test_a_host_without_slots_is_taken_whole() -> None:
    placed = render(Placement(("node1", "node2"), 2), script="train.py", resources={"procs_per_node": 2})
    assert config_of(placed, "node1")["slots"] == {"total": {"node1": 2, "node2": 4}, "take": 2, "gpus": False}


def test_one_file_serves_hosts_that_are_alike() -> None:
    alike = render(None, {"hosts": ["x", "y"]}, script="train.py", resources={"nodes": 2})
    assert [file.host for file in alike.files] == [None]
    differ = render(Placement(("node1", "node2", "node3")), script="train.py", resources={"nodes": 3})
    assert [file.host for file in differ.files] == ["node1", "node2", "node3"]
    assert [config_of(differ, host)["python"] for host in hosts_of(differ)] == [
        "/opt/python",
        "~/venv/bin/python",
        "/opt/python",
    ]
    assert config_of(differ, "node3")["attempt_dir"] == "/fast/orc/jobs/digits-k3f9a2/a1"


def test_rendering_gives_the_same_bytes_and_holds_no_secret() -> None:
    first, second = (render(script="train.py", secrets=["TOKEN"]) for _ in range(2))
    assert first.digest == second.digest
    assert "token" not in json.dumps(first.to_dict())


def test_more_hosts_than_there_are_cannot_be_rendered() -> None:
    with pytest.raises(RenderError, match="needs 4 hosts"):
        render(script="train.py", resources={"nodes": 4})
