"""Two runs do not save in one folder."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state import ownership
from orc.runtime.checkpoint.state.ownership import FILE, own, record

RUN = """
import sys, torch
from orc.runtime import Accelerator, ProjectConfiguration
accelerator = Accelerator(project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state()
print("saved", flush=True)
sys.stdin.readline()
accelerator.end_training()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def owner_file(tmp_path):
    """The file that names the run that has the project folder *tmp_path*."""
    directory, suffix = record(tmp_path / "checkpoints")
    assert not directory.is_relative_to(tmp_path)
    return directory / f"{FILE}{suffix}"


@pytest.fixture
def other_run(tmp_path):
    """Another process that has saved a checkpoint, and ends its training when it gets a line."""
    program = [sys.executable, "-c", RUN, str(tmp_path)]
    environment = os.environ | {"ORC_JOB_NAME": "vowels", "ORC_ATTEMPT": "2"}
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout.readline() == "saved\n"
        yield run
        run.kill()


def test_the_second_run_is_told_who_has_the_folder(tmp_path, make_run, other_run, owner_file):
    run = make_run(tmp_path, total_limit=1)
    with pytest.raises(CheckpointError) as told:
        run.accelerator.save_state()
    root = tmp_path / "checkpoints"
    owner = f"job vowels attempt 2, process {other_run.pid} on {socket.gethostname()}"
    assert f"{root} is in use by another run: {owner}" in str(told.value)
    assert sorted(os.listdir(root)) == ["checkpoint_0"]

    other_run.stdin.write("\n")
    other_run.stdin.flush()
    assert other_run.stdout.readline() == "ended\n"
    run.accelerator.save_state()
    assert sorted(os.listdir(root)) == ["checkpoint_1"]
    assert owner_file.exists()
    assert os.listdir(tmp_path) == ["checkpoints"]
    run.accelerator.end_training()
    assert not owner_file.exists()


def test_what_a_killed_run_had_is_free(tmp_path, make_run, other_run, owner_file):
    os.kill(other_run.pid, signal.SIGKILL)
    other_run.wait()
    root = tmp_path / "checkpoints"
    other_machine = owner_file.with_name(f"{owner_file.name}-site-1")  # of a time with several
    other_machine.write_text(owner_file.read_text())
    make_run(tmp_path).accelerator.save_state()
    assert sorted(os.listdir(root)) == ["checkpoint_0", "checkpoint_1"]
    assert owner_file.exists()
    assert not other_machine.exists()


def test_without_locks_between_machines_the_last_to_come_owns_the_folder(tmp_path, make_run, owner_file):
    run = make_run(tmp_path)
    run.accelerator.save_state()
    root = tmp_path / "checkpoints"
    record = {"run": "other", "host": "node7", "pid": 12, "job": "job tides", "since": 0.0}
    owner_file.write_text(json.dumps(record))  # as a machine does that sees no lock
    message = f"{re.escape(str(root))} was taken over by another run: job tides, process 12 on node7, since 1970-01-01"
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.save_state()
    assert sorted(os.listdir(root)) == ["checkpoint_0"]
    run.accelerator.end_training()
    assert json.loads(owner_file.read_text()) == record


def test_a_directory_of_its_own_is_owned_only_while_it_is_saved(tmp_path, make_run):
    run = make_run()
    run.accelerator.save_state(tmp_path / "s")
    assert os.listdir(tmp_path) == ["s"]
    (tmp_path / "t").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        run.accelerator.save_state(tmp_path / "t")
    assert sorted(os.listdir(tmp_path)) == ["s", "t"]


def test_without_a_home_the_folder_holds_the_record(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert record(tmp_path / "checkpoints") == (tmp_path / "checkpoints", "")


def test_a_later_run_of_the_same_job_waits_for_no_lock(tmp_path, monkeypatch):
    """The file server may hold the lock of a machine that is gone for minutes, or for ever."""

    def begin(run, job, restart):
        monkeypatch.setattr(ownership, "_held", {})
        monkeypatch.setattr(ownership, "_RUN", run)
        monkeypatch.setenv("ORC_JOB_ID", job)
        monkeypatch.setenv("ORC_RESTART", str(restart))

    monkeypatch.setattr(ownership, "_PATIENCE_S", 0.0)
    begin("first", "7", 0)
    first = own(tmp_path)
    begin("other", "8", 1)
    with pytest.raises(CheckpointError, match="in use by another run"):
        own(tmp_path)
    begin("second", "7", 1)
    second = own(tmp_path)
    second.check()
    begin("first", "7", 0)
    with pytest.raises(CheckpointError, match="taken over by another run"):
        first.check()
    with pytest.raises(CheckpointError, match="in use by another run"):
        own(tmp_path)
    for owned in (first, second):
        os.close(owned.fd)


def test_a_checkpoint_that_is_a_link_goes_like_any_other(tmp_path, make_run):
    run = make_run(tmp_path, total_limit=1)
    run.accelerator.save_state()
    root = tmp_path / "checkpoints"
    (root / "checkpoint_0").rename(tmp_path / "kept")
    (root / "checkpoint_0").symlink_to(tmp_path / "kept")
    (root / "checkpoint_7.tmp").symlink_to(tmp_path / "nowhere")
    for _ in range(2):
        run.accelerator.save_state()
    assert sorted(os.listdir(root)) == ["checkpoint_9"]
    assert (tmp_path / "kept" / "manifest.json").is_file()


@pytest.mark.distributed
def test_old_checkpoints_are_gone_on_every_rank_when_a_save_returns(tmp_path, run_ranks):
    def scenario(root):
        import torch

        from orc.runtime import Accelerator, ProjectConfiguration
        from orc.runtime.checkpoint.format.layout import CheckpointRoot

        project = ProjectConfiguration(root, automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(project_config=project)
        accelerator.prepare(torch.nn.Linear(2, 2))
        retain = CheckpointRoot.retain

        def slowly(self, keep):
            time.sleep(0.3)
            return retain(self, keep)

        CheckpointRoot.retain = slowly
        seen = []
        for _ in range(3):
            accelerator.save_state()
            seen.append(sorted(name for name in os.listdir(f"{root}/checkpoints") if name.startswith("checkpoint")))
        return seen

    each = [[f"checkpoint_{number}"] for number in range(3)]
    assert run_ranks(2, scenario, str(tmp_path)) == [each, each]
