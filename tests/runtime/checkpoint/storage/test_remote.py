"""Checkpoints on object stores: S3 as moto plays it, and fsspec's memory file system for all that fsspec serves."""

import json
import re
from collections import Counter
from concurrent.futures import thread as futures_thread

import pytest
import torch
from botocore.exceptions import ClientError

from orc.runtime import Accelerator, ProjectConfiguration
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format.layout import Manifest
from orc.runtime.checkpoint.storage import s3
from orc.runtime.checkpoint.storage.destination import RemoteDestination
from orc.runtime.checkpoint.storage.durable import FileRecord
from orc.runtime.checkpoint.storage.remote import Remote, RemoteRoot, place
from orc.runtime.core.context import reset_default


@pytest.fixture(params=["memory", "s3"])
def scheme(request):
    """The scheme of the URLs of `store`."""
    return request.param


@pytest.fixture
def store(request, scheme):
    """An empty store."""
    return request.getfixturevalue(f"{scheme}_store")


@pytest.fixture
def bucket(scheme, store):
    """The URL of a bucket of `store`."""
    return f"{scheme}://bucket"


def names(store, directory):
    return sorted(entry.rpartition("/")[2] for entry in store.ls(directory, detail=False))


def test_numbered_checkpoints_rotate_and_training_resumes_from_the_newest(store, bucket, make_run, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", f"{bucket}/run")
    monkeypatch.setenv("ORC_CHECKPOINT_KEEP", "2")
    run = make_run()
    for _ in range(3):
        path = run.run().accelerator.save_state()
    assert path == f"{bucket}/run/checkpoint_2"
    assert names(store, "bucket/run") == ["checkpoint_1", "checkpoint_2"]
    assert names(store, "bucket/run/checkpoint_2") == [
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


def test_the_project_folder_may_be_remote_and_saving_in_the_background(store, bucket, make_run):
    run = make_run(f"{bucket}/project")
    run.run().accelerator.save_state(block=False)
    run.accelerator.wait_for_checkpoint()
    expected = run.state()
    assert names(store, "bucket/project/checkpoints") == ["checkpoint_0"]
    run.run().accelerator.load_state()
    assert run.state() == expected


def test_a_directory_that_is_saved_again_holds_one_checkpoint_or_the_other_at_every_write(store, bucket, make_run):
    run = make_run()
    run.run().accelerator.save_state(f"{bucket}/last")
    first = run.state()
    run.run()
    second = run.state()
    found, system = [], type(store)

    def look(real):
        def operation(self, *args, **kwargs):
            result = real(self, *args, **kwargs)
            data = self.cat_file("bucket/last/manifest.json")
            manifest = Manifest.from_json(data)
            for name, record in manifest.files.items():
                assert self.info(f"bucket/last/{manifest.prefix}{name}")["size"] == record.size
            found.append(manifest.step)
            return result

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "pipe_file", "rm_file"):
            patch.setattr(system, name, look(getattr(system, name)))
        run.accelerator.save_state(f"{bucket}/last")
    assert found[0] == 6
    assert found[-1] == 12
    assert found == sorted(found)
    assert len(names(store, "bucket/last")) == 6  # the old files are gone
    run.run().accelerator.load_state(f"{bucket}/last")
    assert run.state() == second != first


def renamed(data, old, new, prefix=None):
    """The manifest *data*, in which a file is called *new*."""
    manifest = json.loads(data)
    manifest["files"][new] = manifest["files"].pop(old)
    if prefix is not None:
        manifest["prefix"] = prefix
    return json.dumps(manifest).encode()


@pytest.mark.parametrize("name", ["../../stolen", "{outside}/stolen", "a/../../../stolen", "..", "a\nb", "C:\\stolen"])
def test_a_manifest_writes_no_file_outside_of_its_directory(memory_store, make_run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp" / "tmp"))
    (tmp_path / "tmp" / "tmp").mkdir(parents=True)
    name = name.format(outside=tmp_path)
    run = make_run()
    run.run().accelerator.save_state("memory://bucket/last")
    path = "/bucket/last/manifest.json"
    memory_store.pipe_file(path, renamed(memory_store.cat_file(path), "scheduler.bin", name))
    memory_store.pipe_file(f"/bucket/last/{name}", memory_store.cat_file("/bucket/last/scheduler.bin"))
    with pytest.raises(CheckpointError, match=re.escape(f"{name!r} is not the relative name of a file")):
        run.accelerator.load_state("memory://bucket/last")
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == []


def test_a_manifest_names_no_other_objects_by_its_prefix(memory_store, make_run):
    run = make_run()
    run.run().accelerator.save_state("memory://bucket/last")
    path = "/bucket/last/manifest.json"
    memory_store.pipe_file(path, renamed(memory_store.cat_file(path), "scheduler.bin", "scheduler.bin", "../other/"))
    with pytest.raises(CheckpointError, match=r"'\.\./other/.*' is not the relative name of a file"):
        run.accelerator.load_state("memory://bucket/last")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("flip", r"optimizer\.bin does not hold what was saved"),
        ("cut", r"optimizer\.bin has 10 bytes instead of"),
        ("missing", r"optimizer\.bin is missing"),
        ("uncommitted", r"has no manifest\.json"),
    ],
)
def test_damage_is_found_before_anything_changes(store, bucket, make_run, damage, message):
    run = make_run()
    run.run().accelerator.save_state(f"{bucket}/s")
    before = run.run().state()
    path = "bucket/s/optimizer.bin"
    data = bytearray(store.cat_file(path))
    if damage == "flip":
        data[100] ^= 1
        store.pipe_file(path, bytes(data))
    elif damage == "cut":
        store.pipe_file(path, bytes(data[:10]))
    else:
        store.rm_file(path if damage == "missing" else "bucket/s/manifest.json")
    with pytest.raises(CheckpointError, match=message):
        run.accelerator.load_state(f"{bucket}/s")
    assert run.state() == before


