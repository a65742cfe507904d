"""Where a save puts its files: what is there after each part of it, and after each error."""

import os
from dataclasses import replace

import fsspec
import pytest

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import NAME, Manifest, read_manifest
from orc.runtime.checkpoint.state import ownership
from orc.runtime.checkpoint.state.ownership import FILE
from orc.runtime.checkpoint.storage import destination as module
from orc.runtime.checkpoint.storage.destination import LocalDestination, RemoteDestination
from orc.runtime.checkpoint.storage.durable import checksum
from orc.runtime.checkpoint.storage.remote import Remote
from orc.runtime.checkpoint.storage.remote import read_manifest as read_remote

MANIFEST = Manifest("a", 3, 0, 0, 1, 0.0)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that holds no folder."""
    monkeypatch.setattr(ownership, "_held", {})
    yield
    ownership.release_all()


def local(target, *, token="t", leads=True, site=None, **options):
    return LocalDestination(target, token, leads, site, **options)


def put(where, name, content):
    file = where.create(name)
    file.write(content)
    return file.close()


def saved(where, content, manifest=MANIFEST, hooks=()):
    """A whole save of one file."""
    where.prepare()
    for name in hooks:
        (where.hook_directory() / name).write_text(name)
    record = put(where, "model", content)
    manifest = replace(manifest, files={"model": record, **where.hook_files()})
    where.seal(manifest)
    where.commit(manifest)
    where.clear()
    return where


def names(directory):
    return sorted(os.listdir(directory))


def told(act):
    with pytest.raises(CheckpointError) as error:
        act()
    return str(error.value)


def test_a_directory_becomes_a_checkpoint_with_its_last_step(tmp_path):
    target = tmp_path / "runs" / "a" / "s"
    where = local(target)
    where.prepare()
    assert names(target.parent) == [f"{FILE}-s", "s.tmp"]
    assert names(target.parent / "s.tmp") == [".saving-t"]
    assert where.path() == target.parent / "s.tmp"
    where.check_visible()
    record = put(where, "model", b"weights")
    assert record == checksum(where.path() / "model")
    (where.path() / "notes").write_text("n")
    (where.path() / "logs").mkdir()
    assert where.present() == ["model", "notes"]
    assert where.hook_files() == {}
    where.seal(replace(MANIFEST, files={"model": record}))
    assert names(target.parent) == [f"{FILE}-s", "s.tmp"]
    where.commit(MANIFEST)
    assert names(target.parent) == ["s"]
    assert names(target) == ["logs", NAME, "model", "notes"]
    assert read_manifest(target) == replace(MANIFEST, files={"model": record, "notes": checksum(target / "notes")})


@pytest.mark.parametrize("before", [None, [], ["mine", "hook"]])
def test_hooks_write_where_the_script_named_it_and_become_part_of_the_checkpoint(tmp_path, before):
    target = tmp_path / "s"
    for name in before or []:
        target.mkdir(exist_ok=True)
        (target / name).write_text("before")
    if before == []:
        target.mkdir()
    where = local(target)
    where.prepare()
    hooks = where.hook_directory()
    assert hooks == target
    for name in ("hook", "model"):  # a name of the checkpoint's own is the checkpoint's
        (hooks / name).write_text("hooked now")
    (hooks / "unet").mkdir()
    record = put(where, "model", b"weights")
    where.seal(replace(MANIFEST, files={"model": record}))
    where.commit(MANIFEST)
    mine = set(before or [])
    assert names(tmp_path) == ["s"]
    assert set(names(target)) == {NAME, "model", "hook", "unet"} | mine
    assert ((target / "model").read_bytes(), (target / "hook").read_text()) == (b"weights", "hooked now")
    assert set(read_manifest(target).files) == {"model", "hook"}  # also what a killed save had left of them

    again = local(target)
    again.prepare()
    assert again.hook_directory() == again.path()  # the checkpoint stays whole
    again.abandon()
    assert "hook" in names(target)


@pytest.mark.parametrize("there", [False, True])
def test_a_failed_save_removes_only_directories_that_it_made_for_hooks(tmp_path, there):
    if there:
        (tmp_path / "s").mkdir()
    where = local(tmp_path / "s")
    where.prepare()
    (where.hook_directory() / "hook").touch()
    where.abandon()
    assert names(tmp_path) == (["s"] if there else [])


def test_hooks_of_numbered_checkpoints_and_of_sites_write_aside(tmp_path):
    for options in ({"numbered": True}, {"site": 1}):
        where = local(tmp_path / "checkpoint_0", **options)
        where.prepare()
        assert where.hook_directory() == where.path() != where.target
        where.abandon()


def test_the_folder_of_a_series_is_held_until_the_run_ends(tmp_path):
    for number in range(2):
        where = saved(local(tmp_path / f"checkpoint_{number}", numbered=True), b"x")
        where.abandon()
    assert names(tmp_path) == [FILE, "checkpoint_0", "checkpoint_1"]
    saved(local(tmp_path / "checkpoint_2", numbered=True, site=4), b"x")
    assert names(tmp_path) == [FILE, f"{FILE}-site-4", "checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_each_site_has_a_place_of_its_own(tmp_path):
    where = local(tmp_path / "s", site=2)
    where.prepare()
    assert names(tmp_path) == [f"{FILE}-s-site-2", "s.site-2.tmp"]
    where.abandon()
    assert names(tmp_path) == []


def test_places_where_no_checkpoint_can_be_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    for target in (folder, folder.parent, tmp_path):
        assert told(local(target).prepare) == (
            f"{target} is the current directory or above it; save to a directory of its own"
        )
    (folder / "file").touch()
    assert told(local(folder / "file").prepare) == f"{folder}/file is a file; a checkpoint is a directory"
    assert names(folder) == ["file"]


def test_what_an_interrupted_save_left_is_no_part_of_the_next(tmp_path):
    (tmp_path / "s.tmp" / "old").mkdir(parents=True)
    saved(local(tmp_path / "s"), b"x")
    assert names(tmp_path / "s") == [NAME, "model"]


def test_what_another_rank_prepared_must_be_seen(tmp_path):
    assert told(local(tmp_path / "s", leads=False).check_visible) == (
        f"{tmp_path}/s.tmp was made by another rank and cannot be seen from here: checkpoints of several machines need "
        "a directory that all of them share; where they have none, leave ORC_CHECKPOINT_SHARED at auto"
    )
    local(tmp_path / "s").prepare()
    local(tmp_path / "s", leads=False).check_visible()


def test_files_of_other_ranks_must_be_seen_before_anything_is_done(tmp_path):
    where = local(tmp_path / "s")
    where.prepare()
    record = put(where, "model", b"x")
    manifest = replace(MANIFEST, files={"z": record, "model": record, "b": record})
    assert told(lambda: where.seal(manifest)) == (
        f"b, z of other ranks cannot be seen in {tmp_path}/s.tmp from the rank that commits: checkpoints of several "
        "machines need a directory that all of them share; where they have none, leave ORC_CHECKPOINT_SHARED at auto"
    )
    assert names(tmp_path / "s.tmp") == [".saving-t", "model"]


def test_sites_that_share_a_directory_after_all_are_refused(tmp_path):
    first, second = local(tmp_path / "s", site=0), local(tmp_path / "s", site=1)
    other = local(tmp_path / "s", token="u", site=2)
    first.prepare()
    other.prepare()
    first.seal(MANIFEST)
    first.prepare()
    second.prepare()
    assert told(lambda: second.seal(MANIFEST)) == (
        f"a checkpoint was to be written on every machine, but several machines share {tmp_path}: turn "
        "save_on_each_node off, leave ORC_CHECKPOINT_SHARED at auto, or save to a local disk"
    )


def test_a_replaced_checkpoint_leaves_what_was_not_its_own(tmp_path, monkeypatch):
    saved(local(tmp_path / "s"), b"old", hooks=["notes"])
    (tmp_path / "s" / "mine").write_text("m")
    saved(local(tmp_path / "s"), b"new")
    assert names(tmp_path / "s") == [NAME, "mine", "model"]
    assert (tmp_path / "s" / "model").read_bytes() == b"new"
    (tmp_path / "s").rename(tmp_path / "s.replaced")
    saved(local(tmp_path / "s"), b"newer")
    assert names(tmp_path) == ["s"]
    assert names(tmp_path / "s") == [NAME, "mine", "model"]


def test_a_folder_that_another_run_took_gets_nothing(tmp_path, monkeypatch):
    where = local(tmp_path / "s")
    where.prepare()
    where.seal(MANIFEST)

    def taken(self):
        raise CheckpointError("taken over")

    monkeypatch.setattr(ownership.Ownership, "check", taken)
    assert told(lambda: where.commit(MANIFEST)) == "taken over"
    assert names(tmp_path) == [f"{FILE}-s", "s.tmp"]
    where.abandon()
    assert names(tmp_path) == []


def test_a_directory_into_which_another_rank_still_writes_is_removed_by_the_next_save(tmp_path, monkeypatch):
    where = local(tmp_path / "s")
    where.prepare()
    (where.path() / "late").touch()
    with monkeypatch.context() as busy:
        busy.setattr("os.rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(39, "Directory not empty")))
        where.abandon()
    assert names(tmp_path) == ["s.tmp"]
    again = local(tmp_path / "s")
    again.prepare()
    assert "late" not in names(again.path())
    again.abandon()
    assert names(tmp_path) == []


def test_only_the_rank_that_prepared_removes_what_was_prepared(tmp_path):
    where = local(tmp_path / "s")
    where.prepare()
    for other in (local(tmp_path / "s", leads=False), local(tmp_path / "s")):
        other.abandon()
        assert names(tmp_path) == [f"{FILE}-s", "s.tmp"]
    where.leads = False
    where.abandon()
    assert names(tmp_path) == [f"{FILE}-s", "s.tmp"]


@pytest.fixture
def bucket():
    """A bucket of the memory file system that is empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield Remote("memory://bucket")
    system.store.clear()


