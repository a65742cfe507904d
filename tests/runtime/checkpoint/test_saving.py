"""The parts of a save: what the ranks agree on, what is written, and which error ends it where."""

import io
import re
import threading
import time
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors

from orc.runtime.checkpoint import save
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import state_file
from orc.runtime.checkpoint.format.layout import CheckpointRoot, Manifest, read_manifest
from orc.runtime.checkpoint.replication.barrier import attempt
from orc.runtime.checkpoint.replication.sites import Sites
from orc.runtime.checkpoint.save import (
    Opened,
    Progress,
    SaveRequest,
    _check_loadable,
    _without_tensors,
    _write_weights,
    capture,
    looks,
    open_destination,
    write,
)
from orc.runtime.checkpoint.state import ownership
from orc.runtime.checkpoint.state.ownership import FILE
from orc.runtime.checkpoint.storage.destination import LocalDestination, RemoteDestination
from orc.runtime.checkpoint.storage.durable import FileRecord, Hashing
from orc.runtime.checkpoint.storage.remote import Remote, RemoteRoot
from orc.runtime.core.compute import TORCH, Compute
from orc.runtime.core.prepared import Prepared

ALONE = Sites(0, (0,))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A process that holds no folder."""
    monkeypatch.setattr(ownership, "_held", {})
    yield
    ownership.release_all()


@pytest.fixture
def bucket():
    """An empty bucket of the memory file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield Remote("memory://bucket")
    system.store.clear()


def context(**changes):
    facts = {
        "rank": 0,
        "world_size": 1,
        "is_main": True,
        "is_local_main": True,
        "compute": TORCH,
        "device": torch.device("cpu"),
    }
    return SimpleNamespace(**facts | changes)


class Table:
    """A barrier where this rank sits with *others*, who bring what `others` says of each question."""

    timeout_s = 600.0

    def __init__(self, **others):
        self.others, self.log, self.brought = others, [], []

    def hold(self, what, value, verdict, *, timeout_s=None, absence=None):
        self.log.append((what, timeout_s))
        self.brought.append(value)
        return verdict([value, *self.others.get(what, [])])


def survey(sites=ALONE):
    asked = []

    def at(directory, what):
        asked.append((directory, what))
        return sites

    return SimpleNamespace(at=at, asked=asked)


def request(directory=None, root=None, at_least=0, **options):
    return SaveRequest(directory, root, at_least, Progress(7, 1, 20), **options)


nothing = Prepared


def said(act):
    with pytest.raises(CheckpointError) as told:
        act()
    return str(told.value)


class State:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


# What the ranks agree on


def test_a_numbered_save_goes_after_what_any_machine_has(tmp_path, monkeypatch):
    (tmp_path / "checkpoint_3").mkdir()
    monkeypatch.setattr(time, "time", lambda: 55.5)
    table, where = Table(save_state=[[None, 9, None], [None, None, None]]), survey()
    opened = open_destination(context(), table, where, request(root=CheckpointRoot(tmp_path), at_least=2))
    assert opened.destination.target == tmp_path / "checkpoint_9"
    assert table.brought == [[None, 4, None], None]
    assert table.log == [("save_state", None), ("save_state (making the directory)", None)]
    assert where.asked == [(tmp_path, "save_state")]
    assert re.fullmatch("[0-9a-f]{16}", opened.id)
    assert (opened.created_at, opened.sites) == (55.5, ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, "checkpoint_3", "checkpoint_9.tmp"]
    assert [path.name for path in (tmp_path / "checkpoint_9.tmp").iterdir()] == [f".saving-{opened.id}"]
    higher = open_destination(context(), Table(), survey(), request(root=CheckpointRoot(tmp_path), at_least=12))
    assert higher.destination.target == tmp_path / "checkpoint_12"
    assert higher.id != opened.id