def test_a_save_that_fails_leaves_nothing(store, bucket, make_run, monkeypatch):
    run = make_run()
    real = Remote.replace

    def fail(self, data):
        raise OSError("connection lost")

    monkeypatch.setattr(Remote, "replace", fail)
    with pytest.raises(CheckpointError, match="connection lost"):
        run.accelerator.save_state(f"{bucket}/s")
    assert Remote(f"{bucket}/s").entries() == []
    monkeypatch.setattr(Remote, "replace", real)
    run.accelerator.save_state(f"{bucket}/s")


def test_files_of_hooks_go_along(store, bucket, make_run):
    run, seen = make_run(), []

    def note(models, weights, directory):
        with open(f"{directory}/notes.txt", "w") as file:
            file.write("hello")

    def read(models, directory):
        with open(f"{directory}/notes.txt") as file:
            seen.append(file.read())

    run.accelerator.register_save_state_pre_hook(note)
    run.accelerator.register_load_state_pre_hook(read)
    run.accelerator.save_state(f"{bucket}/s")
    assert "notes.txt" in names(store, "bucket/s")
    run.accelerator.load_state(f"{bucket}/s")
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


@pytest.mark.distributed
def test_old_checkpoints_that_cannot_be_removed_do_not_cost_the_new_one(tmp_path, run_ranks):
    def work(root):
        def refuse(self, keep):
            raise PermissionError("nothing may be deleted here")

        RemoteRoot.retain = refuse
        accelerator = Accelerator(project_config=ProjectConfiguration(root, automatic_checkpoint_naming=True))
        accelerator.prepare(torch.nn.Linear(3, 3))
        with pytest.raises(CheckpointError, match="is complete, but older checkpoints could not be removed"):
            accelerator.save_state()
        accelerator.load_state()
        return True

    assert run_ranks(2, work, f"simplecache::file://{tmp_path}") == [True] * 2


@pytest.mark.parametrize("threads", [True, False])
def test_large_files_go_to_s3_in_parts_and_appear_at_their_end(s3_store, monkeypatch, threads):
    if not threads:  # as at the end of the interpreter
        monkeypatch.setattr(futures_thread, "_shutdown", True)
    monkeypatch.setattr(s3, "_PART", 5 * 2**20)  # the least that S3 takes
    data = bytes(range(256)) * 50_000  # 12.8 MB
    with_parts = s3_store.open("bucket/large", "wb")
    for start in range(0, len(data), 1_000_000):
        with_parts.write(memoryview(data)[start : start + 1_000_000])
    assert not s3_store.exists("bucket/large")
    with_parts.close()
    assert s3_store.cat_file("bucket/large") == data
    assert s3_store.cat_file("bucket/large", 10, 20) == data[10:20]
    assert s3_store.cat_file("bucket/large", len(data), len(data) + 5) == b""
    with s3_store.open("bucket/large", "rb") as source:
        assert source.read(10) + source.read() == data
    dropped = s3_store.open("bucket/dropped", "wb")
    dropped.write(memoryview(data))
    dropped.discard()
    assert not s3_store.exists("bucket/dropped")
    assert "Uploads" not in s3_store._client.list_multipart_uploads(Bucket="bucket")


