"""Calls of a scheduler and of the ledger: as many for thousands of jobs as for a few."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from counted_database import counting
from fake_backend import FakeBackend
from prepared_jobs import create_prepared

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.plan import Plan
from orc.launchers.spec.groups import LoadedGroup, load_jobs
from orc.orchestrator.client import Client
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob

JOBS = 2500
QUEUED = 1600  # the others have ended, and are known to accounting alone
SPEC = {"name": "many", "grace": 30, "retry": {"max_attempts": 1, "on": [], "backoff": 10}}


@pytest.fixture
def scheduler(orc_home: Path, tmp_path: Path) -> Path:
    """Commands of a Slurm with JOBS jobs of ours, which note every call in the file that is returned."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    now = int(time.time())
    rows = {
        "squeue": [f"{n}|orc-many-{n:06d}-a1|RUNNING|{now}|{now}|{now}|30:00|n1|cpu|1|None" for n in range(QUEUED)],
        "sacct": [f"{n}|orc-many-{n:06d}-a1|COMPLETED|{now}|{now}|{now}|00:30:00|n1|0:0|" for n in range(QUEUED, JOBS)],
    }
    for name, lines in rows.items():
        (programs / f"{name}.out").write_text("\n".join(lines) + "\n")
        path = programs / name
        path.write_text(f'#!/bin/sh\necho {name} >>"{calls}"\ncat "{programs}/{name}.out"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True)
    entry = {"kind": "slurm", "root": str(tmp_path / "root"), "options": {"bin": str(programs)}}
    clusters.write_text(yaml.safe_dump({"hpc": entry}))
    return calls


def test_the_state_of_thousands_of_jobs_is_two_calls_and_they_are_shared(scheduler: Path) -> None:
    with Client() as client, Client() as another:
        send(client, JOBS, "hpc", "slurm")
        assert client.refresh(max_age_s=None).unreachable == {}
        another.refresh(max_age_s=None)  # it is not time yet
        assert scheduler.read_text().split() == ["squeue", "sacct"]
        assert len(client.jobs(states=["RUNNING"], limit=None)) == QUEUED
        assert len(client.jobs(states=["SUCCEEDED"], limit=None)) == JOBS - QUEUED


def send(client: Client, count: int, cluster: str, kind: str, name: str = "many") -> list[str]:
    """Let the ledger have so many PENDING jobs of that name; return their markers."""
    markers = []
    with client.workspace.ledger.transaction() as tx:
        for number in range(count):
            job = f"{name}-{number:06d}"
            markers.append(f"orc-{job}-a1")
            new = NewJob(job, name, cluster, kind, "", SPEC, {}, {})
            made = create_prepared(tx, new, markers[-1], "p", "nobody", 0.0)
            handle = Handle(cluster, kind, markers[-1], str(number), time.time()).to_dict()
            tx.record(made, Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), attempt_set={"handle": handle})
    return markers


@pytest.mark.parametrize("url", ["sqlite", "postgresql"])
def test_a_pass_over_many_jobs_is_as_many_statements_as_one_over_few(
    url: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that start, those that go on and those that end are each written at once."""
    if url == "postgresql":
        monkeypatch.setenv("ORC_LEDGER_URL", request.getfixturevalue("postgres_url"))
    counts = []
    for name, count in (("few", 5), ("many", 50)):
        backend = FakeBackend(tmp_path / name)
        backend.self_driving = False
        with Client(tmp_path / f"state-{name}", backend_of=lambda _, backend=backend: backend) as client:
            markers = send(client, count, "local", "fake", name)
            for phase in (Phase.RUNNING, Phase.RUNNING, Phase.SUCCEEDED):
                for marker in markers:
                    (backend.root / "jobs" / f"{marker}.json").write_text(json.dumps({"phase": phase}))
                with counting(client.workspace.ledger) as counted:
                    client.refresh()
                counts.append((phase, counted["statements"], counted["transactions"]))
            assert len(client.jobs(states=["SUCCEEDED"], name=name, limit=None)) == count
    assert counts[:3] == counts[3:]


def test_an_array_is_one_submission_and_as_many_transactions_as_it_has_batches(orc_home: Path, tmp_path: Path) -> None:
    """Each element is prepared, announced and accepted as durably as a job by itself."""
    backend = Arrays(tmp_path / "fake")
    counts = []
    (tmp_path / "project").mkdir()
    file = tmp_path / "project" / "job.yaml"
    with Client(backend_of=lambda _: backend) as client:
        for name, last in (("few", 4), ("many", 49)):
            file.write_text(f"name: {name}\ncommand: 'true'\nlauncher: python\narray: 0-{last}\n")
            loaded = load_jobs(file)
            assert isinstance(loaded, LoadedGroup)
            with counting(client.workspace.ledger) as counted:
                client.submit_group(loaded)
            counts.append(counted["transactions"])
    assert backend.calls("submit_array") == ["5", "50"]
    assert counts[0] == counts[1]


class Arrays(FakeBackend):
    """It takes arrays."""

    self_driving = False

    def submit_array(
        self, plans: Sequence[Plan], secrets: Mapping[str, str], *, at_once: int | None = None
    ) -> list[Handle]:
        self._called("submit_array", str(len(plans)))
        for plan in plans:
            self._start(plan.marker, secrets)
        return [self._handle(plan.marker) for plan in plans]
