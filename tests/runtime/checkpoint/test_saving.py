"""The parts of a save: what the ranks agree on, what is written, and which error ends it where."""

import io
import re
import threading
import time
from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors

from orc.runtime.checkpoint import save
from orc.runtime.checkpoint.errors import CheckpointError, RanksElsewhere
from orc.runtime.checkpoint.format import state_file
from orc.runtime.checkpoint.format.layout import CheckpointRoot, Manifest, read_manifest
from orc.runtime.checkpoint.replication.barrier import attempt
from orc.runtime.checkpoint.replication.sites import Sites
from orc.runtime.checkpoint.save import (
    Progress,
    Save,
    SaveRequest,
    _check_loadable,
    _without_tensors,
    _write_weights,
    looks,
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


def context(**changes):
    facts = {"rank": 0, "world_size": 1, "is_main": True, "is_local_main": True, "compute": TORCH}
    return SimpleNamespace(**facts | {"device": torch.device("cpu")} | changes)


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
    return SaveRequest(directory, root, at_least, Progress(7, 1, 20, ((0.5, 3.0),)), **options)


def opened(asked, table=None, where=None, **facts):
    """A save that is open, of nothing."""
    made = Save(context(**facts), table or Table(), Prepared(), asked)
    made.open(where or survey())
    return made


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
    table, where, root = Table(save_state=[[None, 9, None], [None, None, None]]), survey(), CheckpointRoot(tmp_path)
    made = opened(request(root=root, at_least=2), table, where)
    assert made.destination.target == tmp_path / "checkpoint_9"
    assert table.brought == [[None, 4, None], None]
    assert table.log == [("save_state", None), ("save_state (making the directory)", None)]
    assert where.asked == [(tmp_path, "save_state")]
    assert re.fullmatch("[0-9a-f]{16}", made.id)
    assert (made._created_at, made.sites) == (55.5, ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, "checkpoint_3", "checkpoint_9.tmp"]
    assert [path.name for path in (tmp_path / "checkpoint_9.tmp").iterdir()] == [f".saving-{made.id}"]
    higher = opened(request(root=root, at_least=12))
    assert higher.destination.target == tmp_path / "checkpoint_12"
    assert higher.id != made.id
    table = Table(save_state=[[None, 2, None]])
    assert opened(request(root=root), table, is_local_main=False).destination.target == tmp_path / "checkpoint_2"
    assert table.brought[0] == [None, None, None], "one rank of a machine looks"


def test_what_kept_one_from_looking_is_told(tmp_path):
    (tmp_path / "file").touch()
    text = said(lambda: opened(request(root=CheckpointRoot(tmp_path / "file"))))
    assert text == f"NotADirectoryError: [Errno 20] Not a directory: '{tmp_path}/file'"


def test_a_directory_is_the_one_that_was_asked_for_wherever_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, where = Table(), survey()
    made = opened(request(tmp_path.__class__("a/s")), table, where)
    assert made.destination.target == tmp_path / "a" / "s"
    assert where.asked == [(tmp_path / "a", "save_state")]
    assert table.brought[0] == ["a/s", None, None]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"{FILE}-s", "s.tmp"]
    text = said(lambda: opened(request(tmp_path.__class__("a")), Table(save_state=[["b", None, None]])))
    assert text == "save_state was called with different directories on different ranks: ['a', 'b']"
    with pytest.raises(RanksElsewhere) as told:
        opened(request(tmp_path / "c"), Table(save_state=[[None, 1, None], [None, None, None]]))
    assert told.value.reasons == dict.fromkeys((1, 2), "saves to the next numbered checkpoint")


def test_a_rank_of_a_site_prepares_it_where_it_leads(tmp_path):
    for rank, made in ((1, ["s.site-1.tmp"]), (2, [])):
        folder = tmp_path / str(rank)
        where = opened(request(folder / "s"), where=survey(Sites(rank, (0, 1, 1))), rank=rank).destination
        assert where.leads == bool(made)
        assert [path.name for path in folder.glob("*.tmp")] == made
        assert where.path() == folder / "s.site-1.tmp"