def test_a_rank_that_need_not_look_does_not(tmp_path):
    (tmp_path / "checkpoint_3").mkdir()
    table = Table(save_state=[[None, 2, None]])
    root = CheckpointRoot(tmp_path)
    opened = open_destination(context(is_local_main=False), table, survey(), request(root=root))
    assert opened.destination.target == tmp_path / "checkpoint_2"
    assert table.brought[0] == [None, None, None]


def test_what_kept_one_from_looking_is_told(tmp_path):
    (tmp_path / "file").touch()
    root = CheckpointRoot(tmp_path / "file")
    text = said(lambda: open_destination(context(), Table(), survey(), request(root=root)))
    assert text == f"NotADirectoryError: [Errno 20] Not a directory: '{tmp_path}/file'"


def test_a_directory_is_the_one_that_was_asked_for_wherever_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, where = Table(), survey()
    opened = open_destination(context(), table, where, request(tmp_path.__class__("a/s")))
    assert opened.destination.target == tmp_path / "a" / "s"
    assert where.asked == [(tmp_path / "a", "save_state")]
    assert table.brought[0] == ["a/s", None, None]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"{FILE}-s", "s.tmp"]


def test_different_directories_are_refused(tmp_path):
    table = Table(save_state=[["b", None, None]])
    text = said(lambda: open_destination(context(), table, survey(), request(tmp_path.__class__("a"))))
    assert text == "save_state was called with different directories on different ranks: ['a', 'b']"


def test_a_rank_of_a_site_prepares_it_where_it_leads(tmp_path):
    for rank, made in ((1, ["s.site-1.tmp"]), (2, [])):
        sites = Sites(rank, (0, 1, 1))
        opened = open_destination(context(rank=rank), Table(), survey(sites), request(tmp_path / str(rank) / "s"))
        assert opened.destination.leads == bool(made)
        folder = tmp_path / str(rank)
        assert [path.name for path in folder.glob("*.tmp")] == made
        assert opened.destination.path() == folder / "s.site-1.tmp"


def test_a_place_that_cannot_be_prepared_is_given_up_on_all_ranks(tmp_path):
    (tmp_path / "s").touch()
    table = Table()
    text = said(lambda: open_destination(context(), table, survey(), request(tmp_path / "s")))
    assert text == f"{tmp_path}/s is a file; a checkpoint is a directory"
    table = Table(**{"save_state (making the directory)": ["disk full"]})
    text = said(lambda: open_destination(context(), table, survey(), request(tmp_path / "t")))
    assert text == "rank 1: disk full"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_objects_get_a_prefix_where_a_checkpoint_is(bucket):
    first = open_destination(context(), Table(), survey(), request(bucket / "s"))
    assert first.destination.create("a") is not None
    table = Table()
    assert first.destination._prefix == ""
    (bucket / "s" / "manifest.json").replace(b"{}")
    second = open_destination(context(rank=1, world_size=3, is_main=False), table, survey(), request(bucket / "s"))
    assert second.destination._prefix == f".{second.id}-"
    assert (first.destination.leads, second.destination.leads) == (True, False)
    assert second.sites == Sites(1, (0, 0, 0))
    assert table.log[1] == ("save_state", None)
    third = open_destination(context(), Table(), survey(), request(root=RemoteRoot(bucket), at_least=5))
    assert third.destination.target == bucket / "checkpoint_5"
    assert isinstance(third.destination, RemoteDestination)


def test_who_looks_is_one_per_machine_or_one_for_an_object_store(tmp_path):
    local, remote = CheckpointRoot(tmp_path), RemoteRoot(Remote("memory://bucket"))
    for main, local_main in ((True, False), (False, True)):
        here = context(is_main=main, is_local_main=local_main)
        assert (looks(here, local), looks(here, remote)) == (local_main, main)


