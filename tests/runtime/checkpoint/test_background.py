"""Saving in the background: ``save_state(block=False)``."""

import contextlib
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from orc.runtime import Accelerator, ProjectConfiguration
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import read_manifest
from orc.runtime.checkpoint.state import staging
from orc.runtime.checkpoint.state.ownership import FILE
from orc.runtime.checkpoint.state.staging import Stage
from orc.runtime.checkpoint.storage import durable
from orc.runtime.core.context import reset_default


def listed(directory):
    """What is in *directory* but the mark of the run that saves there."""
    return sorted(name for name in os.listdir(directory) if not name.startswith(FILE))


@pytest.fixture
def held(monkeypatch):
    """Writing waits until the event is set; how a save is caught in the act."""
    go, real = threading.Event(), os.write

    def write(fd, data):
        if threading.current_thread().name == "orc-checkpoint":
            assert go.wait(30)
        return real(fd, data)

    monkeypatch.setattr(durable.os, "write", write)
    yield go
    go.set()


@pytest.fixture
def full_disk(monkeypatch):
    """Writing in the background fails while the returned dictionary says so."""
    real, state = os.write, {"full": True}

    def write(fd, data):
        if state["full"] and threading.current_thread().name == "orc-checkpoint":
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(durable.os, "write", write)
    return state


def test_what_is_saved_is_the_state_at_the_call_whatever_training_does_meanwhile(tmp_path, make_run, held):
    run = make_run(tmp_path)
    run.run()
    path = run.accelerator.save_state(block=False)
    saved = run.state()
    assert not os.path.exists(path)
    uninterrupted = run.run(2).state()
    held.set()
    run.accelerator.wait_for_checkpoint()
    assert read_manifest(tmp_path / "checkpoints" / "checkpoint_0").step == 6
    reset_default()
    other = make_run(tmp_path, seed=4)
    other.accelerator.load_state()
    assert other.state() == saved
    assert other.run(2).state() == uninterrupted


def test_the_next_save_waits_for_the_one_before_and_retention_runs(tmp_path, make_run, held):
    run = make_run(tmp_path, total_limit=2)
    run.accelerator.save_state(block=False)
    threading.Timer(0.2, held.set).start()
    for _ in range(3):
        run.run().accelerator.save_state(block=False)
    run.accelerator.load_state()  # waits too, and takes the newest
    assert run.accelerator._checkpointing.checkpoints.base_step + run.steps == 18
    assert listed(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]