def test_a_place_that_cannot_be_prepared_is_given_up_on_all_ranks(tmp_path):
    (tmp_path / "s").touch()
    text = said(lambda: opened(request(tmp_path / "s")))
    assert text == f"{tmp_path}/s is a file; a checkpoint is a directory"
    table = Table(**{"save_state (making the directory)": ["disk full"]})
    assert said(lambda: opened(request(tmp_path / "t"), table)) == "rank 1: disk full"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_objects_get_a_prefix_where_a_checkpoint_is(memory_store):
    bucket = Remote("memory://bucket")
    first = opened(request(bucket / "s")).destination
    assert first.create("a") is not None
    assert first._prefix == ""
    (bucket / "s" / "manifest.json").replace(b"{}")
    table = Table()
    second = opened(request(bucket / "s"), table, rank=1, world_size=3, is_main=False)
    assert second.destination._prefix == f".{second.id}-"
    assert (first.leads, second.destination.leads) == (True, False)
    assert second.sites == Sites(1, (0, 0, 0))
    assert table.log[1] == ("save_state", None)
    third = opened(request(root=RemoteRoot(bucket), at_least=5)).destination
    assert third.target == bucket / "checkpoint_5"
    assert isinstance(third, RemoteDestination)


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


def collected(prepared, directory, asked=None, stage=None, leads=True, **facts):
    """A save of *prepared* to *directory* whose states are collected."""
    made = Save(context(**facts), Table(), prepared, asked or request())
    made.destination = LocalDestination(directory, "t", True, None)
    made.destination.prepare()
    made.destination.leads = leads
    made.collect(stage)
    return made


def parts():
    return Prepared(
        models=[torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)],
        optimizers=[State({"o": 0}), State({"o": 1})],
        schedulers=[State({"s": 0}), State({"s": 1})],
        dataloaders=[State({"l": 0}), State({"l": 1})],
        scaler=State({"scale": 2.0}),
        custom=[State({"c": 0}), State({"c": 1})],
    )


