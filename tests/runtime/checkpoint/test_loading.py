"""The parts of a load: what is verified by whom, which error is told where, and what goes into which place."""

import io
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import pytest
import torch
from safetensors.torch import save as save_tensors
from torch import nn

from orc.runtime.checkpoint import errors, load
from orc.runtime.checkpoint import verified as verifying
from orc.runtime.checkpoint.errors import CheckpointError, RankMissing
from orc.runtime.checkpoint.format import layout
from orc.runtime.checkpoint.format.layout import NAME, Manifest, read_manifest
from orc.runtime.checkpoint.state import rng
from orc.runtime.checkpoint.storage import copying
from orc.runtime.checkpoint.storage.copying import CopyQueue, placed, read_weights, unmapped, unpickle
from orc.runtime.checkpoint.storage.durable import FileRecord, write_file
from orc.runtime.checkpoint.storage.remote import Remote
from orc.runtime.checkpoint.verified import Verified, verified
from orc.runtime.core.compute import TORCH, Compute
from orc.runtime.core.prepared import Prepared
from orc.runtime.data.plan import PositionError
from orc.runtime.parallel.records import described

PATIENCE = 3600.0
CPU = torch.device("cpu")


def context(**changes):
    facts = {"rank": 0, "world_size": 1, "is_main": True, "is_local_main": True, "node_rank": 0}
    rank = changes.get("rank", 0)
    topology = SimpleNamespace(data_rank=rank, rng_source_rank=rank)
    return SimpleNamespace(**facts | {"compute": TORCH, "device": torch.device("cpu"), "topology": topology} | changes)


class Table:
    """A barrier where this rank sits with *others*, who bring what `others` says of each question."""

    timeout_s = 600.0

    def __init__(self, **others):
        self.others, self.log, self.brought = others, [], []

    def hold(self, what, value, verdict, *, timeout_s=None, absence=None):
        self.log.append((what, timeout_s))
        self.brought.append(value)
        return verdict([value, *self.others.get(what, [])])


nothing = Prepared


def said(act):
    with pytest.raises(CheckpointError) as told:
        act()
    return str(told.value)


def checkpoint(directory, **contents):
    """A whole checkpoint of files with these contents: bytes, or what torch.save takes."""
    directory.mkdir(parents=True, exist_ok=True)
    records = {}
    for name, content in contents.items():
        if isinstance(content, bytes):
            records[name] = write_file(directory / name, content)
        else:
            torch.save(content, directory / name)
            records[name] = FileRecord((directory / name).stat().st_size, 0)
    manifest = Manifest("0af3", 7, 1, 20, 1, 5.5, records)
    (directory / NAME).write_bytes(manifest.to_json())
    return manifest


