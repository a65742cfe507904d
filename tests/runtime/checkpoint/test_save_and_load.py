"""save_state, load_state and resume in one process."""

import json
import os
import random

import numpy as np
import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import NAME, read_manifest
from orc.runtime.checkpoint.state.ownership import FILE
from orc.runtime.checkpoint.storage import durable
from orc.runtime.core.config import ConfigError
from orc.runtime.core.context import reset_default


def names(directory):
    return sorted(entry.name for entry in directory.iterdir() if entry.name != FILE)


def test_rotation_keeps_the_newest_and_resumed_training_is_bit_equal(tmp_path, make_run):
    run = make_run(tmp_path, total_limit=2)
    for _ in range(3):
        run.run()
        run.accelerator.save_state()
    uninterrupted = run.run().state()

    assert run.accelerator.save_iteration == 3
    assert names(tmp_path / "checkpoints") == ["checkpoint_1", "checkpoint_2"]
    assert names(tmp_path / "checkpoints" / "checkpoint_2") == [
        "manifest.json",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "sampler.bin",
        "scheduler.bin",
    ]
    reset_default()
    other = make_run(tmp_path, seed=5, total_limit=2)
    other.accelerator.load_state()
    assert other.run().state() == uninterrupted
    other.accelerator.save_state()
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]