SHARED = [
    *("optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", "sampler.bin", "sampler_1.bin"),
    *("scaler.pt", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"),
]


def content_of(task):
    memory = io.BytesIO()
    task(memory)
    memory.seek(0)
    return state_file.read(memory)


def test_everything_prepared_is_collected_under_its_name(tmp_path):
    tasks = collected(parts(), tmp_path / "s", rank=3).tasks
    assert list(tasks) == ["model.safetensors", "model_1.safetensors", *SHARED, "random_states_3.pkl"]
    for name, expected in zip(SHARED, [*({k: i} for k in "osl" for i in (0, 1)), {"scale": 2.0}], strict=False):
        assert content_of(tasks[name]) == expected
    pickles = collected(parts(), tmp_path / "t", request(safe=False)).tasks
    assert list(pickles)[:2] == ["pytorch_model.bin", "pytorch_model_1.bin"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_written_as_they_were_asked_for_under_the_names_of_the_model(tmp_path, safe, compiled):
    model = torch.nn.Linear(2, 2)
    prepared = Prepared(models=[torch.compile(model) if compiled else model])
    tasks = collected(prepared, tmp_path / "s", request(safe=safe)).tasks
    with open(tmp_path / "w", "wb+") as file:
        tasks["model.safetensors" if safe else "pytorch_model.bin"](file)
        file.seek(0)
        found = load_tensors(file.read()) if safe else state_file.read(file)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }


def test_a_rank_that_does_not_lead_brings_its_generators_alone(tmp_path):
    seen = []
    hook = lambda models, weights, directory: seen.append((len(models), len(weights), directory))  # noqa: E731
    made = collected(parts(), tmp_path / "s", request(hooks=[hook]), leads=False, rank=1)
    assert list(made.tasks) == ["random_states_1.pkl"]
    assert seen == [(2, 2, str(tmp_path / "s"))]


def test_what_keeps_a_rank_from_collecting_is_brought_to_the_barrier(tmp_path):
    made = Save(context(), Table(), parts(), request())
    made.destination = LocalDestination(tmp_path / "s", "t", True, None)
    made.collect()
    assert made.error.startswith(f"{tmp_path}/s.tmp was made by another rank")
    own = State({"function": print})
    for kind, name in (("custom", "custom_checkpoint_0.pkl"), ("schedulers", "scheduler.bin")):
        made = collected(Prepared(**{kind: [own]}), tmp_path / kind)
        assert made.error.startswith(f"{name} could not be")
        assert made.tasks == {}
    # Of what only this program's own classes can hold no trial is made.
    made = collected(Prepared(optimizers=[own], dataloaders=[own], scaler=own), tmp_path / "t")
    assert list(made.tasks) == ["optimizer.bin", "sampler.bin", "scaler.pt", "random_states_0.pkl"]


def test_what_goes_on_changing_is_copied_first_and_what_xla_has_is_fetched(tmp_path):
    taken, fetched = [], []

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

    made = collected(parts(), tmp_path / "s", stage=Stage(), compute=Xla())
    assert [len(weights) for weights, *_ in (*taken, *fetched)] == [2, 2]
    assert [[name for name, _, _ in states] for _, states, *_ in (*taken, *fetched)] == [SHARED, SHARED]
    assert content_of(made.tasks["random_states_0.pkl"])["xla"] == 7


# What is written


def put(content, file):
    file.write(content)


def fail(error, file):
    file.write(b"half")
    raise error


def ready(directory, tasks=None, asked=None, *, sites=ALONE, destination=None, error=None, **facts):
    """A save to *directory* that has collected *tasks*, or an *error*."""
    made = Save(context(**facts), Table(), Prepared(), asked or request(directory))
    numbered = directory.name.startswith("checkpoint_")
    made.destination = destination or LocalDestination(directory, "t", sites.leads, None, numbered=numbered)
    if destination is None:
        made.destination.prepare()
    made.sites, made.id, made._created_at, made.tasks, made.error = sites, "0af3", 5.5, tasks or {}, error
    return made


def test_a_save_is_written_and_agreed_on_step_by_step(tmp_path):
    table, kept = Table(), []
    root = SimpleNamespace(retain=lambda keep: kept.append((keep, (tmp_path / "checkpoint_0").exists())))
    tasks = {"a": partial(put, b"1"), "b": partial(put, b"22")}
    ready(tmp_path / "checkpoint_0", tasks, request(root=root, keep=3, alone=True), rank=2).write(table)
    steps = [("save_state (committing)", 3600.0), ("save_state (retention)", 3600.0)]
    assert table.log == [("save_state (writing)", 3600.0), *steps]
    assert kept == [(3, True)]
    manifest = read_manifest(tmp_path / "checkpoint_0")
    assert {name: record.size for name, record in manifest.files.items()} == {"a": 1, "b": 2}
    made_of = ("0af3", 7, 1, 20, 1, 5.5, manifest.files)
    assert manifest == Manifest(*made_of, random_states=(2,), norms=((0.5, 3.0),))
    assert (table.brought[0]["error"], table.brought[0]["site"]) == (None, 0)
    assert table.brought[0]["files"]["a"] == {"size": 1, "sum": manifest.files["a"].sum}
    table = Table()
    table.timeout_s = 9000.0  # the slowest disk is waited for as long as was asked
    ready(tmp_path / "s").write(table)
    assert table.log == [("save_state (writing)", 9000.0), *steps]


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ({}, "no such thing", "no such thing"),
        ({"a": partial(put, b"1"), "b": partial(fail, OverflowError("long"))}, None, "OverflowError: long"),
        ({"a": partial(fail, CheckpointError("my words"))}, None, "my words"),
        ({}, None, "rank 1: disk full"),
    ],
)
def test_what_one_rank_could_not_write_ends_the_save_on_all(tmp_path, tasks, error, message):
    others = [{"error": "disk full", "site": 0, "files": {}}] if message.startswith("rank 1") else []
    table = Table(**{"save_state (writing)": others})
    assert said(lambda: ready(tmp_path / "s", tasks, error=error).write(table)) == message
    assert [what for what, _ in table.log] == ["save_state (writing)"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("seal", ["seal"]),
        ("fence", ["seal", "fence"]),
        ("commit", ["seal", "fence", "commit 0af3"]),
        ("clear", ["seal", "fence", "commit 0af3", "clear"]),
        (None, []),
    ],
)
def test_what_keeps_the_leader_from_committing_is_told(tmp_path, monkeypatch, failing, expected):
    events = []

    def step(name, *manifest):
        events.append(f"{name} {manifest[0].id}" if name == "commit" else name)
        if name == failing:
            raise CheckpointError(f"cannot {name}")

    class Place(LocalDestination):
        seal, commit, clear = partial(step, "seal"), partial(step, "commit"), partial(step, "clear")

    monkeypatch.setattr(save, "refuse_superseded", lambda: step("fence"))
    destination = Place(tmp_path / "s", "t", failing is not None, None)
    destination.prepare()
    table, made = Table(), ready(tmp_path / "s", destination=destination)
    if failing is None:  # a rank that does not lead
        made.write(table)
        assert table.brought[1:] == [None, None]
    else:
        assert said(lambda: made.write(table)).endswith(f"cannot {failing}")
        last = "retention" if failing == "clear" else "committing"
        assert table.log[-1] == (f"save_state ({last})", 3600.0)
    assert events == expected