class Holder:
    """A registered object."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


# Verifying


def test_the_ranks_share_out_the_files(tmp_path, monkeypatch):
    manifest, asked = checkpoint(tmp_path / "c", e=b"1", d=b"2", c=b"3", b=b"4", a=b"5"), []

    def contents(directory, given, names):
        asked.append((directory, given, list(names)))
        return []

    monkeypatch.setattr(layout, "content_problems", contents)
    for rank in range(3):
        table = Table(**{"load_state (verifying)": [None, None]})
        with verified(context(rank=rank, world_size=3), table, tmp_path / "c") as found:
            assert found.manifest == manifest
        assert table.log == [("load_state (verifying)", PATIENCE)]
        assert table.brought == [None]
    assert asked == [(tmp_path / "c", manifest, names) for names in (["a", "d"], ["b", "e"], ["c"])]


def test_all_that_any_rank_finds_is_told_once(tmp_path):
    def told(where, table, **facts):
        with ExitStack() as stack:
            return said(lambda: stack.enter_context(verified(context(**facts), table, where)))

    checkpoint(tmp_path / "c", a=b"1", b=b"2")
    assert told(tmp_path / "d", Table()) == f"{tmp_path}/d: there is no such checkpoint"
    (tmp_path / "c" / "a").write_bytes(b"x")
    damage = f"{tmp_path}/c is damaged: a does not hold what was saved (checksum differs)"
    advice = ". Nothing was loaded; use another checkpoint"
    assert told(tmp_path / "c", Table()) == damage + advice
    others = ["damaged", "z is damaged"], None, ["damaged", "b is damaged"], ["damaged", "z is damaged"]
    table = Table(**{"load_state (verifying)": list(others)})
    assert told(tmp_path / "d", table, rank=1, world_size=5) == "b is damaged\nz is damaged"
    (tmp_path / "c" / "b").unlink()
    assert told(tmp_path / "c", Table()) == f"{tmp_path}/c is damaged: b is missing{advice}", "sizes before contents"


def test_a_local_checkpoint_is_read_where_it_is(tmp_path):
    manifest = checkpoint(tmp_path / "c.replaced", a=b"1")
    table = Table()
    with verified(context(), table, tmp_path / "c") as found:
        assert found == Verified(tmp_path / "c.replaced", manifest)
    assert table.log == [("load_state (verifying)", PATIENCE)]


def test_what_is_told_is_in_the_log_at_once(monkeypatch):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file))
    errors.tell("hello")
    assert file.getvalue() == b"orc: hello\n"


@pytest.fixture
def bucket(tmp_path):
    """A checkpoint in an empty bucket of the memory file system."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    manifest = checkpoint(tmp_path / "c", a=b"1", b=b"22")
    where = Remote("memory://bucket/c")
    for name in (*manifest.files, NAME):
        (where / name).replace((tmp_path / "c" / name).read_bytes())
    yield where
    system.store.clear()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folder in which local copies are made."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr(verifying.tempfile, "tempdir", str(made))
    return made


def test_one_rank_of_a_machine_copies_what_is_remote_and_all_read_it(bucket, places, tmp_path):
    table = Table()
    with verified(context(node_rank=2), table, bucket) as found:
        assert list(places.iterdir()) == [found.directory]
        assert found.directory.name.startswith("orc-checkpoint-")
        assert found.manifest == read_manifest(tmp_path / "c") == read_manifest(found.directory)
        assert (found.directory / "b").read_bytes() == b"22"
        assert table.log == [("load_state (hooks)", None), ("load_state (fetching)", PATIENCE)]
    assert table.brought == [True, [2, str(found.directory), None], None]
    assert table.log[2:] == [("load_state (done)", PATIENCE)]
    assert list(places.iterdir()) == []

    table = Table(**{"load_state (fetching)": [[0, "/elsewhere", None], [1, str(tmp_path / "c"), None]]})
    table.timeout_s = 9000.0
    with verified(context(node_rank=1, is_local_main=False), table, bucket) as found:
        assert found.directory == tmp_path / "c"
    assert table.brought == [True, [1, None, None], None]
    assert table.log[1:] == [("load_state (fetching)", 9000.0), ("load_state (done)", 9000.0)]
    assert list(places.iterdir()) == []


def test_hooks_of_any_rank_find_the_whole_checkpoint(bucket, places, tmp_path):
    manifest = checkpoint(tmp_path / "d", a=b"1", **{"random_states_1.pkl": b"x"})
    for name in (*manifest.files, NAME):
        (bucket / name).replace((tmp_path / "d" / name).read_bytes())
    for of_another, whole in ((True, True), (False, False)):
        table = Table(**{"load_state (hooks)": [of_another]})
        with verified(context(), table, bucket, whole=False) as copied:
            assert (copied.source is None) == (copied.directory / "random_states_1.pkl").exists() == whole


def test_a_copy_goes_when_the_load_fails_even_if_somebody_removed_it(bucket, places):
    def fail(gone):
        with verified(context(), Table(), bucket) as found:
            if gone:
                verifying.shutil.rmtree(found.directory)
            raise OverflowError

    for gone in (False, True):
        with pytest.raises(OverflowError):
            fail(gone)
        assert list(places.iterdir()) == []


