"""Clusters that are described anew while jobs live there: attempts are asked about where they were sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeHosts
from fake_clock import Clock

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.spec import LoadedJob
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client
from orc.orchestrator.engine import orphans
from orc.orchestrator.ledger.prune import PruneRule, prune
from orc.orchestrator.workspace import Moved

JobFile = Callable[..., LoadedJob]


class Hosts(FakeHosts):
    """Hosts to which clusters.yaml gives addresses; *late* is where a copy of an attempt has come late."""

    late: tuple[str, ...] = ()

    def __new__(cls, *_: Any, **__: Any) -> Hosts:
        return object.__new__(cls)

    def addresses(self, hosts: Any = ()) -> dict[str, str]:
        known: dict[str, str] = self.cluster.options["addresses"]
        return {f"address of {name}": known[name] for name in hosts if name in known}

    def find(self, marker: str, hosts: Any = (), *, complete: bool = True) -> Handle | None:
        found = super().find(marker, hosts, complete=complete)
        if found is None or {*found.hosts} & {*hosts}:
            return found
        return replace(found, hosts=self.late) if {*self.late} & {*hosts} else None

    def cancel(self, handles: Sequence[Handle], grace: timedelta) -> None:
        for handle in handles:
            self._called("cancel on", " ".join(handle.hosts))


class Described:
    """A client, and its cluster with a directory of its own for each root."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self.made: dict[str, Hosts] = {}
        self.client = Client(backend_of=lambda _: self.open(self.cluster), clock=clock, sleep=clock.sleep)
        self.client.workspace.backend_for = self.open
        self.describe()

    def describe(self, root: str = "old", kind: str = "fake", **addresses: str) -> None:
        options = {"addresses": {"n1": "10.0.0.1", "n2": "10.0.0.2", **addresses}}
        self.cluster = Cluster(name="local", kind="ssh", root=f"/{root}", options=options)
        self.kind = kind
        self.client.workspace._backends.clear()

    def open(self, cluster: Cluster) -> Hosts:
        name = (cluster.root or "")[1:]
        if name not in self.made:
            self.made[name] = made = Hosts(self.directory / name, hosts={"n1": 1, "n2": 1})
            made.self_driving = False
        self.made[name].cluster, self.made[name].kind = cluster, self.kind
        return self.made[name]


@pytest.fixture
def described(orc_home: Path, tmp_path: Path, clock: Clock) -> Iterator[Described]:
    made = Described(tmp_path, clock)
    with made.client:
        yield made


def test_an_attempt_is_asked_about_below_the_root_that_it_was_sent_to(described, clock, job_file: JobFile) -> None:
    client = described.client
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0})).id
    described.describe("new")
    described.made["old"].set(f"orc-{job}-a1", Phase.RUNNING)
    clock.now += 5
    client.refresh()
    assert client.job(job).state == "RUNNING"
    described.made["old"].set(f"orc-{job}-a1", Phase.FAILED, cause="crash")
    clock.now += 5
    client.refresh()
    assert client.job(job).state == "PENDING"
    assert described.made["old"].calls("reap") == [f"orc-{job}-a1"]
    assert described.made["new"].calls("run") == [f"orc-{job}-a2"]
    assert described.made["new"].calls("poll") == [], "nobody asks for an attempt where it never was"


def test_a_machine_that_has_another_address_is_not_taken_for_the_one_that_was_sent_to(
    described, clock, job_file
) -> None:
    client = described.client
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["node_failure"], "backoff": 0})).id
    described.describe(n1="10.0.0.9")
    clock.now += 5
    why = f"clusters.yaml has another address of n1 than when an attempt was sent there; {Moved.advice}"
    assert client.refresh().unreachable == {"local": why}
    assert why in client.job(job).reason
    assert client.cancel([job])[0].state == "PENDING"
    described.describe(kind="slurm")
    clock.now += 5
    assert "of kind slurm" in client.refresh().unreachable["local"]
    described.describe(n2="10.0.0.8")  # another machine's is no matter
    clock.now += 5
    client.refresh()
    assert described.made["old"].calls("cancel on") == ["n1"]
    assert described.made["old"].calls("run") == [f"orc-{job}-a1"]


def test_a_copy_on_a_host_that_the_attempt_was_moved_away_from_is_ended_there(described, clock, job_file) -> None:
    client, fake = described.client, described.open(described.cluster)
    fake.behave(submit="swallowed")
    job = client.submit(job_file()).id
    fake.behave(submit=None, dead=["n1"])
    client.refresh()
    assert (client.job(job).state, tuple(client.job(job).attempts[0].hosts)) == ("PENDING", ("n2",))
    fake.behave(dead=[])
    fake.late = ("n1",)
    clock.now += 31
    client.refresh()
    assert fake.calls("cancel on") == ["n1"], "and not what runs on n2"
    assert (client.job(job).state, client.events(job)[-1].kind) == ("PENDING", "duplicate")


def test_a_job_that_was_removed_meanwhile_is_not_looked_for_any_more(described, clock, job_file) -> None:
    client, fake = described.client, described.open(described.cluster)
    fake.behave(submit="swallowed")
    job = client.submit(job_file()).id
    fake.behave(submit="refuse")
    client.refresh()
    assert client.job(job).state == "FAILED"
    clock.now += 31
    looked = fake.find

    def removed_meanwhile(*arguments: Any, **more: Any) -> Handle | None:
        client.submit(job_file())
        prune(client.workspace.ledger, PruneRule(clock.now))
        return looked(*arguments, **more)

    fake.find = removed_meanwhile
    fake.behave(submit=None)
    assert not client.refresh().unreachable
    assert orphans.next_due(client.workspace) is None