@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_resume_continues_in_the_middle_of_the_epoch(tmp_path, make_run, stop):
    uninterrupted = make_run().run(3).state()
    reset_default()
    run = make_run(tmp_path)
    for step in run.train(3):
        if step == stop:
            path = run.accelerator.save_state()
            break
    reset_default()
    other = make_run(tmp_path, seed=77)
    resumed = other.accelerator.resume()
    assert str(resumed.path) == path
    assert (resumed.step, resumed.epoch, resumed.offset) == (stop, (stop - 1) // 6, 4 * (stop - 6 * ((stop - 1) // 6)))
    assert other.run(3 - resumed.epoch).state() == uninterrupted


def test_resume_without_a_checkpoint_or_when_told_never_does_nothing(tmp_path, make_run, monkeypatch):
    assert make_run().accelerator.resume() is None
    run = make_run(tmp_path)
    assert run.accelerator.resume() is None
    run.accelerator.save_state()
    reset_default()
    monkeypatch.setenv("ORC_RESUME", "never")
    assert make_run(tmp_path).accelerator.resume() is None


def test_the_configured_directory_is_used_without_a_line_in_the_script(tmp_path, make_run, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", "4")
    monkeypatch.setenv("ORC_CHECKPOINT_KEEP", "2")
    run = make_run().run(3)
    assert names(tmp_path / "c") == ["checkpoint_2", "checkpoint_3"]
    assert [read_manifest(path).step for path in sorted((tmp_path / "c").glob("checkpoint_*"))] == [12, 16]
    expected = run.state()
    reset_default()
    other = make_run(seed=3)
    resumed = other.accelerator.resume()
    assert (resumed.step, resumed.epoch) == (16, 2)
    assert other.run().state() == expected
    assert names(tmp_path / "c") == ["checkpoint_2", "checkpoint_3"]


def test_a_checkpoint_at_the_end_of_an_epoch_resumes_behind_its_last_batch(tmp_path, make_run, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", "6")
    expected = make_run().run(2).state()
    reset_default()
    run = make_run()
    for step in run.train(2):
        if step == 8:
            break
    reset_default()
    other = make_run(seed=3)
    resumed = other.accelerator.resume()
    assert (resumed.step, resumed.epoch, resumed.offset) == (6, 0, 24)
    assert list(other.train(1)) == []  # what the script does after its loop still happens
    assert other.run(1).state() == expected


def test_automatic_checkpoints_need_a_place(make_run, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_EVERY", "4")
    with pytest.raises(ConfigError, match=r"checkpoint_every = 4 \(from ORC_CHECKPOINT_EVERY\).*ORC_CHECKPOINT_DIR"):
        make_run()
    monkeypatch.delenv("ORC_CHECKPOINT_EVERY")
    reset_default()
    with pytest.raises(ValueError, match="pass output_dir"):
        make_run().accelerator.save_state()
    with pytest.raises(CheckpointError, match="pass input_dir"):
        make_run().accelerator.load_state()


def test_scripts_that_skip_by_themselves_skip_once(tmp_path, make_run):
    uninterrupted = make_run().run(2).state()
    reset_default()
    run = make_run()
    for step in run.train(2):
        if step == 8:
            run.accelerator.save_state(tmp_path / "my_state")
            break
    reset_default()
    other = make_run(seed=9)
    other.accelerator.load_state(tmp_path / "my_state")
    whole, other.loader = other.loader, other.accelerator.skip_first_batches(other.loader, 2)
    assert other.run().state() == uninterrupted
    other.loader = whole
    assert len(list(other.train())) == 6


def test_every_generator_is_restored(tmp_path, make_run):
    run = make_run()
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    random.gauss(0, 1), np.random.randn()
    run.accelerator.save_state(tmp_path / "s")
    expected = random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.rand(2).tolist()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    run.accelerator.load_state(tmp_path / "s")
    assert (random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.rand(2).tolist()) == expected


def test_registered_objects_and_hooks_are_saved_and_loaded(tmp_path, make_run):
    class Counter:
        def __init__(self):
            self.state = {"count": 0, "rate": np.float64(0.5)}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    run, counter, seen = make_run(), Counter(), []
    run.accelerator.register_for_checkpointing(counter)

    def note(models, weights, directory):
        seen.append((len(models), len(weights), directory))
        (tmp_path / "x").mkdir(exist_ok=True)
        with open(os.path.join(directory, "notes.txt"), "w") as file:
            file.write("hello")

    handle = run.accelerator.register_save_state_pre_hook(note)
    run.accelerator.register_load_state_pre_hook(lambda models, directory: seen.append((models[:], directory)))
    counter.state["count"] = 7
    run.accelerator.save_state(tmp_path / "s")
    assert (tmp_path / "s" / "notes.txt").read_text() == "hello"
    assert "notes.txt" in read_manifest(tmp_path / "s").files
    counter.state = None
    run.accelerator.load_state(tmp_path / "s")
    assert counter.state == {"count": 7, "rate": 0.5}
    assert seen == [(1, 1, str(tmp_path / "s")), ([run.model], str(tmp_path / "s"))]
    handle.remove()
    run.accelerator.save_state(tmp_path / "s")
    assert not (tmp_path / "s" / "notes.txt").exists()

    counter.state = {"function": print}
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl could not be loaded again"):
        run.accelerator.save_state(tmp_path / "s")
    assert names(tmp_path) == ["s", "x"]
    run.accelerator.load_state(tmp_path / "s")
    assert counter.state["count"] == 7


def test_registered_objects_may_hold_arrays(tmp_path, make_run):
    class Holder:
        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    run, holder = make_run(), Holder()
    run.accelerator.register_for_checkpointing(holder)
    arrays = [
        np.arange(5.0),
        np.zeros((2, 0), "int32"),
        np.array(["a", "bc"]),
        np.array([True]),
        np.ones(2, "complex64"),
    ]
    for block in (True, False):
        holder.state = {"arrays": [array.copy() for array in arrays], "generator": np.random.RandomState(1).get_state()}
        run.accelerator.save_state(tmp_path / "s", block=block)
        holder.state["arrays"][0] += 1  # what is written in the background was copied before
        run.accelerator.load_state(tmp_path / "s")
        for loaded, array in zip(holder.state["arrays"], arrays, strict=True):
            assert type(loaded) is np.ndarray
            np.testing.assert_array_equal(loaded, array, strict=True)
        np.random.RandomState().set_state(holder.state["generator"])
    assert np.ndarray not in torch.serialization.get_safe_globals()

    holder.state = {"array": np.array([print, None])}
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl could not be loaded again"):
        run.accelerator.save_state(tmp_path / "s")


def test_hooks_may_take_over_weights(tmp_path, make_run):
    run = make_run()
    run.accelerator.register_save_state_pre_hook(lambda models, weights, directory: weights.clear())
    run.accelerator.register_load_state_pre_hook(lambda models, directory: models.clear())
    run.accelerator.save_state(tmp_path / "s")
    assert "model.safetensors" not in names(tmp_path / "s")
    run.accelerator.load_state(tmp_path / "s")


def test_unregistered_files_are_ignored_and_missing_ones_are_an_error(tmp_path, make_run):
    run = make_run()
    run.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    run.accelerator.save_state(tmp_path / "s")
    reset_default()
    less = make_run()
    less.accelerator.load_state(tmp_path / "s")
    less.accelerator.save_state(tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"holds no custom_checkpoint_0\.pkl"):
        run.accelerator.load_state(tmp_path / "less")


def test_weights_can_be_pickled_instead(tmp_path, make_run):
    run = make_run()
    run.accelerator.save_state(tmp_path / "s", safe_serialization=False)
    assert "pytorch_model.bin" in names(tmp_path / "s")
    expected = run.state()
    run.run()
    run.accelerator.load_state(tmp_path / "s", map_location="cpu", strict=True)
    assert run.state() == expected
    run.run()
    run.accelerator.load_state(tmp_path / "s", map_location="on_device")
    assert run.state() == expected


@pytest.mark.filterwarnings("error")
def test_documented_options_without_effect_are_taken_with_a_warning(tmp_path, make_run):
    run = make_run()
    with pytest.warns(UserWarning, match="save_state: exclude_frozen_parameters, tag has no effect"):
        run.accelerator.save_state(tmp_path / "s", tag="x", exclude_frozen_parameters=True)
    run.accelerator.load_state(tmp_path / "s", load_kwargs={"map_location": "cpu", "weights_only": True})
    with pytest.warns(UserWarning, match="load_state: mmap, weights_only has no effect"):
        run.accelerator.load_state(tmp_path / "s", load_kwargs={"mmap": True, "weights_only": False})


def test_tied_weights_are_stored_once_and_come_back(tmp_path, make_run):
    make_run()

    def tied():
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    first = tied()
    accelerator = Accelerator()
    accelerator.prepare(first)
    accelerator.save_state(tmp_path / "s")
    second, accelerator = tied(), Accelerator()
    accelerator.prepare(second)
    accelerator.load_state(tmp_path / "s")
    assert torch.equal(second["b"].weight, first["a"].weight)
    from safetensors.torch import load_file

    assert sorted(load_file(tmp_path / "s" / "model.safetensors")) == ["a.bias", "a.weight", "b.bias"]


@pytest.mark.parametrize("again", [False, True])
def test_everything_is_on_disk_before_the_checkpoint_has_its_name(tmp_path, make_run, monkeypatch, again):
    """Every file, the directory that names the files, and the one that names the checkpoint survive a power cut."""
    run = make_run()
    target = tmp_path / "s"
    if again:
        run.accelerator.save_state(target)
    events = []
    sync, rename, exchange = os.fsync, os.rename, durable.exchange

    def synced(fd):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        sync(fd)

    def named(act, one, other):
        result = act(one, other)
        events.append(("name", os.path.basename(other)))
        return result

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda one, other, **options: named(rename, one, other))
    monkeypatch.setattr(durable, "exchange", lambda one, other: named(exchange, one, other))
    run.accelerator.save_state(target)
    published = events.index(("name", "s"))
    before = {name for kind, name in events[:published] if kind == "sync"}
    assert before >= {*names(target), "s.tmp"}
    assert events.index(("sync", NAME)) < events.index(("sync", "s.tmp")), "the manifest's name is synced, too"
    assert ("sync", tmp_path.name) in events[published:]


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "bit": (lambda d: flip(d / "model.safetensors"), "model.safetensors does not hold what was saved"),
    "cut": (lambda d: os.truncate(d / "optimizer.bin", 100), "optimizer.bin has 100 bytes instead of"),
    "missing": (lambda d: (d / "scheduler.bin").unlink(), "scheduler.bin is missing"),
    "no manifest": (lambda d: (d / NAME).unlink(), "has no manifest.json: it is no complete checkpoint"),
    "manifest": (lambda d: (d / NAME).write_text("{"), "manifest.json cannot be read"),
    "future": (lambda d: (d / NAME).write_text(json.dumps({"format": 9})), "format 9, expected 4"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path, make_run, damage):
    run = make_run()
    run.run().accelerator.save_state(tmp_path / "s")
    before = run.run().state()
    do, message = DAMAGE[damage]
    do(tmp_path / "s")
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.load_state(tmp_path / "s")
    assert run.state() == before


def test_files_of_two_checkpoints_do_not_mix(tmp_path, make_run):
    run = make_run()
    run.accelerator.save_state(tmp_path / "a")
    run.run().accelerator.save_state(tmp_path / "b")
    (tmp_path / "a" / "model.safetensors").replace(tmp_path / "b" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not hold what was saved"):
        run.accelerator.load_state(tmp_path / "b")


def test_resume_passes_over_a_damaged_checkpoint_and_says_so(tmp_path, make_run, capsys):
    run = make_run(tmp_path)
    run.run().accelerator.save_state()
    expected = run.state()
    run.run().accelerator.save_state()
    flip(tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin", 200)
    reset_default()
    other = make_run(tmp_path)
    assert other.accelerator.resume().path.name == "checkpoint_0"
    assert other.state() == expected
    assert "checkpoint_1 is damaged: optimizer.bin" in capsys.readouterr().err
    flip(tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin", 200)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint can be resumed from.*checkpoint_1.*checkpoint_0"):
        other.accelerator.resume()


def test_a_position_that_cannot_continue_is_refused_before_anything_changes(tmp_path, make_run):
    run = make_run()
    for step in run.train():
        if step == 2:
            run.accelerator.save_state(tmp_path / "s")
            break
    reset_default()
    other = make_run(samples=20)
    before = other.state()
    with pytest.raises(CheckpointError, match="epoch of 24 samples, this loader's epoch has 20"):
        other.accelerator.load_state(tmp_path / "s")
    assert other.state() == before


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path, make_run, monkeypatch):
    run = make_run()
    run.accelerator.save_state(tmp_path / "s")
    expected = run.state()
    run.run()
    real = os.write

    def full(fd, data):
        if len(data) > 500:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("orc.runtime.checkpoint.storage.durable.os.write", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.accelerator.save_state(tmp_path / "s")
    monkeypatch.undo()
    assert names(tmp_path) == ["s"]
    run.accelerator.load_state(tmp_path / "s")
    assert run.state() == expected