def test_what_is_wrong_with_a_remote_checkpoint_is_told_before_any_rank_reads(bucket, places, monkeypatch):
    def told():
        with ExitStack() as stack:
            return said(lambda: stack.enter_context(verified(context(), Table(), bucket)))

    advice = ". Nothing was loaded; use another checkpoint"
    (bucket / "a").replace(b"x")
    assert told() == f"{bucket} is damaged: a does not hold what was saved (checksum differs){advice}"
    (bucket / "b").remove()
    assert told() == f"{bucket} is damaged: b is missing{advice}"
    (bucket / NAME).remove()
    assert told().startswith("memory://bucket/c has no manifest.json: it is no complete checkpoint.")

    def broken(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(verifying.remote, "read_manifest", broken)
    assert told() == "memory://bucket/c: no route to host"
    assert list(places.iterdir()) == []


# Parts and their files


def models_of(directory, manifest, *models):
    """The entries of *models* in a checkpoint."""
    return load._model_entries(directory, manifest, [described(model) for model in models])


def test_a_model_is_read_from_the_kind_of_file_that_is_there(tmp_path):
    def paths(manifest):
        return [entry.path for entry in models_of(tmp_path, manifest, nn.Linear(1, 1), nn.Linear(1, 1))]

    safe, other = FileRecord(0, 0), FileRecord(0, 0)
    both = Manifest("a", 0, 0, 0, 1, 0.0, {"model_1.safetensors": safe, "pytorch_model_1.bin": other})
    assert paths(both) == [tmp_path / "model.safetensors", tmp_path / "model_1.safetensors"]
    pickles = replace(both, files={"pytorch_model_1.bin": other})
    assert paths(pickles) == [tmp_path / "model.safetensors", tmp_path / "pytorch_model_1.bin"]


def test_weights_go_into_the_model_that_was_compiled(tmp_path):
    given, model = nn.Linear(2, 2), nn.Linear(2, 2)
    manifest = checkpoint(tmp_path, **{"model.safetensors": save_tensors(given.state_dict())})
    load._load_model(*models_of(tmp_path, manifest, torch.compile(model)), None, {})
    assert torch.equal(model.weight, given.weight)


def test_weights_that_a_model_refuses_at_last_are_told_by_their_file(tmp_path):
    manifest = checkpoint(tmp_path, **{"model.safetensors": save_tensors({"weight": torch.zeros(2, 2)})})
    text = said(lambda: load._load_model(*models_of(tmp_path, manifest, nn.Linear(2, 2)), None, {}))
    assert text.startswith(f"{tmp_path}/model.safetensors does not fit the prepared model: Error(s) in loading")
    assert 'Missing key(s) in state_dict: "bias"' in text


def test_positions_are_checked_and_an_epoch_that_is_cut_otherwise_is_told(tmp_path, capsys):
    class Loader:
        total_batch_size = 6

        def __init__(self, rounds):
            self.rounds = rounds

        def check_position(self, state):
            if "refused" in state:
                raise PositionError("another length")
            return SimpleNamespace(rounds=self.rounds, samples=12)

    prepared = nothing(dataloaders=[Loader(0), Loader(2)])
    state = {"epoch": 3, "global_batch": 4}
    loaders = load._entries(tmp_path, prepared)
    check = lambda states, **facts: load._check_positions(context(**facts), loaders, states)  # noqa: E731
    check({"sampler.bin": state, "sampler_1.bin": state}, is_main=False)
    check({"sampler.bin": state, "sampler_1.bin": state | {"finished": True}})
    assert capsys.readouterr().err == ""
    check({"sampler.bin": state, "sampler_1.bin": state})
    assert capsys.readouterr().err == (
        "orc: epoch 3 goes on after 12 samples, with 6 samples per step; it was 4\n"
    )  # fmt: skip
    refused = state | {"refused": True}
    text = said(lambda: check({"sampler.bin": state, "sampler_1.bin": refused}))
    assert text == f"{tmp_path}/sampler_1.bin: another length"


def test_the_generators_are_those_of_the_rank_or_none_for_a_new_one(tmp_path):
    manifest = checkpoint(tmp_path / "c", **{"random_states_1.pkl": {"x": 3}})
    manifest = replace(manifest, world_size=3)
    assert load._random_states(context(rank=1), tmp_path / "c", manifest) == {"x": 3}
    assert load._random_states(context(rank=3), tmp_path / "c", manifest) is None
    assert said(lambda: load._random_states(context(rank=2), tmp_path / "c", manifest)) == (
        f"{tmp_path}/c holds no random_states_2.pkl: the random numbers of this rank cannot be continued"
    )


# Reading


def test_a_pickle_is_mapped_unless_it_is_to_go_elsewhere(tmp_path, monkeypatch):
    asked, real = [], copying.state_file.read

    def read(file, map_location=None, *, mmap=False):
        asked.append((file, map_location, mmap))
        return real(file, map_location, mmap=mmap)

    monkeypatch.setattr(copying.state_file, "read", read)
    path = tmp_path / "a"
    torch.save({"x": torch.ones(2)}, path)
    for where in (None, "cpu", "meta"):
        assert unpickle(path, where)["x"].device.type == (where or "cpu")
    assert asked == [(path, "cpu", True), (path, "cpu", False), (path, "meta", False)]
    path.write_bytes(b"no pickle")
    text = said(lambda: unpickle(path))
    assert text.startswith(f"{path} cannot be loaded: ")
    assert said(lambda: unpickle(tmp_path / "none")) == (
        f"{tmp_path}/none cannot be loaded: FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/none'"
    )


def test_weights_are_read_with_the_names_that_share_a_tensor(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "w.safetensors"
    for metadata in (None, {"format": "pt"}):
        save_file({"a": torch.arange(2.0)}, path, metadata)
        assert {name: value.tolist() for name, value in read_weights(path).items()} == {"a": [0.0, 1.0]}
    save_file({"a": torch.arange(2.0)}, path, {"orc.aliases": json.dumps({"b": "a"})})
    state = read_weights(path)
    assert list(state) == ["a", "b"]
    assert state["a"] is state["b"]
    path.write_bytes(b"no safetensors")
    assert said(lambda: read_weights(path)).startswith(f"{path} cannot be loaded: ")


# Copying


def copied(state, current=None):
    with CopyQueue() as copies:
        return unmapped(state, copies, current)


def test_what_was_mapped_is_copied(tmp_path):
    state = {
        "a": torch.ones(3),
        "b": [torch.zeros(2), 3],
        "s": torch.eye(2).to_sparse(),
        "p": nn.Parameter(torch.ones(1)),
    }
    found = copied(state)
    assert torch.equal(found["a"], state["a"])
    assert torch.equal(found["b"][0], state["b"][0])
    assert found["b"][1] == 3
    assert torch.equal(found["s"].to_dense(), torch.eye(2))
    assert isinstance(found["p"], torch.Tensor)
    for mine, given in ((found["a"], state["a"]), (found["b"][0], state["b"][0]), (found["p"], state["p"])):
        assert mine.data_ptr() != given.data_ptr()


def optimizer_state(value, groups=1, **more):
    return {
        "state": {0: {"exp_avg": value, "step": torch.tensor(3.0), **more}},
        "param_groups": [{"params": [0]}] * groups,
    }


def test_tensors_of_an_optimizer_go_into_those_they_replace():
    current, given = optimizer_state(torch.zeros(3)), optimizer_state(torch.ones(3), name="x")
    place = current["state"][0]["exp_avg"]
    found = copied(given, current)
    assert found["state"][0]["exp_avg"] is place
    assert place.tolist() == [1.0] * 3
    assert found["state"][0]["name"] == "x"
    assert found["param_groups"] == [{"params": [0]}]
    assert found["param_groups"] is not given["param_groups"]


@pytest.mark.parametrize(
    "current",
    [
        None,
        {},
        3,
        {"param_groups": 3},
        optimizer_state(torch.zeros(3), groups=2),
        optimizer_state(torch.zeros(2)),
        optimizer_state(torch.zeros(3, dtype=torch.float64)),
        optimizer_state(nn.Parameter(torch.zeros(3))),
        optimizer_state(None),
        {"state": None, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"params": [0]}]},
    ],
)
def test_tensors_without_a_place_to_go_get_one(current):
    given = optimizer_state(torch.ones(3))
    kept = current["state"][0]["exp_avg"] if isinstance(current, dict) and current.get("state") else None
    found = copied(given, current)["state"][0]["exp_avg"]
    assert type(found) is torch.Tensor
    assert found.tolist() == [1.0] * 3
    assert found is not kept
    assert found.data_ptr() != given["state"][0]["exp_avg"].data_ptr()


