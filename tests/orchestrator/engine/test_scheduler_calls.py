"""Calls of a scheduler: one or two for a thousand jobs, by its own commands."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import yaml
from prepared_jobs import create_prepared

from orc.orchestrator.client import Client
from orc.orchestrator.ledger.lifecycle import Event, Kind
from orc.orchestrator.ledger.records import NewJob

JOBS = 1000
QUEUED = 600  # the others have ended, and are known to accounting alone
SPEC = {"name": "many", "grace": 30, "retry": {"max_attempts": 1, "on": [], "backoff": 10}}


@pytest.fixture
def scheduler(orc_home: Path, tmp_path: Path) -> Path:
    """Commands of a Slurm with a thousand jobs of ours, which note every call in the file that is returned."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    now = int(time.time())
    rows = {
        "squeue": [f"{n}|orc-many-{n:06d}-a1|RUNNING|{now}|{now}|{now + 999}|30:00|n1|None" for n in range(QUEUED)],
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


def test_the_state_of_a_thousand_jobs_is_two_calls_and_they_are_shared(scheduler: Path) -> None:
    with Client() as client, Client() as another:
        with client.workspace.ledger.transaction() as tx:
            for number in range(JOBS):
                job = f"many-{number:06d}"
                marker = f"orc-{job}-a1"
                made = create_prepared(
                    tx, NewJob(job, "many", "hpc", "slurm", "", SPEC, {}, {}), marker, "p", "nobody", 0.0
                )
                handle = {
                    "cluster": "hpc",
                    "backend": "slurm",
                    "marker": marker,
                    "native_id": str(number),
                    "submitted_at": time.time(),
                }
                tx.record(made, Event(Kind.SUBMITTING, 1), Event(Kind.ACCEPTED, 1), attempt_set={"handle": handle})
        assert client.refresh(max_age_s=None).unreachable == {}
        another.refresh(max_age_s=None)  # it is not time yet
        assert scheduler.read_text().split() == ["squeue", "sacct"]
        assert len(client.jobs(states=["RUNNING"], limit=None)) == QUEUED
        assert len(client.jobs(states=["SUCCEEDED"], limit=None)) == JOBS - QUEUED