def test_an_attempt_brings_its_result_or_the_text_of_its_error():
    def fail(error):
        raise error

    assert attempt(lambda: 3) == (3, None)
    assert attempt(lambda: fail(CheckpointError("my words"))) == (None, "my words")
    assert attempt(lambda: fail(KeyError("x"))) == (None, "KeyError: 'x'")
    with pytest.raises(KeyboardInterrupt):
        attempt(lambda: fail(KeyboardInterrupt()))


# What is collected


def opened(directory, sites=ALONE, **options):
    destination = LocalDestination(directory, "t", sites.leads, None, **options)
    destination.prepare()
    return Opened(destination, sites, "0af3", 5.5)


def parts():
    model = torch.nn.Linear(1, 1)
    return nothing(
        models=[model, torch.nn.Linear(1, 1)],
        optimizers=[State({"o": 0}), State({"o": 1})],
        schedulers=[State({"s": 0}), State({"s": 1})],
        dataloaders=[State({"l": 0}), State({"l": 1})],
        scaler=State({"scale": 2.0}),
        custom=[State({"c": 0}), State({"c": 1})],
    )


SHARED = [
    "optimizer.bin",
    "optimizer_1.bin",
    "scheduler.bin",
    "scheduler_1.bin",
    "sampler.bin",
    "sampler_1.bin",
    "scaler.pt",
    "custom_checkpoint_0.pkl",
    "custom_checkpoint_1.pkl",
]


def test_everything_prepared_is_collected_under_its_name(tmp_path):
    destination = opened(tmp_path / "s").destination
    content = capture(context(rank=3), parts(), request(), destination)
    assert list(content) == ["model.safetensors", "model_1.safetensors", *SHARED, "random_states_3.pkl"]
    pickles = capture(context(), parts(), request(safe=False), destination)
    assert list(pickles)[:2] == ["pytorch_model.bin", "pytorch_model_1.bin"]
    for name, expected in zip(SHARED, [*({k: i} for k in "osl" for i in (0, 1)), {"scale": 2.0}], strict=False):
        memory = io.BytesIO()
        content[name](memory)
        memory.seek(0)
        assert state_file.read(memory) == expected


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_written_as_they_were_asked_for_under_the_names_of_the_model(tmp_path, safe, compiled):
    model = torch.nn.Linear(2, 2)
    prepared = nothing(models=[torch.compile(model) if compiled else model])
    content = capture(context(), prepared, request(safe=safe), opened(tmp_path / "s").destination)
    with open(tmp_path / "w", "wb+") as file:
        content["model.safetensors" if safe else "pytorch_model.bin"](file)
        file.seek(0)
        found = load_tensors(file.read()) if safe else state_file.read(file)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_a_rank_that_does_not_lead_brings_its_generators_alone(tmp_path):
    destination, seen = opened(tmp_path / "s").destination, []
    destination.leads = False
    hook = lambda models, weights, directory: seen.append((len(models), len(weights), directory))  # noqa: E731
    content = capture(context(rank=1), parts(), request(hooks=[hook]), destination)
    assert list(content) == ["random_states_1.pkl"]
    assert seen == [(2, 2, str(tmp_path / "s"))]


def test_what_keeps_a_rank_from_collecting_is_brought_to_the_barrier(tmp_path):
    destination = LocalDestination(tmp_path / "s", "t", True, None)
    assert capture(context(), parts(), request(), destination).startswith(f"{tmp_path}/s.tmp was made by another rank")
    destination.prepare()
    unloadable = nothing(custom=[State({"function": print})])
    assert capture(context(), unloadable, request(), destination).startswith("custom_checkpoint_0.pkl could not be")
    unloadable = nothing(schedulers=[State({"function": print})])
    assert capture(context(), unloadable, request(), destination).startswith("scheduler.bin could not be")
    own = State({"function": print})  # of what only this program's own classes can hold no trial is made
    unlooked = nothing(optimizers=[own], dataloaders=[own], scaler=own)
    assert list(capture(context(), unlooked, request(), destination)) == [
        *("optimizer.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl")
    ]