def test_lists_and_tuples_of_tensors_are_copied_as_what_they_are():
    given = optimizer_state(torch.ones(1), pair=(torch.ones(1), [torch.zeros(1)]))
    current = optimizer_state(torch.zeros(1), pair=(torch.zeros(1), [torch.ones(1)]))
    pair = copied(given, current)["state"][0]["pair"]
    assert (type(pair), type(pair[1])) == (tuple, list)
    assert (pair[0].item(), pair[1][0].item()) == (1.0, 0.0)
    assert pair[0].data_ptr() != given["state"][0]["pair"][0].data_ptr()


# Loading

STEPS = ("reading", "checking", "trying")
POSITION = {"epoch": 3, "rounds": 0, "offset": 0, "global_batch": 4, "length": 24, "live": True, "key": None}


def whole(directory, prepared, **more):
    """A checkpoint of *prepared* and the present generators."""
    contents = {entry.path.name: entry.target.state_dict() for entry in load._entries(directory, prepared)}
    for index, model in enumerate(prepared.models):
        contents[load.layout.model_file(index, False)] = model.state_dict()
    return Verified(directory, checkpoint(directory, **contents | {"random_states_0.pkl": rng.capture()} | more))


def test_a_load_is_agreed_on_step_by_step(tmp_path):
    prepared = nothing(models=[nn.Linear(2, 2)], custom=[Holder({"count": 1})])
    checked, table, seen = whole(tmp_path / "c", prepared), Table(), []
    prepared.custom[0].state = {"count": 2}
    load.load(context(), table, prepared, checked)
    assert prepared.custom[0].state == {"count": 1}
    assert table.log == [(f"load_state ({step})", PATIENCE) for step in STEPS]
    assert table.brought == [None, None, None]
    table = Table()
    hook = lambda models, directory: seen.append((models, directory, list(table.log)))  # noqa: E731
    load.load(context(), table, prepared, checked, hooks=[hook])
    assert seen == [([prepared.models[0]], str(tmp_path / "c"), [("load_state (reading)", PATIENCE)])]
    assert seen[0][0] is not prepared.models