def test_objects_become_a_checkpoint_with_their_manifest(bucket):
    where = RemoteDestination(bucket / "s", "", True)
    where.prepare()
    assert bucket.entries() == ["s"]
    where.check_visible()
    assert "nothing://x cannot be opened" in told(RemoteDestination(Remote("nothing://x"), "", True).check_visible)
    record = put(where, "model", b"weights")
    assert (bucket / "s").entries() == ["model"]
    manifest = replace(MANIFEST, files={"model": record})
    where.commit(manifest)
    assert (bucket / "s").entries() == [NAME, "model"]
    assert read_remote(bucket / "s") == manifest
    where.abandon()
    assert (bucket / "s").entries() == [NAME, "model"]
    assert (where.leads, RemoteDestination(bucket, "", False).leads) == (True, False)


def test_a_replaced_object_goes_after_the_manifest_has_changed(bucket, monkeypatch):
    saved(RemoteDestination(bucket / "s", "", True), b"old", hooks=["notes"])
    saved(RemoteDestination(bucket / "s", ".1-", True), b"new", hooks=["notes"])
    assert (bucket / "s").entries() == [".1-model", ".1-notes", NAME]
    events, real = [], Remote.remove_all

    def removed(self, names):
        events.append((list(names), read_remote(bucket / "s").prefix))
        real(self, names)

    monkeypatch.setattr(Remote, "remove_all", removed)
    saved(RemoteDestination(bucket / "s", ".2-", True), b"newer")
    assert (bucket / "s").entries() == [".2-model", NAME]
    assert events == [([".1-model", ".1-notes"], ".2-")]
    assert read_remote(bucket / "s").prefix == ".2-"