def test_what_goes_on_changing_is_copied_first_and_what_xla_has_is_fetched(tmp_path):
    destination, taken, fetched = opened(tmp_path / "s").destination, [], []

    class Stage:
        def take(self, state):
            taken.append(state)
            return state

    class Xla(Compute):
        library = "torch_xla"

        def to_cpu(self, state):
            fetched.append(state)
            return state

        def rng_state(self):
            return 7

    content = capture(context(compute=Xla()), parts(), request(), destination, Stage())
    assert [len(weights) for weights, *_ in (*taken, *fetched)] == [2, 2]
    assert [[name for name, _, _ in states] for _, states, *_ in (*taken, *fetched)] == [SHARED, SHARED]
    memory = io.BytesIO()
    content["random_states_0.pkl"](memory)
    memory.seek(0)
    assert state_file.read(memory)["xla"] == 7


# What is written


def put(content, file):
    file.write(content)


def fail(error, file):
    file.write(b"half")
    raise error


def test_a_save_is_written_and_agreed_on_step_by_step(tmp_path):
    save_, table, kept = opened(tmp_path / "checkpoint_0", numbered=True), Table(), []
    content = {"a": partial(put, b"1"), "b": partial(put, b"22")}
    root = SimpleNamespace(retain=lambda keep: kept.append((keep, (tmp_path / "checkpoint_0").exists())))
    write(context(world_size=1), table, request(root=root, keep=3), save_, content)
    assert table.log == [
        ("save_state (writing)", 3600.0),
        ("save_state (committing)", 3600.0),
        ("save_state (retention)", 3600.0),
    ]
    assert kept == [(3, True)]
    manifest = read_manifest(tmp_path / "checkpoint_0")
    assert {name: record.size for name, record in manifest.files.items()} == {"a": 1, "b": 2}
    assert manifest == Manifest("0af3", 7, 1, 20, 1, 5.5, manifest.files)
    assert table.brought[0]["error"] is None
    assert table.brought[0]["site"] == 0
    assert table.brought[0]["files"]["a"] == {"size": 1, "sum": manifest.files["a"].sum}


def test_the_slowest_disk_is_waited_for_as_long_as_was_asked(tmp_path):
    table = Table()
    table.timeout_s = 9000.0
    write(context(), table, request(tmp_path / "s"), opened(tmp_path / "s"), {})
    assert table.log[:2] == [("save_state (writing)", 9000.0), ("save_state (committing)", 3600.0)]


def test_what_one_rank_could_not_write_ends_the_save_on_all(tmp_path):
    save_ = opened(tmp_path / "s")
    for content, message in [
        ("no such thing", "no such thing"),
        ({"a": partial(put, b"1"), "b": partial(fail, OverflowError("too long"))}, "OverflowError: too long"),
        ({"a": partial(fail, CheckpointError("my words"))}, "my words"),
    ]:
        table = Table()
        assert said(lambda: write(context(), table, request(tmp_path / "s"), save_, content)) == message  # noqa: B023
        assert [what for what, _ in table.log] == ["save_state (writing)"]
        assert not (tmp_path / "s").exists()
        for path in (tmp_path / "s.tmp").glob("[ab]"):
            path.unlink()
    table = Table(**{"save_state (writing)": [{"error": "disk full", "site": 0, "files": {}}]})
    assert said(lambda: write(context(), table, request(), save_, {})) == "rank 1: disk full"


