"""save_model and load_checkpoint_in_model."""

import json

import pytest
import torch
from safetensors import safe_open

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.weights.load_in_model import load_checkpoint_and_dispatch, load_checkpoint_in_model
from orc.runtime.weights.loading import save_model, shards

MB = 10**6


class Blocks(torch.nn.Module):
    """Three weights of 1 MB and one of 3 MB."""

    def __init__(self):
        super().__init__()
        for name, size in (("a", 1), ("b", 1), ("large", 3), ("c", 1)):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size * MB // 4)))


def sizes(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return found


def test_weights_are_cut_into_parts_of_the_given_size(tmp_path):
    model = Blocks()
    Accelerator().save_model(model, tmp_path / "new", max_shard_size="2Mb")
    parts = sizes(tmp_path / "new")
    assert {frozenset(part) for part in parts.values()} == {frozenset(s) for s in ({"a", "b"}, {"large"}, {"c"})}
    assert all(sum(part.values()) <= 2 * MB or set(part) == {"large"} for part in parts.values())
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a", "b", "c", "large"}
    assert set(index["weight_map"].values()) == set(parts)
    assert index["metadata"]["total_size"] == 6 * MB
    other = Blocks()
    load_checkpoint_in_model(other, tmp_path / "new", device_map={"": "cpu"})
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_one_file_is_enough_for_small_models_and_replaces_older_parts(tmp_path):
    save_model(Blocks(), tmp_path, "2MB")
    (tmp_path / "config.json").write_text("{}")
    model = Blocks()
    save_model(model, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    save_model(model, tmp_path, safe_serialization=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
    other = Blocks()
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(other.large, model.large)


def test_of_the_same_weights_in_both_formats_safetensors_are_read(tmp_path):
    model = Blocks()
    save_model(model, tmp_path / "pickled", "2MB", safe_serialization=False)
    save_model(model, tmp_path / "both", "2MB")
    for path in (tmp_path / "pickled").iterdir():
        (tmp_path / "both" / path.name).write_bytes(path.read_bytes() if path.suffix == ".json" else b"not read")
    other = Blocks()
    load_checkpoint_in_model(other, tmp_path / "both", strict=True)
    assert torch.equal(other.large, model.large)


@pytest.mark.parametrize("index", ["weights.index.json", "index.json"])
def test_a_hand_made_index_fills_an_empty_model(tmp_path, index):
    def build():
        return torch.nn.ModuleDict({"linear1": torch.nn.Linear(2, 2), "linear2": torch.nn.Linear(2, 2)})

    model = build()
    state = model.state_dict()
    where = {name: f"{'first' if name.startswith('linear1') else 'second'}_state_dict.bin" for name in state}
    for file in set(where.values()):
        torch.save({name: state[name] for name in state if where[name] == file}, tmp_path / file)
    (tmp_path / index).write_text(json.dumps(where))
    for checkpoint in (str(tmp_path), tmp_path / index):
        with torch.device("meta"):
            empty = build()
        load_checkpoint_in_model(empty, checkpoint)
        assert not any(parameter.is_meta for parameter in empty.parameters())
        assert torch.equal(empty["linear2"].weight, model["linear2"].weight)


@pytest.mark.parametrize("size", ["", "5 parsecs", -3, True, 0, "0MB"])
def test_a_size_of_files_that_is_none_is_refused(size, tmp_path):
    with pytest.raises(ValueError, match=r"is not in a valid format|at least one byte"):
        save_model(torch.nn.Linear(1, 1), tmp_path, max_shard_size=size)


def test_parts_keep_the_order_and_hold_everything():
    tensors = {f"t{i}": torch.zeros(n) for i, n in enumerate((5, 1, 9, 2, 2, 2))}
    parts = shards(tensors, 16)
    # Of what is too large each has a part of its own; the others follow one another, up to 16 bytes.
    assert [list(part) for part in parts] == [["t0"], ["t2"], ["t1", "t3"], ["t4", "t5"]]


def test_tied_weights_are_loaded_into_both_names(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, tmp_path)
    other = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert torch.equal(other["b"].weight, model["a"].weight)


def test_compiled_models_are_saved_under_the_names_that_the_script_wrote(tmp_path):
    model = torch.nn.Linear(2, 2)
    accelerator = Accelerator(dynamo_backend="eager")
    compiled = accelerator.prepare(model)
    assert type(compiled).__name__ == "OptimizedModule"
    accelerator.save_model(compiled, tmp_path / "weights")
    accelerator.save_state(tmp_path / "state")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    plain, again = torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2), backend="eager")
    load_checkpoint_in_model(plain, tmp_path / "weights", strict=True)
    load_checkpoint_in_model(again, tmp_path / "weights", strict=True)
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "state")
    other = Accelerator()
    uncompiled = other.prepare(torch.nn.Linear(2, 2))
    other.load_state(tmp_path / "state")
    for loaded in (plain, again, model, uncompiled):
        assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), expected.values(), strict=True))