@pytest.mark.parametrize("step", STEPS)
def test_what_another_rank_finds_in_any_step_puts_everything_back(tmp_path, step):
    class Own(nn.Linear):
        def load_state_dict(self, *arguments, **options):
            return super().load_state_dict(*arguments, **options)

    prepared = nothing(models=[nn.Linear(2, 2), Own(2, 2)], custom=[Holder({"count": 1})])
    checked = whole(tmp_path / "c", prepared)
    prepared.custom[0].state = {"count": 2}
    with torch.no_grad():
        for model in prepared.models:
            model.weight.add_(1)
    torch.rand(1)
    before = [model.weight.tolist() for model in prepared.models], torch.get_rng_state().tolist()
    table = Table(**{f"load_state ({step})": ["it is full"]})
    hooks = [lambda models, directory: None] if step == "reading" else []
    assert said(lambda: load.load(context(), table, prepared, checked, hooks=hooks)) == "rank 1: it is full"
    assert table.log[-1] == (f"load_state ({step})", PATIENCE)
    assert before == ([model.weight.tolist() for model in prepared.models], torch.get_rng_state().tolist())
    assert prepared.custom[0].state == {"count": 2}
    load.load(context(), Table(), prepared, checked)
    assert [model.weight.tolist() for model in prepared.models] != before[0]


