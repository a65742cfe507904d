"""What a cluster's hosts say about themselves, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orc.launchers.backends.base import HostReport
from orc.launchers.backends.ssh import SshBackend
from orc.launchers.errors import BackendUnreachable
from orc.launchers.remote.transport import Completed, LocalTransport
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.cli.commands.clusters import _host_table


class Host(LocalTransport):
    """This machine under another name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, argv: Any, **more: Any) -> Completed:
        if self.name == "away":
            raise BackendUnreachable("it cannot be reached: No route to host", where="away (10.0.0.2:22)")
        return super().run(argv, **more)


def survey(tmp_path: Path) -> list[HostReport]:
    hosts = [{"name": "good"}, {"name": "bare", "python": "/no/such/python"}, {"name": "away"}]
    options = {"hosts": [{**host, "root": str(tmp_path / host["name"])} for host in hosts]}
    cluster = Cluster(name="lab", kind="ssh", root=str(tmp_path), options=options)
    return SshBackend(cluster, open_all=lambda: {host["name"]: Host(host["name"]) for host in hosts}).survey()


def test_a_host_without_the_python_is_reached_and_one_that_does_not_answer_is_not(tmp_path: Path) -> None:
    good, bare, away = survey(tmp_path)
    assert [host.reached for host in (good, bare, away)] == [True, True, False]
    assert good.python
    assert not bare.python
    (finding,) = [finding for finding in bare.findings if finding.level == "error"]
    assert "/no/such/python: command not found" in finding.what
    assert "No route to host" in away.findings[0].what


def test_the_table_of_hosts_shows_which_were_reached_and_nothing_that_nobody_knows(tmp_path: Path) -> None:
    rows = [line.split() for line in _host_table(survey(tmp_path), {}).splitlines()]
    assert [row[:2] for row in rows] == [["HOST", "REACHED"], ["good", "yes"], ["bare", "yes"], ["away", "no"]]
    assert [row[2:8] for row in rows[2:]] == [["-"] * 6] * 2
