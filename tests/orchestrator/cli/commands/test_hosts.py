"""`orc hosts run`: a command on all hosts of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TWO_HOSTS = """\
lab: {kind: ssh, root: ~/orc, options: {hosts: [a, b]}}
cloud: {kind: sagemaker, options: {region: us-east-1}}
"""


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clusters.yaml"
    path.write_text(TWO_HOSTS)
    monkeypatch.setenv("ORC_CLUSTERS", str(path))
    return path


def test_the_words_reach_the_program_as_they_are(orc: Any) -> None:
    done = orc("hosts", "run", "local", "--", "printf", "%s|", "two words", "$HOME", "it's")
    assert (done.code, done.out, done.err) == (0, "local: two words|$HOME|it's|\n", "")


def test_the_exit_status_is_the_programs(orc: Any) -> None:
    done = orc("hosts", "run", "local", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.code, done.out) == (3, "local: out\nlocal: err\n")
    assert done.err == "local: ended with status 3\nfailed on 1 of 1 hosts\n"
    assert orc("hosts", "run", "local", "--", "no-such-program").code == 127


def test_json_has_the_output_of_each_host(orc: Any) -> None:
    found = orc("hosts", "run", "local", "--json", "--", "sh", "-c", "echo a; echo b; kill -9 $$").json
    assert found == {
        "cluster": "local",
        "hosts": [{"host": "local", "status": 137, "problem": "", "output": ["a", "b"]}],
    }


def test_a_host_that_the_cluster_does_not_have_is_named_before_anything_runs(orc: Any, clusters: Path) -> None:
    done = orc("hosts", "run", "lab", "--host", "c", "--", "true")
    assert done.code == 2
    assert "cluster lab has no host 'c'" in done.err
    assert "Its hosts: a, b." in done.err


def test_a_platform_without_hosts_is_refused(orc: Any, clusters: Path) -> None:
    done = orc("hosts", "run", "cloud", "--", "true")
    assert done.code == 2
    assert "have no hosts that are reached from here" in done.err


@pytest.mark.hosts
def test_hosts_run_it_side_by_side_and_one_out_of_reach_is_named(
    orc: Any, hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = tmp_path / "clusters.yaml"
    options = json.dumps({"hosts": list(hosts.names), "ssh_config": str(hosts.ssh_config), "connect_timeout": 8})
    clusters.write_text(f"lab: {{kind: ssh, root: ~/orc, python: {sys.executable}, options: {options}}}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(clusters))
    done = orc("hosts", "run", "lab", "--", "uname", "-n")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == [f"{name}: {name}" for name in hosts.names]
    hosts.fault("cut", "node2")
    done = orc("hosts", "run", "lab", "--host", "node1", "--host", "node2", "--", "sh", "-c", "echo $PWD; exit 3")
    assert (done.code, done.out.splitlines()) == (5, ["node1: /home/trainer"])
    assert "node1: ended with status 3" in done.err
    assert "failed on 2 of 2 hosts" in done.err
    (row,) = orc("hosts", "run", "lab", "--host", "node2", "--json", "--", "true").json["hosts"]
    assert (row["status"], row["output"]) == (5, [])
    assert row["problem"]