def test_models_get_their_options_and_their_place(tmp_path, monkeypatch):
    asked, read, real = [], [], copying.state_file.read

    class Own(nn.Linear):
        def load_state_dict(self, state, **options):
            asked.append(options)
            return super().load_state_dict(state, **options)

    def reads(file, map_location=None, **options):
        read.append((file.name, map_location))
        return real(file, map_location, **options)

    prepared = nothing(models=[nn.Linear(2, 2), Own(2, 2)], custom=[Holder({})])
    checked = whole(tmp_path / "c", prepared)
    prepared.models[0].more = nn.Parameter(torch.ones(1))
    options = {"strict": False, "assign": False}
    monkeypatch.setattr(copying.state_file, "read", reads)
    here = torch.device("cpu")
    load.load(context(), Table(), prepared, checked, map_location=here, model_options=options)
    assert asked == [options]
    assert [name for name, where in read if where is here] == [
        "custom_checkpoint_0.pkl",
        "pytorch_model_1.bin",
        "pytorch_model.bin",
    ]
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin does not fit the prepared model: missing: more"):
        load.load(context(), Table(), prepared, checked)


def test_a_new_rank_gets_seeds_of_its_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(rng, "reseed", lambda *arguments: asked.append(arguments))
    checked = whole(tmp_path / "c", nothing())
    load.load(context(rank=4), Table(), nothing(), checked)
    assert asked == [("0af3", 4)]
    load.load(context(), Table(), nothing(), checked)
    assert len(asked) == 1


def test_the_end_of_an_epoch_is_the_start_of_the_next_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "next_epoch", lambda state: state | {"epoch": state["epoch"] + 1})

    class Loader(Holder):
        def check_position(self, state):
            self.checked = state["epoch"]
            return SimpleNamespace(rounds=0)

    prepared = nothing(dataloaders=[Loader(POSITION), Loader(POSITION | {"epoch": 8})])
    checked = whole(tmp_path / "c", prepared)
    for options, epochs in (({}, [3, 8]), ({"roll_over": False}, [3, 8]), ({"roll_over": True}, [4, 9])):
        load.load(context(), Table(), prepared, checked, **options)
        assert [loader.state["epoch"] for loader in prepared.dataloaders] == epochs
        assert [loader.checked for loader in prepared.dataloaders] == epochs


def test_what_was_tried_and_what_is_loaded_are_not_the_file(tmp_path):
    holder = Holder({"x": torch.ones(3)})
    prepared = nothing(custom=[holder])
    checked = whole(tmp_path / "c", prepared)
    load.load(context(), Table(), prepared, checked)
    os.truncate(tmp_path / "c" / "custom_checkpoint_0.pkl", 0)
    assert holder.state["x"].tolist() == [1.0] * 3