def test_what_other_ranks_have_written_to_another_store_is_no_checkpoint(bucket):
    where = RemoteDestination(bucket / "s", ".1-", True)
    record = put(where, "model", b"weights")
    where.take_over(["model", "other"])
    assert told(lambda: where.commit(replace(MANIFEST, files={"model": record, "other": record}))) == (
        "memory://bucket/s does not hold other, which was just written to it"
    )
    assert (bucket / "s").entries() == [".1-model"]
    where.abandon()
    assert (bucket / "s").entries() == []


def test_files_of_hooks_are_uploaded_once_and_their_folder_goes(bucket):
    where = RemoteDestination(bucket / "s", ".1-", True)
    assert where.hook_files() == {}
    spool = where.hook_directory()
    assert where.hook_directory() == spool
    assert spool.name.startswith("orc-checkpoint-")
    for name in ("b", "a"):
        (spool / name).write_text(name)
    (spool / "folder").mkdir()
    expected = {name: checksum(spool / name) for name in "ab"}
    records = where.hook_files()
    assert records == expected
    assert list(records) == ["a", "b"]
    assert not spool.exists()
    assert where.hook_files() == {}
    assert (bucket / "s").entries() == [".1-a", ".1-b"]
    where.abandon()
    assert (bucket / "s").entries() == []


def test_a_failed_save_removes_the_folder_of_hooks_even_if_it_is_gone(bucket):
    for gone in (False, True):
        where = RemoteDestination(bucket / "s", "", True)
        spool = where.hook_directory()
        (spool / "a").touch()
        if gone:
            module.shutil.rmtree(spool)
        where.abandon()
        assert not spool.exists()