def test_a_listing_of_s3_has_all_pages_and_no_neighbours(s3_store, monkeypatch):
    for name in ("run/a", "run/b/c", "run/b/d", "run-2/e", "run/f"):
        s3_store.pipe_file(f"bucket/{name}", b"x")
    assert Remote("s3://bucket/run").entries() == ["a", "b", "f"]
    Remote("s3://bucket/run").remove_tree()
    assert Remote("s3://bucket").entries() == ["run-2"]


def requests_of_commit_and_retention(store, files):
    """The requests of S3 that the commit of a checkpoint of so many *files* takes, and the retention of two before."""
    record, root = FileRecord(1, 0), RemoteRoot(Remote(f"s3://bucket/{files}"))
    manifest = Manifest("1", 0, 0, 0, 1, 0.0, {f"optimizer_0/{number}": record for number in range(files)})
    for number in range(3):
        for name in manifest.files:
            store.pipe_file(f"bucket/{files}/checkpoint_{number}/{name}", b"x")
        if number < 2:
            store.pipe_file(f"bucket/{files}/checkpoint_{number}/manifest.json", manifest.to_json())
    requests, events = [], store._client.meta.events
    events.register("before-send.s3", lambda event_name, **_: requests.append(event_name.rpartition(".")[2]), "count")
    newest = RemoteDestination(root.numbered(2), "", True)
    newest.take_over(manifest.files)
    newest.commit(manifest)
    root.retain(1)
    assert root.path.entries() == ["checkpoint_2"]
    events.unregister("before-send.s3", unique_id="count")
    return Counter(requests)


def test_requests_of_commit_and_retention_do_not_grow_with_the_files(s3_store):
    few, many = (requests_of_commit_and_retention(s3_store, files) for files in (3, 40))
    assert few == many
    lists = {"ListObjectsV2": 7}  # the root, three that may be complete, two to remove; and the last look of this test
    assert few == {"HeadObject": 1, "PutObject": 1, "GetObject": 3, "DeleteObject": 2, "DeleteObjects": 2, **lists}


def test_objects_go_one_by_one_where_s3_takes_no_list(s3_store, monkeypatch):
    for name in "abc":
        s3_store.pipe_file(f"bucket/run/{name}", b"x")
    refusal = {"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}

    def refuse(**_):
        raise ClientError(refusal, "DeleteObjects")

    monkeypatch.setattr(s3_store._client, "delete_objects", refuse)
    Remote("s3://bucket/run").remove_all(["a", "missing"])
    assert Remote("s3://bucket/run").entries() == ["b", "c"]
    Remote("s3://bucket/run").remove_tree()
    assert Remote("s3://bucket/run").entries() == []


@pytest.mark.parametrize("url", ["s3://nowhere/run", "s3:///run"])
def test_what_is_wrong_with_s3_is_said(s3_store, make_run, url):
    with pytest.raises(CheckpointError, match=r"s3://(nowhere.*The specified bucket does not exist|.*no bucket)"):
        make_run().accelerator.save_state(url)


def test_s3_without_boto3_names_it(s3_store, make_run, monkeypatch):
    import sys

    s3._client.cache_clear()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(CheckpointError, match=r"s3://bucket/s cannot be opened: .*pip install boto3"):
        make_run().accelerator.save_state("s3://bucket/s")


@pytest.mark.distributed
def test_all_ranks_write_to_and_read_from_s3(s3_store, run_ranks):
    def work(environment):
        import os

        os.environ.update(environment)
        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(3, 3))
        accelerator.save_state("s3://bucket/s")
        accelerator.load_state("s3://bucket/s")
        return True

    import os

    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert run_ranks(2, work, environment) == [True] * 2
    assert "manifest.json" in names(s3_store, "bucket/s")