def test_a_state_that_fits_but_is_refused_at_last_is_told_by_its_file(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = nothing(optimizers=[optimizer])
    checked = whole(tmp_path / "c", prepared)
    for error in (ValueError("no"), RuntimeError("no"), KeyError("no")):

        def refuse(state, error=error):
            raise error

        optimizer.load_state_dict = refuse
        assert said(lambda: load.load(context(), Table(), prepared, checked)) == (
            f"{tmp_path}/c/optimizer.bin does not fit what is prepared: {error}"
        )


def test_an_optimizer_gets_its_state_in_the_memory_that_it_has(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    prepared = nothing(models=[model], optimizers=[optimizer])
    checked = whole(tmp_path / "c", prepared)
    expected = [{name: value.tolist() for name, value in state.items()} for state in optimizer.state.values()]
    step()
    place = optimizer.state[model.weight]["exp_avg"]
    load.load(context(), Table(), prepared, checked)
    assert [{name: value.tolist() for name, value in state.items()} for state in optimizer.state.values()] == expected
    assert optimizer.state[model.weight]["exp_avg"] is place
    os.truncate(tmp_path / "c" / "optimizer.bin", 0)
    assert place.tolist() == expected[0]["exp_avg"]


class Refusing(Holder):
    """A registered object that refuses one state, but not before it has taken it."""

    refused = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if state == self.refused:
            raise OverflowError(f"{state['count']} is too many")


class Moody(nn.Linear):
    """A model that refuses all states but the one that it has."""

    refuses = False

    def load_state_dict(self, state, **options):
        if self.refuses and not torch.equal(state["weight"], self.weight):
            raise OverflowError("no change, please")
        return super().load_state_dict(state, **options)


class Loader(Holder):
    length = 24

    def check_position(self, state):
        if state["length"] != self.length:
            raise PositionError("another length")
        return SimpleNamespace(rounds=0)


def more_is_registered(prepared):
    prepared.custom.append(Holder())
    return "{0} holds no custom_checkpoint_1.pkl: more is prepared or registered here than when it was saved"


def another_optimizer(prepared):
    prepared.optimizers[0] = torch.optim.SGD([torch.zeros(1)], 0.1)
    return "{0}/optimizer.bin does not fit what is prepared: it has parameter groups of [2] parameters"


def another_length(prepared):
    prepared.dataloaders[0].length = 25
    return "{0}/sampler.bin: another length"


def another_model(prepared):
    prepared.models[0] = nn.Linear(3, 2)
    return "{0}/pytorch_model.bin does not fit the prepared model: size mismatch of weight"


def a_model_that_refuses(prepared):
    prepared.models[1].refuses = True
    return "pytorch_model_1.bin does not fit what is prepared: OverflowError: no change, please"


def an_object_that_refuses(prepared):
    prepared.custom[0].refused = {"count": 1}
    return "{0}/custom_checkpoint_0.pkl does not fit what is prepared: OverflowError: 1 is too many"


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (more_is_registered, "reading"),
        (another_optimizer, "reading"),
        (another_length, "reading"),
        (another_model, "checking"),
        (a_model_that_refuses, "trying"),
        (an_object_that_refuses, "trying"),
    ],
)
def test_what_does_not_fit_here_is_brought_to_the_others_and_changes_nothing(tmp_path, change, step):
    model = nn.Linear(2, 2)
    prepared = nothing(
        models=[model, Moody(2, 2)],
        optimizers=[torch.optim.SGD(model.parameters(), 0.1)],
        dataloaders=[Loader(POSITION)],
        custom=[Refusing({"count": 1})],
    )
    checked = whole(tmp_path / "c", prepared)
    with torch.no_grad():
        for model in prepared.models:
            model.weight.add_(1)
    prepared.custom[0].state, prepared.dataloaders[0].state = {"count": 2}, None
    text = change(prepared).format(tmp_path / "c")
    before = [model.weight.tolist() for model in prepared.models]
    table, number = Table(), STEPS.index(step)
    assert said(lambda: load.load(context(), table, prepared, checked)).startswith(text)
    assert [what for what, _ in table.log] == [f"load_state ({one})" for one in STEPS[: number + 1]]
    assert table.brought[:-1] == [None] * number
    assert table.brought[-1].startswith(text)
    assert [model.weight.tolist() for model in prepared.models] == before
    assert prepared.custom[0].state == {"count": 2}
    assert prepared.dataloaders[0].state is None


@pytest.mark.parametrize("step", STEPS)
def test_a_rank_whose_own_code_fails_says_so_and_is_not_waited_for(tmp_path, step):
    def fail(*_):
        raise OverflowError("too many")

    prepared = nothing(dataloaders=[Loader(POSITION)], custom=[Holder({"count": 1})])
    checked = whole(tmp_path / "c", prepared)
    hooks = [fail] if step == "checking" else []
    if step == "reading":
        prepared.dataloaders[0].check_position = fail
    if step == "trying":
        prepared.custom[0].state_dict = fail
    table = Table()
    with pytest.raises(OverflowError, match="too many"):
        load.load(context(), table, prepared, checked, hooks=hooks)
    assert table.log == [(f"load_state ({one})", PATIENCE) for one in STEPS[: STEPS.index(step) + 1]]
    assert table.brought[-1] == ["OverflowError: too many"]