def test_what_keeps_the_leader_from_committing_is_told(tmp_path, monkeypatch):
    events, failing = [], set()

    class Place(LocalDestination):
        def seal(self, manifest):
            events.append("seal")
            if "seal" in failing:
                raise CheckpointError("cannot seal")

        def commit(self, manifest):
            events.append("commit")
            raise CheckpointError("cannot commit")

    def superseded():
        events.append("fence")
        if "fence" in failing:
            raise CheckpointError("superseded")

    monkeypatch.setattr(save, "refuse_superseded", superseded)
    destination = Place(tmp_path / "s", "t", True, None)
    destination.prepare()
    for part, message, expected in [
        ("seal", "cannot seal", ["seal"]),
        ("fence", "superseded", ["seal", "fence"]),
        ("commit", "cannot commit", ["seal", "fence", "commit"]),
    ]:
        events.clear()
        failing.clear()
        failing.add(part)
        table = Table()
        text = said(lambda: write(context(), table, request(), Opened(destination, ALONE, "a", 0.0), {}))  # noqa: B023
        assert text == message
        assert events == expected
        assert table.log[-1] == ("save_state (committing)", 3600.0)
    destination.leads = False
    events.clear()
    table = Table()
    write(context(), table, request(tmp_path / "s"), Opened(destination, ALONE, "a", 0.0), {})
    assert events == []
    assert table.brought[1:] == [None, None]


def test_several_sites_complete_each_other_before_any_commits(tmp_path, monkeypatch):
    sites, asked = Sites(0, (0, 1)), []

    def complete(barrier, where, destination):
        asked.append((barrier, where, destination))
        (destination.path() / "b").write_bytes(b"22")
        return {"b": FileRecord(2, 5)}

    monkeypatch.setattr(save, "complete", complete)
    save_ = opened(tmp_path / "s", sites)
    table = Table(**{"save_state (writing)": [{"error": None, "site": 1, "files": {}}]})
    write(context(world_size=2), table, request(tmp_path / "s"), save_, {"a": partial(put, b"1")})
    assert asked == [(table, sites, save_.destination)]
    assert table.log[1] == ("save_state (sealing)", 3600.0)
    assert sorted(read_manifest(tmp_path / "s").files) == ["a", "b"]

    def broken(*_):
        raise CheckpointError("no link")

    monkeypatch.setattr(save, "complete", broken)
    save_ = opened(tmp_path / "t", sites)
    table = Table(**{"save_state (writing)": [{"error": None, "site": 1, "files": {}}]})
    assert said(lambda: write(context(), table, request(), save_, {"a": partial(put, b"1")})) == "no link"
    assert table.log[-1] == ("save_state (sealing)", 3600.0)
    assert not (tmp_path / "t.tmp" / "manifest.json").exists()


def test_old_checkpoints_that_cannot_go_are_told_with_the_new_one_complete(tmp_path):
    def retain(keep):
        raise PermissionError(13, "Permission denied")

    root = SimpleNamespace(retain=retain)
    save_ = opened(tmp_path / "checkpoint_0", numbered=True)
    assert said(lambda: write(context(), Table(), request(root=root), save_, {})) == (
        f"{tmp_path}/checkpoint_0 is complete, but older checkpoints could not be removed: "
        "PermissionError: [Errno 13] Permission denied"
    )
    assert read_manifest(tmp_path / "checkpoint_0").id == "0af3"
    write(context(), Table(), request(tmp_path / "s", root), opened(tmp_path / "s"), {})


def whole_save(prepared, request):
    destination, finish = save.begin(context(), Table(), survey(), prepared, request)
    finish(Table(), 1)
    return destination


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    prepared = nothing(custom=[State({"function": print})])
    text = said(lambda: whole_save(prepared, request(tmp_path / "s")))
    assert text.startswith("custom_checkpoint_0.pkl could not be loaded again")
    assert list(tmp_path.iterdir()) == []
    where = whole_save(nothing(), request(tmp_path / "s"))
    assert where.target == tmp_path / "s"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_files_are_written_side_by_side_unless_no_thread_may_start(tmp_path, writers):
    threads = {}

    def note(name, file):
        threads[name] = threading.current_thread()
        if writers > 1:
            barrier.wait(10)
        file.write(name.encode())

    names = ["c", "aa", "b", "dddd", "ee", "f"]
    barrier = threading.Barrier(writers)
    destination = opened(tmp_path / "s").destination
    tasks = {name: partial(note, name) for name in names}
    records = save._write(destination, tasks, writers)
    assert list(records) == names
    assert [record.size for record in records.values()] == [1, 2, 1, 4, 2, 1]
    assert len(set(threads.values())) == writers, "and not more"
    assert (threading.main_thread() in threads.values()) == (writers == 1)