def test_weights_without_values_are_not_saved(tmp_path):
    with pytest.raises(CheckpointError, match="weight, bias cannot be saved: on the meta device a weight has no"):
        Accelerator().save_model(torch.nn.Linear(2, 2, device="meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_loaded_is_named(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        load_checkpoint_in_model(model, tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_checkpoint_in_model(model, tmp_path)
    (tmp_path / "x.index.json").write_text('{"weight": "gone.bin"}')
    with pytest.raises(CheckpointError, match=r"names gone\.bin, which is missing"):
        load_checkpoint_in_model(model, tmp_path)
    save_model(torch.nn.Linear(2, 2, bias=False), tmp_path / "less")
    load_checkpoint_in_model(model, tmp_path / "less")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint_in_model(model, tmp_path / "broken.safetensors")


@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_weights_that_the_model_lacks_are_named_and_left(tmp_path, caplog, load, device_map):
    def build():
        model = torch.nn.Linear(2, 2)
        model.register_buffer("positions", torch.zeros(3), persistent=False)
        return model

    weights = build().state_dict()
    torch.save(weights | {"positions": torch.ones(3), "lora": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    model = build()
    load(model, tmp_path, device_map=device_map)
    assert torch.equal(model.weight, weights["weight"])
    assert model.positions.tolist() == [0, 0, 0], "no part of the model's state"
    assert {record.getMessage() for record in caplog.records} == {
        f"{tmp_path} holds positions, lora, which the model does not have"
    }
    with pytest.raises(CheckpointError, match="holds positions, lora, which the model does not have"):
        load(model, tmp_path, device_map=device_map, strict=True)


def test_documented_names_of_files():
    from orc.runtime import utils

    assert (utils.MODEL_NAME, utils.OPTIMIZER_NAME, utils.SCHEDULER_NAME) == ("pytorch_model", "optimizer", "scheduler")
    assert (utils.RNG_STATE_NAME, utils.SCALER_NAME) == ("random_states", "scaler.pt")
    assert (utils.WEIGHTS_NAME, utils.SAFE_WEIGHTS_NAME) == ("pytorch_model.bin", "model.safetensors")
    assert utils.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert utils.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"


@pytest.mark.distributed
def test_weights_saved_on_the_main_process_are_loaded_under_the_prepared_model(tmp_path, run_ranks):
    class Pretrained(torch.nn.Linear):
        """Saves itself as models of transformers do."""

        def save_pretrained(self, directory, is_main_process, save_function, state_dict):
            if is_main_process:
                save_function(state_dict, f"{directory}/weights.bin")

    def work(root):
        accelerator = Accelerator()
        torch.manual_seed(3)
        model = accelerator.prepare(Pretrained(2, 2))
        bare = accelerator.unwrap_model(model)
        accelerator.wait_for_everyone()
        bare.save_pretrained(
            root,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        before = model(torch.ones(1, 2)).tolist()
        accelerator.wait_for_everyone()
        with torch.no_grad():
            bare.weight.zero_()
        with accelerator.main_process_first():
            bare.load_state_dict(torch.load(f"{root}/weights.bin"))
        return model(torch.ones(1, 2)).tolist() == before

    assert run_ranks(2, work, str(tmp_path)) == [True, True]
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.bin"]