def test_what_failed_in_the_code_of_a_rank_is_not_held_against_the_checkpoint():
    with pytest.raises(RankMissing) as told:
        load._agree([None, ["OverflowError: too many"], "it is full", ["KeyError: 'x'"]])
    assert str(told.value) == "load_state: rank 1 failed: OverflowError: too many; rank 3 failed: KeyError: 'x'"
    with pytest.raises(CheckpointError) as told:
        load._agree([None, "it is full"])
    assert type(told.value) is CheckpointError
    assert load._agree([None, None]) is None


def test_an_object_may_take_apart_the_state_that_it_gets(tmp_path):
    class Taking(Holder):
        def load_state_dict(self, state):
            self.state = {"list": [state["list"].pop()], "x": state.pop("x")}

    prepared = nothing(custom=[Taking({"list": [1], "x": torch.ones(3)})])
    checked = whole(tmp_path / "c", prepared)
    load.load(context(), Table(), prepared, checked)
    assert prepared.custom[0].state["list"] == [1]
    assert prepared.custom[0].state["x"].tolist() == [1.0] * 3


def test_an_object_is_tried_with_what_it_gets_in_the_end_and_a_loader_is_not_tried(tmp_path):
    class Noting(Loader):
        def load_state_dict(self, state):
            seen.append(state)

    seen = []
    prepared = nothing(dataloaders=[Noting(POSITION)], custom=[Noting({"x": torch.ones(2)})])
    checked = whole(tmp_path / "c", prepared)
    load.load(context(), Table(), prepared, checked)
    tried, position, loaded = seen
    assert position == POSITION
    assert tried["x"].tolist() == loaded["x"].tolist() == [1.0, 1.0]


def test_the_generator_of_torch_xla_is_put_back_too(tmp_path):
    class Xla(Compute):
        library = "torch_xla"

        state = 7

        def rng_state(self):
            return self.state

        def set_rng_state(self, state):
            self.state = state

    xla = Xla()
    checked = whole(tmp_path / "c", nothing(), **{"random_states_0.pkl": rng.capture(xla)})
    xla.state = 8
    refused = Table(**{"load_state (trying)": ["no"]})
    assert said(lambda: load.load(context(compute=xla), refused, nothing(), checked)) == "rank 1: no"
    assert xla.state == 8
    load.load(context(compute=xla), Table(), nothing(), checked)
    assert xla.state == 7


# Weights in their places


def test_weights_are_read_into_the_model_once_each_and_what_does_not_match_is_left_to_torch():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight  # tied
    model.double()[1].float()
    started = []
    copies = SimpleNamespace(start=lambda target, source: started.append((target, source)))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    state["2.weight"] = state["0.weight"]
    state["1.weight"] = state["1.weight"].double()
    state["1.bias"] = nn.Parameter(torch.ones(2))
    state["1.running_var"] = torch.ones(1)
    state["more"] = torch.ones(3)
    found = placed(state, model, copies)
    assert list(found) == list(state)
    here = dict(model.named_buffers()) | dict(model.named_parameters())
    names = ["0.weight", "1.running_mean", "1.num_batches_tracked"]
    assert len(started) == len(names)
    for name, (target, source) in zip(names, started, strict=True):
        assert target is here[name]
        assert source is state[name]
    assert found["0.weight"] is found["2.weight"] is model[0].weight
    for name in ("1.weight", "1.bias", "1.running_var", "more"):
        assert found[name] is state[name]


def test_of_two_values_for_tied_weights_the_last_counts():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    state = {"1.weight": torch.full((2, 2), 2.0), "0.weight": torch.ones(2, 2)}
    with CopyQueue() as copies:
        found = placed(state, model, copies)
    model.load_state_dict(found)
    assert model[0].weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_parameters_that_are_to_be_replaced_by_those_of_the_file_are(make_run, tmp_path):
    run = make_run()
    run.accelerator.save_state(tmp_path / "c")
    before = run.model[0].weight
    for options, same in (({}, True), ({"assign": True}, False), ({"assign": False}, False)):
        run.accelerator.load_state(tmp_path / "c", **options)
        assert (run.model[0].weight is before) == same
