"""A cluster's hosts as fabric connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orc.launchers import connections
from orc.launchers.errors import HostAccessError, SpecError


@pytest.fixture
def lab(hosts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``lab(host_keys="strict", hosts=[...])`` writes the cluster ``lab`` into clusters.yaml."""
    monkeypatch.setenv("ORC_CONFIG_DIR", str(tmp_path))

    def write(**options: Any) -> None:
        cluster = hosts.cluster(**options).model_dump(mode="json")
        described = {key: value for key, value in cluster.items() if key != "name" and value}
        (tmp_path / "clusters.yaml").write_text(yaml.safe_dump({"lab": described}))

    return write


def test_a_command_runs_on_all_hosts_and_files_come_and_go(hosts: Any, lab: Any, tmp_path: Path) -> None:
    lab()
    with connections("lab") as group:
        done = group.run("hostname; exit 3", hide=True, warn=True)
        said = {connection.original_host: (r.stdout.strip(), r.exited) for connection, r in done.items()}
        assert said == {name: (name, 3) for name in hosts.names}
        (tmp_path / "file").write_text("words")
        group.put(str(tmp_path / "file"), "/home/trainer/file")
        assert [(hosts.home(name) / "file").read_text() for name in hosts.names] == ["words"] * len(hosts.names)
    assert not any(connection.is_connected for connection in group)


def test_hosts_behind_a_jump_host_share_the_connection_to_it(hosts: Any, lab: Any) -> None:
    lab(hosts=[{"name": name, "via": "node4"} for name in hosts.names[:3]])
    log = hosts.directory / "hosts" / "node4" / "log" / "sshd.log"
    before = log.read_text().count("Accepted publickey")
    with connections("lab", hosts.names[:2]) as group:
        done = group.run("echo $SSH_CLIENT", hide=True)
        gateways = {id(connection.gateway) for connection in group}
    assert {result.stdout.split()[0] for result in done.values()} == {hosts.address("node4")}
    assert len(gateways) == 1
    assert log.read_text().count("Accepted publickey") == before + 1
    assert not group[0].gateway.is_connected


def test_a_changed_host_key_is_refused(hosts: Any, lab: Any) -> None:
    lab(host_keys="accept-new")
    hosts.fault("rekey", "node1")
    with connections("lab", ["node1"]) as group, pytest.raises(HostAccessError, match="its host key has changed"):
        group[0].run("true", hide=True)


@pytest.mark.parametrize(
    ("cluster", "names", "message"), [("lab", ["node9"], "node9 is no host"), ("local", None, "no hosts")]
)
def test_hosts_that_are_not_there_are_named(
    hosts: Any, lab: Any, cluster: str, names: list[str] | None, message: str
) -> None:
    lab()
    with pytest.raises(SpecError, match=message):
        connections(cluster, names)
