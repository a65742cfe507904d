"""Weights of a checkpoint on the devices of a map, on the disk, in other dtypes, shared."""

import json

import pytest
import torch
from torch import nn

from orc.runtime import (
    Accelerator,
    init_empty_weights,
    load_checkpoint_in_model,
    load_offloaded_weight,
)
from orc.runtime.checkpoint.errors import CheckpointError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)


def saved(tmp_path, model):
    Accelerator().save_model(model, str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_weights_for_the_disk_are_mapped_files(tmp_path):
    model = Net()
    with init_empty_weights():
        empty = Net()
    places = {"first": "disk", "norm": "disk", "last": "cpu"}
    with pytest.raises(ValueError, match="say where with offload_folder"):
        load_checkpoint_in_model(empty, saved(tmp_path, model), places)
    load_checkpoint_in_model(empty, saved(tmp_path, model), places, tmp_path / "disk")
    index = json.loads((tmp_path / "disk/index.json").read_text())
    assert set(index) == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
    weight = load_offloaded_weight(tmp_path / "disk/first.weight.dat", index["first.weight"])
    assert torch.equal(weight, model.first.weight)
    assert empty.first.weight.is_meta
    assert torch.equal(empty.norm.running_var, model.norm.running_var)
    assert torch.equal(empty.last.weight, model.last.weight)
    load_checkpoint_in_model(Net(), saved(tmp_path, model), {"": "disk"}, tmp_path / "all", offload_buffers=True)
    assert "norm.running_var" in json.loads((tmp_path / "all/index.json").read_text())


def test_dtypes(tmp_path):
    empty = Net()
    load_checkpoint_in_model(empty, saved(tmp_path, Net()), dtype="float16", keep_in_fp32_modules=["norm"])
    assert (empty.first.weight.dtype, empty.norm.weight.dtype) == (torch.float16, torch.float32)
    assert isinstance(empty.first.weight, nn.Parameter)
    with pytest.raises(ValueError, match="'float3' is no dtype"):
        load_checkpoint_in_model(empty, saved(tmp_path, Net()), dtype="float3")


def test_shared_parameters_stay_shared(tmp_path):
    def make():
        model = nn.ModuleDict({"wte": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["wte"].weight
        return model

    model = make()
    with init_empty_weights():
        empty = make()
    load_checkpoint_in_model(empty, saved(tmp_path, model), strict=True)
    assert empty["head"].weight is empty["wte"].weight
    assert torch.equal(empty["head"].weight, model["head"].weight)


def test_options_that_cannot_be_are_refused(tmp_path):
    for option in ({"offload_8bit_bnb": True}, {"full_state_dict": False}, {"broadcast_from_rank0": True}):
        with pytest.raises(ValueError, match="is not supported"):
            load_checkpoint_in_model(Net(), tmp_path, **option)
    with pytest.raises(ValueError, match=r"does not give any device for .*norm\.weight.*last\.bias"):
        load_checkpoint_in_model(Net(), saved(tmp_path, Net()), {"first": "cpu"})


@pytest.mark.parametrize("fault", ["lacks", "holds", "shape", "cut", "device", "module"])
def test_what_does_not_fit_leaves_the_model_as_it_was(tmp_path, fault):
    model, other = Net(), Net()
    places, strict, message = None, False, {
        "lacks": r"lacks last\.weight, last\.bias",
        "holds": r"holds more\.bias, more\.weight, which",
        "shape": r"last\.weight has shape \(2, 4\)",
        "cut": r"model-0000.-of-0000.\.safetensors cannot be loaded",
        "device": "which this machine does not have",
        "module": r"has no module 'frist', did you mean 'first'",
    }[fault]  # fmt: skip
    if fault == "lacks":
        other.last, strict = nn.Identity(), True
    elif fault == "holds":
        other.more, strict = nn.Linear(2, 2), True
    elif fault == "shape":
        other.last = nn.Linear(4, 2)
    elif fault in ("device", "module"):
        places = (
            {"first": "cpu", "norm": "cpu", "last": "cuda:99"} if fault == "device" else {"": "cpu", "frist": "cpu"}
        )
    Accelerator().save_model(other, str(tmp_path / "saved"), max_shard_size="40B")
    if fault == "cut":
        last = max((tmp_path / "saved").glob("*.safetensors"))
        last.write_bytes(last.read_bytes()[:-4])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((CheckpointError, ValueError), match=message):
        load_checkpoint_in_model(model, tmp_path / "saved", places, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_every_name_that_does_not_fit_is_listed(tmp_path):
    layers = {f"layer{number}": nn.Linear(1, 1, bias=False) for number in range(30)}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint_in_model(nn.ModuleDict(layers), saved(tmp_path, Net()), strict=True)
    names = [f"{name}.weight" for name in layers] + list(Net().state_dict())
    assert [name for name in names if name not in str(error.value)] == []


def test_weights_reach_the_parameters_of_a_model_whose_state_dict_has_copies(tmp_path):
    model = Net()
    path = saved(tmp_path, model)
    for dtype in (None, torch.float64):
        other = Net()
        other.register_state_dict_post_hook(
            lambda module, state, prefix, local: state.update({name: value.clone() for name, value in state.items()})
        )
        load_checkpoint_in_model(other, path, dtype=dtype)
        torch.testing.assert_close(other.last.weight, model.last.weight, check_dtype=False)