def test_several_sites_complete_each_other_before_any_commits(tmp_path, monkeypatch):
    sites, asked, tasks = Sites(0, (0, 1)), [], {"a": partial(put, b"1")}
    others = {"save_state (writing)": [{"error": None, "site": 1, "files": {}}]}

    def complete(barrier, where, destination):
        asked.append((barrier, where, destination))
        (destination.path() / "b").write_bytes(b"22")
        return {"b": FileRecord(2, 5)}

    monkeypatch.setattr(save, "complete", complete)
    table, made = Table(**others), ready(tmp_path / "s", tasks, sites=sites, world_size=2)
    made.write(table)
    assert asked == [(table, sites, made.destination)]
    assert table.log[1] == ("save_state (sealing)", 3600.0)
    assert sorted(read_manifest(tmp_path / "s").files) == ["a", "b"]

    def broken(*_):
        raise CheckpointError("no link")

    monkeypatch.setattr(save, "complete", broken)
    table = Table(**others)
    assert said(lambda: ready(tmp_path / "t", tasks, sites=sites).write(table)) == "no link"
    assert table.log[-1] == ("save_state (sealing)", 3600.0)
    assert not (tmp_path / "t").exists()


def test_old_checkpoints_that_cannot_go_are_told_with_the_new_one_complete(tmp_path):
    def retain(keep):
        raise PermissionError(13, "Permission denied")

    root = SimpleNamespace(retain=retain)
    assert said(lambda: ready(tmp_path / "checkpoint_0", asked=request(root=root)).write(Table())) == (
        f"{tmp_path}/checkpoint_0 is complete, but older checkpoints could not be removed: "
        "PermissionError: [Errno 13] Permission denied"
    )
    assert read_manifest(tmp_path / "checkpoint_0").id == "0af3"
    ready(tmp_path / "s", asked=request(tmp_path / "s", root)).write(Table())


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    def whole(prepared):
        made = Save(context(), Table(), prepared, request(tmp_path / "s"))
        made.open(survey())
        made.collect()
        made.write(Table(), 1)

    text = said(lambda: whole(Prepared(custom=[State({"function": print})])))
    assert text.startswith("custom_checkpoint_0.pkl could not be loaded again")
    assert list(tmp_path.iterdir()) == []
    whole(Prepared())
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
    destination = ready(tmp_path / "s").destination
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