@pytest.mark.parametrize("call", ["save_state", "load_state", "resume", "wait_for_checkpoint", "end_training", "step"])
def test_an_error_is_raised_by_the_next_call_once_and_nothing_is_left(tmp_path, make_run, full_disk, call):
    run = make_run(tmp_path)
    run.accelerator.save_state()
    run.run().accelerator.save_state(block=False)
    next_call = run.run if call == "step" else getattr(run.accelerator, call)
    run.accelerator._checkpointing.checkpoints.background._thread.join()
    with pytest.raises(CheckpointError, match=r"saving .*checkpoint_1 failed in the background: .*No space left"):
        next_call()
    assert listed(tmp_path / "checkpoints") == ["checkpoint_0"]
    full_disk["full"] = False
    run.accelerator.save_state(block=False)
    run.accelerator.wait_for_checkpoint()
    assert listed(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_2"]


def test_the_copy_keeps_ties_types_and_layout_and_its_memory_is_used_again():
    weight = torch.arange(12.0).view(3, 4)
    state = {
        "a": weight,
        "tied": weight.detach(),
        "column": weight[:, 1],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "nested": [(1, {"x": torch.tensor([True])}), "text", None],
    }
    stage = Stage()
    taken = stage.take(state)
    weight.zero_()
    assert taken["a"].tolist() == torch.arange(12.0).view(3, 4).tolist()
    assert taken["tied"].data_ptr() == taken["a"].data_ptr() != weight.data_ptr()
    assert taken["column"].tolist() == [1.0, 5.0, 9.0]
    assert taken["half"].dtype == torch.bfloat16
    assert taken["scalar"].item() == 7
    assert taken["empty"].shape == (0, 3)
    assert taken["nested"][0][1]["x"].item() is True
    assert taken["a"].untyped_storage().nbytes() == 48  # torch.save writes whole storages
    place = taken["a"].data_ptr()
    assert stage.take(state)["a"].data_ptr() == place


class Driver:
    """What locks memory for GPUs, on a machine without one: knows what is locked."""

    def __init__(self, monkeypatch, error=0):
        self.error, self.locked, self.forgotten = error, {}, 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(staging, "_forget_last_error", self.forget)

    def cudaHostRegister(self, address, size, flags):
        assert flags == 1
        if not self.error:
            self.locked[address] = size
        return self.error

    def forget(self, device):
        self.forgotten += 1

    def cudaHostUnregister(self, address):
        del self.locked[address]


def test_memory_for_a_gpu_is_as_large_as_the_state_locked_once_and_unlocked_before_it_goes(monkeypatch):
    driver, device, size = Driver(monkeypatch), torch.device("cuda", 0), 33 * 2**20 + 5
    stage = Stage()
    block = stage._reserve(size, device)
    assert driver.locked == {block.data_ptr(): size}
    assert stage._reserve(1000, device).data_ptr() == block.data_ptr()
    larger = stage._reserve(2 * size, device)
    assert driver.locked == {larger.data_ptr(): 2 * size}
    del stage
    assert not driver.locked
    assert larger.nbytes() == 2 * size  # what was copied outlives it


def test_memory_that_the_driver_does_not_lock_is_used_as_it_is_and_told_of_once(monkeypatch):
    driver, device = Driver(monkeypatch, error=2), torch.device("cuda", 0)
    stage = Stage(2**20)
    with pytest.warns(UserWarning, match=r"does not lock 1 MiB of host memory for checkpoints \(CUDA error 2\)"):
        block = stage._reserve(1000, device)
    with warnings.catch_warnings(action="error"):
        assert stage._reserve(2**20, device).data_ptr() == block.data_ptr()
    del stage
    assert not driver.locked
    assert driver.forgotten == 1, "training would meet the error"


FORKING = """
import os, resource, torch
from orc.runtime.checkpoint.state.staging import Stage
torch.set_num_threads(1)
state = {"weight": torch.ones(2_000_000)}
stage = Stage()
stage.take(state)
wait, go = os.pipe()
child = os.fork()
if child == 0:  # a loader's worker, alive during the next save
    os.close(go)
    os.read(wait, 1)
    whole = bool((stage.take(state)["weight"] == 1).all())
    os._exit(0 if whole else 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
stage.take(state)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
os.close(go)
print(os.waitpid(child, 0)[1], faults)
"""


def test_a_worker_process_does_not_slow_the_next_copy_and_can_make_its_own():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=150, check=True)
    status, faults = map(int, done.stdout.split())
    assert status == 0
    assert faults < 1000  # the copy has 2000 pages


SCRIPT = """
import sys, torch
from orc.runtime import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(500, 500))
accelerator.save_state(sys.argv[1], block=False)
if len(sys.argv) > 2:
    import os
    from orc.runtime.checkpoint.storage import durable
    def full(fd, data):
        raise OSError(28, "No space left on device")
    accelerator.wait_for_checkpoint()
    durable.os.write = full
    accelerator.save_state(sys.argv[1], block=False)
"""


def test_the_end_of_the_process_waits_and_tells_what_went_wrong(tmp_path):
    target = tmp_path / "state"
    command = [sys.executable, "-c", SCRIPT, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    assert read_manifest(target).files
    done = subprocess.run([*command, "full"], capture_output=True, text=True, timeout=150)
    assert "orc: saving" in done.stderr
    assert "No space left on device" in done.stderr
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.distributed
def test_a_rank_that_cannot_write_in_the_background_fails_all_at_the_next_call(tmp_path, run_ranks):
    def work(root):
        accelerator = Accelerator(project_config=ProjectConfiguration(root, automatic_checkpoint_naming=True))
        accelerator.prepare(torch.nn.Linear(2, 2))
        if accelerator.process_index == 1:

            def full(fd, data):
                raise OSError(28, "No space left on device")

            durable.os.write = full
        accelerator.save_state(block=False)
        try:
            accelerator.save_state(block=False)
        except CheckpointError as error:
            return str(error)
        return None

    for text in run_ranks(2, work, str(tmp_path)):
        assert "checkpoint_0 failed in the background: rank 1: OSError: [Errno 28] No space left" in text
    assert listed(tmp_path / "checkpoints") == []
