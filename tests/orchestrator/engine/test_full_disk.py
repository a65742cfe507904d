"""A state directory that cannot be written: a full disk, a file system that is read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts_testbed import eventually

from orc.launchers.backends.base import Phase
from orc.orchestrator.client import Client
from orc.orchestrator.ledger import audit, content_holders, database
from orc.orchestrator.ledger.database import LedgerError
from orc.orchestrator.service.housekeeping import keep_house
from orc.orchestrator.service.settings import load_settings

NEWER = ("late_copies", "audit", "audit_intents", "audit_limits", "content_holders", "duties")
ORC = [sys.executable, "-m", "orc.orchestrator.cli.main"]


def fill(directory: Path) -> None:
    """Write until nothing fits any more."""
    for number, size in enumerate(("64k", "1k", "1")):
        target = directory / f"fill-{len(list(directory.iterdir()))}-{number}"
        done = subprocess.run(["dd", "if=/dev/zero", f"of={target}", f"bs={size}"], capture_output=True, check=False)
        assert b"No space left" in done.stderr


def orc(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*ORC, *arguments], capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


def submit_and_see_it_run(job_yaml: Path) -> None:
    """A job whose agents have no need of the disk any more."""
    job_yaml.write_text("name: once\ncommand: [/bin/sleep, '600']\nlauncher: python\n")
    assert orc("submit", str(job_yaml))[0] == 0
    eventually(lambda: "RUNNING" in orc("status", "@last")[1], timeout_s=60)


@pytest.fixture
def small(orc_home):
    """A state directory on a disk of its own."""
    state = orc_home / "state"
    state.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,nr_inodes=2000,mode=0700", "tmpfs", state], check=True)
    yield state
    subprocess.run(["umount", "-l", state], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 24 MiB")
def test_on_a_full_disk_jobs_are_still_seen_waited_for_and_cancelled(small, tmp_path):
    submit_and_see_it_run(tmp_path / "job.yaml")
    fill(small)
    fill(small)
    for command, status in ((["list"], 0), (["status"], 0), (["wait", "@last", "--timeout", "0.1"], 6)):
        code, out, err = orc(*command)
        assert (code, "once" in out) == (status, True), err
        assert "its disk is full" in err
    assert orc("submit", str(tmp_path / "job.yaml"))[0] == 2
    assert orc("cancel", "@last", "--grace", "0.1")[0] == 0
    assert orc("wait", "@last", "--timeout", "60")[0] == 3
    for file in small.glob("fill*"):
        file.unlink()
    assert orc("wait", "@last", "--timeout", "60")[0] == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 24 MiB")
def test_on_a_full_disk_what_a_service_keeps_is_whole_and_goes_on_once_there_is_room(small, backend, clock, job_file):
    """Copies that may come late, the audit log and its intents, holders of contents, duties."""
    settings = load_settings({"keep_jobs": "1d", "keep_audit": "1d"}, environ={})
    backend.self_driving = False
    with Client(backend_of=lambda _: backend, clock=clock, sleep=clock.sleep) as client:
        backend.behave(submit="swallowed")
        lost = client.submit(job_file())
        backend.behave(submit="refuse")
        client.refresh()  # its copy is looked for from now on
        backend.behave(submit=None)
        job = client.submit(job_file())
        database = client.workspace.ledger.database
        with database.write() as connection:
            audit.append(connection, at=clock.now, user="ann", action="old")
            audit.intend(connection, "i", at=clock.now, user="ann", action="begun")
            content_holders.add(connection, "ann", ["1" * 64], clock.now)
        clock.now += 100 * 86400

        def rows():
            with Client(backend_of=lambda _: backend) as now, now.workspace.ledger.database.read() as connection:
                return [connection.tuples(f"SELECT * FROM {table} ORDER BY 1") for table in NEWER]

        before = rows()
        fill(small)
        fill(small)
        backend.set(job.attempt.marker, Phase.RUNNING)
        with contextlib.suppress(LedgerError):
            assert keep_house(client, settings) is None
        client.refresh()
        assert client.job(job.id).state == "RUNNING"
        assert rows() == before
        for file in small.glob("fill*"):
            file.unlink()
        client.refresh()
        assert client.job(job.id).state == "RUNNING"
        assert "removed 1 jobs" in keep_house(client, settings)
        with client.workspace.ledger.database.read() as connection:
            lines = [line.action for line in audit.page(connection, 9)]
        assert lines == ["prune_audit"], "what was begun was settled as a line, and is as old as the other one"
        assert lost.id not in {row.id for row in client.jobs()}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 24 MiB")
def test_on_a_read_only_file_system_jobs_are_still_seen(small):
    with Client() as client:
        assert client.jobs() == []
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    code, _, err = orc("list")
    assert (code, "its file system is read-only" in err) == (0, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of 24 MiB")
def test_where_no_file_can_be_made_although_space_is_free_jobs_are_still_seen_and_cancelled(small, tmp_path):
    submit_and_see_it_run(tmp_path / "job.yaml")
    with contextlib.suppress(OSError):
        for number in range(4000):
            (small / f"fill-{number}").touch()
    for command in (["list"], ["status"]):
        code, out, err = orc(*command)
        assert (code, "once" in out, "No space left" in err) == (0, True, True), err
    assert orc("cancel", "@last", "--grace", "0.1")[0] == 0
    assert orc("wait", "@last", "--timeout", "60")[0] == 3


# -- with a fake backend, and a disk that is said to be full


@pytest.fixture
def disk(monkeypatch):
    """``disk["full"] = True``."""
    is_full = {"full": False}
    free = database._free
    monkeypatch.setattr(database, "_free", lambda status: 0 if is_full["full"] else free(status))
    return is_full


def test_what_is_seen_while_the_disk_is_full_is_written_down_once_there_is_room(client, backend, job_file, disk, see):
    job = client.submit(job_file())
    disk["full"] = True
    see(job, Phase.SUCCEEDED)
    assert client.job(job.id).state == "SUCCEEDED"
    disk["full"] = False
    with Client(backend_of=lambda _: backend) as another:
        assert another.job(job.id).state == "PENDING"
        client.refresh()
        assert another.job(job.id).state == "SUCCEEDED"


def test_nothing_is_started_that_could_not_be_remembered(client, backend, job_file, disk, clock, see):
    job = client.submit(job_file(retry={"max_attempts": 2, "on": ["crash"], "backoff": 0}))
    disk["full"] = True
    see(job, Phase.FAILED, cause="crash")
    clock.sleep(1000)
    client.refresh()
    assert len(backend.calls("submit")) == 1
    with pytest.raises(LedgerError, match="can only be read now: its disk is full"):
        client.submit(job_file())
    disk["full"] = False
    client.refresh()
    assert len(backend.calls("submit")) == 2


def test_a_cancellation_that_cannot_be_kept_must_have_reached_the_cluster(client, backend, job_file, disk):
    job = client.submit(job_file())
    disk["full"] = True
    backend.behave(cancel="unreachable")
    with pytest.raises(LedgerError, match=r"cannot be cancelled now: local: no answer while cancelling"):
        client.cancel([job.id])
    backend.behave(cancel=None)
    client.cancel([job.id])
    assert len(backend.calls("cancel")) == 1
