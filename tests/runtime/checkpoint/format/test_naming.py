"""A folder of numbered checkpoints: which are whole, which is next, what goes; and the names inside of one."""

import os

import pytest

from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import NAME, CheckpointRoot, Manifest, number_of
from orc.runtime.checkpoint.state.ownership import FILE
from orc.runtime.checkpoint.storage.durable import FileRecord


def checkpoint(directory, *, whole=True):
    directory.mkdir(parents=True)
    files = {} if whole else {"lost": FileRecord(1, 0)}
    (directory / NAME).write_bytes(Manifest("a", 0, 0, 0, 1, 0.0, files).to_json())
    return directory


def filled(root, *names):
    for name in names:
        checkpoint(root / name)
    return CheckpointRoot(root)


def names(directory):
    return sorted(os.listdir(directory))


def test_whole_checkpoints_are_found_in_the_order_of_their_numbers(tmp_path):
    root = filled(tmp_path, "checkpoint_9", "checkpoint_10", "checkpoint_007", "checkpoint_3x", "other", "checkpoint_")
    checkpoint(tmp_path / "checkpoint_11", whole=False)
    (tmp_path / "checkpoint_12").mkdir()
    (tmp_path / "checkpoint_13").touch()
    assert root.committed() == [
        (7, tmp_path / "checkpoint_007"),
        (9, tmp_path / "checkpoint_9"),
        (10, tmp_path / "checkpoint_10"),
    ]


def test_a_checkpoint_that_was_being_replaced_is_found_under_its_second_name(tmp_path):
    root = filled(tmp_path, "checkpoint_1", "checkpoint_1.replaced", "checkpoint_2.replaced")
    assert root.committed() == [(1, tmp_path / "checkpoint_1"), (2, tmp_path / "checkpoint_2.replaced")]


def test_nothing_is_found_where_nothing_is(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        root = CheckpointRoot(folder)
        assert root.committed() == []
        assert root.next() == 0
        assert root.next(5) == 5
        root.retain(1)


def test_the_next_number_comes_after_every_one_that_is_there(tmp_path):
    root = filled(tmp_path, "checkpoint_3", "x_checkpoint_90")
    assert root.next() == 4
    assert root.next(4) == 4
    assert root.next(8) == 8
    (tmp_path / "checkpoint_12.tmp").mkdir()
    assert root.next(8) == 13


def test_a_number_is_below_the_folder_wherever_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CheckpointRoot(tmp_path.__class__("c")).numbered(4) == tmp_path / "c" / "checkpoint_4"


@pytest.mark.parametrize(
    ("keep", "left"), [(None, 4), (9, 4), (4, 4), (3, 3), (2, 2), (1, 1), (0, 1), (-1, 1)], ids=str
)
def test_the_newest_stay_and_older_ones_go(tmp_path, keep, left, monkeypatch):
    synced = []
    monkeypatch.setattr(layout, "sync_directory", synced.append)
    root = filled(tmp_path, *(f"checkpoint_{number}" for number in (8, 9, 10, 11)))
    checkpoint(tmp_path / "checkpoint_4", whole=False)
    every = [tmp_path / f"checkpoint_{number}" for number in (8, 9, 10, 11)]
    root.retain(keep)
    assert [path for _, path in root.committed()] == every[4 - left :]
    assert (tmp_path / "checkpoint_4").exists(), "of an interrupted save by another program: it is not ours to remove"
    assert len(names(tmp_path)) == left + 1
    assert synced == [tmp_path] * (4 - left)


def test_an_old_checkpoint_is_none_any_more_before_its_files_go(tmp_path, monkeypatch):
    root = filled(tmp_path, "checkpoint_1", "checkpoint_2", "checkpoint_1.tmp")
    events, remove = [], layout.remove_tree

    def removed(path):
        events.append((path.name, path.exists(), [number for number, _ in root.committed()]))
        remove(path)

    monkeypatch.setattr(layout, "remove_tree", removed)
    root.retain(1)
    assert events == [("checkpoint_1.tmp", True, [1, 2]), ("checkpoint_1.tmp", True, [2])]
    assert names(tmp_path) == ["checkpoint_2"]


def test_what_interrupted_saves_left_goes_and_nothing_else(tmp_path):
    mark = f".orc-shared-{'0a' * 8}-12"
    kept = ["checkpoint_1", "checkpoint_5.replaced", "checkpoint_6.bak", "x.tmp", "checkpoint_.tmp", f"{mark}x"]
    left = [
        "checkpoint_2.tmp",
        "checkpoint_2.site-0.tmp",
        "checkpoint_3.replaced.tmp",
        "checkpoint_1.replaced",
    ]
    filled(tmp_path, *kept, *left)
    (tmp_path / mark).touch()
    (tmp_path / f"{FILE}-notes").write_text("mine")
    CheckpointRoot(tmp_path).retain(None)
    assert names(tmp_path) == sorted([*kept, f"{FILE}-notes"])


def test_what_dead_runs_owned_is_forgotten_where_the_checkpoints_are(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(layout, "forget_dead", asked.append)
    monkeypatch.chdir(tmp_path)
    CheckpointRoot(tmp_path.__class__("c")).retain(None)
    assert asked == [tmp_path / "c"]


def test_only_a_numbered_name_has_a_number(tmp_path):
    assert number_of(tmp_path / "checkpoint_12") == 12
    assert number_of(tmp_path / "checkpoint_12.replaced") == 12
    assert number_of(tmp_path / "checkpoint_12.tmp") is None
    assert number_of(tmp_path / "my_checkpoint_12") is None


def test_files_have_their_documented_names():
    assert [layout.numbered("optimizer", index, "bin") for index in (0, 1, 10)] == [
        "optimizer.bin",
        "optimizer_1.bin",
        "optimizer_10.bin",
    ]
    assert [layout.model_file(index) for index in (0, 1)] == ["model.safetensors", "model_1.safetensors"]
    assert [layout.model_file(index, False) for index in (0, 1)] == ["pytorch_model.bin", "pytorch_model_1.bin"]
    assert [layout.random_states_file(rank) for rank in (0, 3)] == ["random_states_0.pkl", "random_states_3.pkl"]
