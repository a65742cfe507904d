"""Checkpoints on object stores; fsspec's memory file system stands for them in one process."""

import fsspec
import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.manifest import Manifest
from orc.runtime.checkpoint.remote import Remote, place
from orc.runtime.context import reset_default


@pytest.fixture
def store():
    """The empty memory file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def names(store, directory):
    return sorted(entry.rpartition("/")[2] for entry in store.ls(directory, detail=False))


def test_numbered_checkpoints_rotate_and_training_resumes_from_the_newest(store, make_run, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", "memory://bucket/run")
    monkeypatch.setenv("ORC_CHECKPOINT_KEEP", "2")
    run = make_run()
    for _ in range(3):
        path = run.run().accelerator.save_state()
    assert path == "memory://bucket/run/checkpoint_2"
    assert names(store, "/bucket/run") == ["checkpoint_1", "checkpoint_2"]
    assert names(store, "/bucket/run/checkpoint_2") == [
        "manifest.json",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "sampler.bin",
        "scheduler.bin",
    ]
    expected = run.run().state()
    reset_default()
    other = make_run(seed=8)
    resumed = other.accelerator.resume()
    assert str(resumed.path) == path
    assert (resumed.step, resumed.epoch) == (18, 3)
    assert other.run().state() == expected


def test_the_project_folder_may_be_remote_and_saving_in_the_background(store, make_run):
    run = make_run("memory://bucket/project")
    run.run().accelerator.save_state(block=False)
    run.accelerator.wait_for_checkpoint()
    expected = run.state()
    assert names(store, "/bucket/project/checkpoints") == ["checkpoint_0"]
    run.run().accelerator.load_state()
    assert run.state() == expected


def test_a_directory_that_is_saved_again_holds_one_checkpoint_or_the_other_at_every_write(store, make_run):
    run = make_run()
    run.run().accelerator.save_state("memory://bucket/last")
    first = run.state()
    run.run()
    second = run.state()
    found, system = [], type(store)

    def look(real):
        def operation(self, *args, **kwargs):
            result = real(self, *args, **kwargs)
            data = self.cat_file("/bucket/last/manifest.json")
            manifest = Manifest.from_json(data)
            for name, record in manifest.files.items():
                assert self.info(f"/bucket/last/{manifest.prefix}{name}")["size"] == record.size
            found.append(manifest.step)
            return result

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "pipe_file", "rm_file"):
            patch.setattr(system, name, look(getattr(system, name)))
        run.accelerator.save_state("memory://bucket/last")
    assert found[0] == 6
    assert found[-1] == 12
    assert found == sorted(found)
    assert len(names(store, "/bucket/last")) == 6  # the old files are gone
    run.run().accelerator.load_state("memory://bucket/last")
    assert run.state() == second != first


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flip", r"optimizer\.bin does not hold what was saved"),
        ("cut", r"optimizer\.bin has 10 bytes instead of"),
        ("missing", r"optimizer\.bin is missing"),
        ("uncommitted", r"has no manifest\.json"),
    ],
)
def test_damage_is_found_before_anything_changes(store, make_run, damage, message):
    run = make_run()
    run.run().accelerator.save_state("memory://bucket/s")
    before = run.run().state()
    path = "/bucket/s/optimizer.bin"
    data = bytearray(store.cat_file(path))
    if damage == "flip":
        data[100] ^= 1
        store.pipe_file(path, bytes(data))
    elif damage == "cut":
        store.pipe_file(path, bytes(data[:10]))
    else:
        store.rm_file(path if damage == "missing" else "/bucket/s/manifest.json")
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.load_state("memory://bucket/s")
    assert run.state() == before


def test_a_save_that_fails_leaves_nothing(store, make_run, monkeypatch):
    run = make_run()
    real = Remote.replace

    def fail(self, data):
        raise OSError("connection lost")

    monkeypatch.setattr(Remote, "replace", fail)
    with pytest.raises(CheckpointError, match="connection lost"):
        run.accelerator.save_state("memory://bucket/s")
    assert not store.find("/bucket")
    monkeypatch.setattr(Remote, "replace", real)
    run.accelerator.save_state("memory://bucket/s")


def test_files_of_hooks_go_along(store, make_run):
    run, seen = make_run(), []

    def note(models, weights, directory):
        with open(f"{directory}/notes.txt", "w") as file:
            file.write("hello")

    def read(models, directory):
        with open(f"{directory}/notes.txt") as file:
            seen.append(file.read())

    run.accelerator.register_save_state_pre_hook(note)
    run.accelerator.register_load_state_pre_hook(read)
    run.accelerator.save_state("memory://bucket/s")
    assert "notes.txt" in names(store, "/bucket/s")
    run.accelerator.load_state("memory://bucket/s")
    assert seen == ["hello"]


def test_file_urls_are_directories_and_unknown_schemes_are_named(tmp_path, make_run):
    assert place(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    run = make_run()
    assert run.accelerator.save_state(f"file://{tmp_path}/s") == str(tmp_path / "s")
    run.accelerator.load_state(f"file://{tmp_path}/s")
    with pytest.raises(CheckpointError, match=r"nowhere://x cannot be opened: .*nowhere"):
        run.accelerator.save_state("nowhere://x")


@pytest.mark.distributed
def test_all_ranks_write_to_and_read_from_the_store(tmp_path, run_ranks):
    # A chain of fsspec's over local files: a store that several processes see.
    def work(root):
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        accelerator.prepare(torch.nn.Linear(3, 3))
        accelerator.save_state(f"simplecache::file://{root}/bucket/s")
        expected = torch.rand(3).tolist()
        torch.manual_seed(0)
        accelerator.load_state(f"simplecache::file://{root}/bucket/s")
        return torch.rand(3).tolist() == expected

    assert run_ranks(2, work, str(tmp_path)) == [True] * 2
    files = {entry.name for entry in (tmp_path / "bucket" / "s").iterdir()}
    assert files == {"manifest.json", "model.safetensors", "random_states_0.pkl", "random_states_1.pkl"}
