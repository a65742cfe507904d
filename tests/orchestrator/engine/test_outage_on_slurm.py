"""A controller that is away for ten minutes, and one that comes back without its memory."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_testbed import SlurmTestbed, eventually, has_ended

from orc.launchers.backends.base import Handle, Phase
from orc.launchers.spec import load_job
from orc.launchers.spec.clusters import Cluster
from orc.orchestrator.client import Client

# Dies just before the first sbatch talks to it.
SBATCH = """#!/bin/sh
if [ "$1" != --version ] && [ ! -e {once} ]; then
    touch {once}
    kill {pid}
    while kill -0 {pid} 2>/dev/null; do sleep 0.1; done
fi
exec {sbatch} "$@"
"""
WAITS = """
import os, time
open(os.environ["ORC_JOB_DIR"] + "/up", "w").close()
while not os.path.exists(os.environ["ORC_JOB_DIR"] + "/go"):
    time.sleep(0.1)
"""


class Later:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def clock() -> Later:
    return Later()


@pytest.fixture
def commands(slurm: SlurmTestbed, tmp_path: Path) -> Path:
    """Slurm's commands, until one of them is replaced."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "sinfo"):
        (directory / name).symlink_to(str(shutil.which(name)))
    return directory


@pytest.fixture
def client(orc_home: Path, slurm_cluster: Cluster, commands: Path, clock: Later) -> Iterator[Client]:
    clusters = orc_home / "config" / "clusters.yaml"
    clusters.parent.mkdir(parents=True)
    entry = {key: value for key, value in slurm_cluster.model_dump(mode="json").items() if key != "name" and value}
    entry["options"] = {**entry["options"], "bin": str(commands), "query_timeout": 5, "submit_timeout": 5}
    clusters.write_text(yaml.safe_dump({"testbed": entry}))
    with Client(clock=clock) as made:
        yield made


@pytest.fixture
def submit(client: Client, tmp_path: Path) -> Callable[..., str]:
    def send(script: str = WAITS, **options: Any) -> str:
        (tmp_path / "train.py").write_text(script)
        job = {
            "name": "t",
            "script": "train.py",
            "launcher": "python",
            "cluster": "testbed",
            "grace": 1,
            "resources": {"options": {"slurm": options}},
            "retry": {"on": []},
            "workdir": {"exclude": ["root", "bin"]},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        return client.submit(load_job(tmp_path / "job.yaml")).id

    return send


def directory(client: Client, job: str) -> Path:
    return Path(client.session.cluster("testbed").root or "") / "jobs" / job


def kinds(client: Client, job: str) -> list[str]:
    return [event.kind for event in client.events(job)]


def until(client: Client, job: str, state: str) -> None:
    def there() -> bool:
        client.refresh([job])
        return client.job(job).state == state

    eventually(there, timeout_s=60)


@pytest.mark.slow
def test_jobs_keep_their_state_while_the_controller_is_away_and_submissions_are_resolved(
    client: Client, clock: Later, slurm: SlurmTestbed, commands: Path, submit: Callable[..., str], tmp_path: Path
) -> None:
    running = submit()
    eventually((directory(client, running) / "up").exists, timeout_s=60)
    until(client, running, "RUNNING")
    pid = (slurm.directory / "run" / "slurmctld.pid").read_text().split()[0]
    text = SBATCH.format(once=tmp_path / "once", pid=pid, sbatch=shutil.which("sbatch"))
    (commands / "sbatch").unlink()
    (commands / "sbatch").write_text(text)
    (commands / "sbatch").chmod(0o755)
    with slurm.dead_controller(at_once=False):
        cut_off = submit()
        assert client.job(cut_off).attempts[0].state == "AMBIGUOUS"
        eventually(lambda: has_ended(int(pid)))  # sbatch may not have waited so long
        clock.offset += 600
        assert set(client.refresh().unreachable) == {"testbed"}
        assert client.job(running).state == "RUNNING"
        assert client.job(cut_off).attempts[0].state == "AMBIGUOUS"
    # Nobody has taken the job: it is not there now, and not after the time in which it could still turn up.
    eventually(lambda: client.refresh() and "not_found" in kinds(client, cut_off), timeout_s=60)
    clock.offset += client.workspace.backend("testbed").visibility_s + 1
    # So it is sent again, once.
    until(client, cut_off, "RUNNING")
    assert client.job(running).state == "RUNNING"
    for job in (running, cut_off):
        (directory(client, job) / "go").touch()
    assert [view.state for view in client.wait([running, cut_off], timeout_s=90)] == ["SUCCEEDED"] * 2
    assert [len(client.job(job).attempts) for job in (running, cut_off)] == [1, 1]
    assert len(slurm.jobs(client.job(cut_off).attempts[0].marker)) == 1


@pytest.mark.slow
def test_job_numbers_that_are_used_again_belong_to_others(
    client: Client, slurm: SlurmTestbed, submit: Callable[..., str], tmp_path: Path
) -> None:
    state = slurm.directory / "state"
    with slurm.dead_controller():
        shutil.copytree(state, tmp_path / "earlier")
    ended = submit("print('ok')")
    assert client.wait([ended], timeout_s=90)[0].state == "SUCCEEDED"
    waiting = submit(begin="now+1hour")
    backend = client.workspace.backend("testbed")
    ours = [client.at_backend(job, None)[1] for job in (ended, waiting)]
    assert all(isinstance(handle, Handle) for handle in ours)
    with slurm.dead_controller():  # it comes back as it was before
        for name in ("job_state", "job_state.old"):
            (state / name).unlink(missing_ok=True)
            if (tmp_path / "earlier" / name).exists():
                shutil.copy2(tmp_path / "earlier" / name, state / name)
    others: list[str] = []
    for _ in ours:
        others.append(slurm.run("sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "--wrap=true"))
    assert others == [handle.native_id for handle in ours]
    seen = backend.poll(ours)
    assert [seen[handle].phase for handle in ours] == [Phase.SUCCEEDED, Phase.UNKNOWN]
    client.refresh()
    assert client.job(waiting).state == "PENDING"
    # Much later nobody expects it any more; no other job's fate is taken for its own.
    old = replace(ours[1], submitted_at=time.time() - 3600)
    assert backend.poll([old])[old].phase is Phase.LOST
    backend.cancel(ours, timedelta(0))
    assert slurm.run("squeue", "--noheader", "--format=%T", f"--jobs={ours[1].native_id}") == "PENDING"
    assert backend.find(ours[0].marker).native_id == ours[0].native_id
    assert os.path.exists(state / "job_state")


def test_accounting_that_is_slow_or_off_makes_nothing_fail(
    client: Client, commands: Path, submit: Callable[..., str]
) -> None:
    backend = client.workspace.backend("testbed")
    gone = Handle("testbed", "slurm", "orc-gone-000000-a1", "999999", time.time() - 3600)
    for says in ("exec sleep 60", "echo 'Slurm accounting storage is disabled' >&2; exit 1"):
        (commands / "sacct").unlink()
        (commands / "sacct").write_text(f"#!/bin/sh\n{says}\n")
        (commands / "sacct").chmod(0o755)
        seen = backend.poll([gone])[gone]
        assert (seen.phase, seen.reason) == (Phase.UNKNOWN, "Slurm does not know the job (yet)")
    job = submit("print('ok')")
    assert client.wait([job], timeout_s=90)[0].state == "SUCCEEDED"
