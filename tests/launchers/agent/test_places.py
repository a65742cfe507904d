"""Where an agent is told to keep things: not everything may lie in a directory that is copied away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from polling import until

from orc.launchers.agent.errors import LaunchFailure
from orc.launchers.agent.link.channel import tls_context
from orc.launchers.agent.link.process import Link
from orc.launchers.agent.network import Port
from orc.launchers.containers.program import restart_of_server

from .conftest import TOKEN


def test_working_copy_logs_and_secrets_are_where_the_orders_say(attempt, tmp_path: Path) -> None:
    private, logs, work = (tmp_path / name for name in ("private", "logs", "code"))
    private.mkdir()
    (private / "secrets.json").write_text(json.dumps({"TOKEN": "geheim"}))
    job = attempt(
        "import os; print(os.getcwd(), os.environ['TOKEN'], os.environ['ORC_LOGS_DIR'])",
        private_dir=str(private),
        logs_dir=str(logs),
        work_dir=str(work),
        secrets=["TOKEN"],
        setup=["echo set up"],
    )
    assert job.run() == 0
    assert (logs / "rank-0.log").read_text() == f"{work} geheim {logs}\n"
    assert "set up" in (logs / "node-0.log").read_text()
    assert not (private / "secrets.json").exists()
    assert sorted(path.name for path in job.directory.iterdir()) == ["agent.json", "node-0"]
    assert not (job.directory.parent / "work").exists()


def test_the_shims_below_a_launcher_write_there_too_and_a_failure_has_its_last_lines(attempt, tmp_path: Path) -> None:
    launcher = ["/bin/sh", "-c", 'RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 exec "$@"', "launcher"]
    command = {"spawn": "launcher", "launcher": launcher, "program": ["{python}", "train.py"], "env": {}}
    job = attempt("raise SystemExit('no more')", logs_dir=str(tmp_path / "logs"), command=command)
    assert job.run() == 1
    assert (tmp_path / "logs/rank-0.log").read_text() == "no more\n"
    assert job.exit()["first_failure"]["log_tail"] == "no more"


def test_an_inherited_place_of_logs_means_nothing(attempt, tmp_path: Path) -> None:
    job = attempt("import os; print(os.environ.get('ORC_LOGS_DIR'))")
    process = job.start(ORC_LOGS_DIR=str(tmp_path / "elsewhere"))
    process.communicate(timeout=60)
    assert job.log() == "None\n"


@pytest.fixture
def port() -> Iterator[int]:
    """A free port that no other agent of this machine takes."""
    held = Port()
    yield held.number
    held.close()


def test_nodes_meet_at_a_port_that_was_known_before_anything_ran(linked, port: int) -> None:
    both = linked("import os; print(os.environ['RANK'])", hub={"port": port, "addresses": ["127.0.0.1"]})
    for job in both.nodes:
        (job.directory / "link.json").write_text(json.dumps({"token": TOKEN}))
    agents = [job.start(node, owner="sagemaker:x", restart=2) for node, job in enumerate(both.nodes)]
    assert [agent.wait(60) for agent in agents] == [0, 0]
    assert [job.log(node) for node, job in enumerate(both.nodes)] == ["0\n", "1\n"]
    assert both.nodes[0].exit(1)["restart"] == 2


def test_a_port_that_somebody_else_has_is_named(linked, port: int) -> None:
    with socket.create_server(("", port)):
        both = linked("print('never')", hub={"port": port, "addresses": ["127.0.0.1"]})
        (both.nodes[0].directory / "link.json").write_text(json.dumps({"token": TOKEN}))
        process = both.nodes[0].start(0)
        process.communicate(timeout=60)
    assert process.returncode == 77
    assert both.nodes[0].exit()["reason"].startswith(f"cannot listen on port {port} of this host")


def test_the_hub_tells_its_restart_to_who_has_not_joined_yet(linked, port: int) -> None:
    both = linked("print('never')", hub={"port": port, "addresses": ["127.0.0.1"]}, peer_timeout_s=1.0)
    (both.nodes[0].directory / "link.json").write_text(json.dumps({"token": TOKEN}))
    agent = both.nodes[0].start(0, restart=4)
    assert restart_of_server(["127.0.0.1"], port, tls_context(TOKEN, server=False)) == 4
    agent.terminate()
    until(lambda: agent.poll() is not None)


def test_a_node_that_is_told_of_no_hub_says_so(linked) -> None:
    both = linked("print('never')")
    (both.nodes[1].directory / "link.json").write_text(json.dumps({"token": TOKEN}))
    node = type("Node", (), {"private": str(both.nodes[1].directory), "node": 1, "config": SimpleNamespace(hub=None)})()
    with pytest.raises(LaunchFailure, match="does not say where node 0 is"):
        Link(node)