@pytest.mark.parametrize("writers", [1, 4])
def test_a_file_that_fails_is_given_up_with_the_reason(tmp_path, writers):
    given_up = []

    class Unfinished(Hashing):
        def abandon(self):
            given_up.append(self)
            raise OSError(28, "No space left on device")

    destination = SimpleNamespace(create=lambda name: Unfinished())
    with pytest.raises(OSError, match="No space left"):
        save._write(destination, {"a": partial(fail, RuntimeError("torch says something else"))}, writers)
    assert len(given_up) == 1


# What is in the files


def test_weights_say_their_format_and_which_names_share_a_tensor(tmp_path):
    from safetensors import safe_open

    shared, own = torch.arange(3.0), torch.ones(2)
    for state, metadata in [
        ({"a": shared, "b": own}, {"format": "pt"}),
        ({"a": shared, "b": own, "c": shared}, {"format": "pt", "orc.aliases": '{"c": "a"}'}),
    ]:
        with open(tmp_path / "w", "wb") as file:
            _write_weights(state, file)
        with safe_open(tmp_path / "w", framework="pt") as found:
            assert found.metadata() == metadata
            assert {name: found.get_tensor(name).tolist() for name in found.keys()} == {  # noqa: SIM118 - no mapping
                "a": [0.0, 1.0, 2.0],
                "b": [1.0, 1.0],
            }


def test_what_could_not_be_loaded_again_is_told_by_its_name_and_reason():
    fine = {"n": np.float64(1), "t": torch.zeros(2), "a": [np.arange(3)], "o": OrderedDict(x=(1, "y", None))}
    assert _check_loadable("c.pkl", fine) is None
    text = said(lambda: _check_loadable("c.pkl", {"f": print}))
    start, reason, end = re.fullmatch(r"(.*?\()(.*)(\);.*)", text).groups()
    assert start == (
        "c.pkl could not be loaded again: its state_dict holds something else than tensors, arrays, numbers, strings, "
        "lists and dictionaries ("
    )
    assert end == "); return plain values, or allow the type with torch.serialization.add_safe_globals"
    assert reason
    assert reason == reason.strip()
    assert "\n" not in reason


def test_the_reason_is_the_last_line_or_the_kind_of_the_error(monkeypatch):
    for error, reason in [(KeyError(), "KeyError"), (ValueError("a\nb  "), "b"), (ValueError("a\n"), "ValueError")]:

        def refuse(*_, error=error):
            raise error

        monkeypatch.setattr(state_file, "read", refuse)
        assert f"dictionaries ({reason});" in said(lambda: _check_loadable("c.pkl", {}))


def test_tensors_and_arrays_need_not_be_tried():
    class Own(dict):
        pass

    class Special(torch.Tensor):
        pass

    special, own = torch.zeros(1).as_subclass(Special), Own(x=torch.zeros(1))
    assert _without_tensors(torch.zeros(1)) is None
    assert _without_tensors(torch.nn.Parameter(torch.zeros(1))) is None
    assert _without_tensors(np.zeros(1)) is None
    assert _without_tensors({"a": torch.zeros(1), "b": [np.zeros(1), 3], "c": (torch.zeros(1), "x")}) == {
        "a": None,
        "b": [None, 3],
        "c": [None, "x"],
    }
    assert _without_tensors(OrderedDict(a=torch.zeros(1))) == {"a": None}
    for whole in (special, own, 3):
        assert _without_tensors(whole) is whole
