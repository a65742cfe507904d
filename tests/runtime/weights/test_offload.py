"""Weights in memory-mapped files."""

import json

import pytest
import torch
from torch import nn

from orc.runtime import (
    OffloadedWeightsLoader,
    init_empty_weights,
    load_offloaded_weight,
    load_offloaded_weights,
    load_state_dict,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from orc.runtime.weights import offload

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_a_weight_comes_back_as_it_was(tmp_path, dtype, shape):
    weight = torch.ones(shape).to(dtype)
    index = offload_weight(weight, "layer.weight", tmp_path)
    assert index == {"layer.weight": {"dtype": str(dtype)[6:], "shape": list(shape)}}
    loaded = load_offloaded_weight(tmp_path / "layer.weight.dat", index["layer.weight"])
    assert (loaded.dtype, loaded.shape) == (dtype, shape)
    assert torch.equal(loaded.float(), weight.float())


def test_writing_to_a_mapped_weight_leaves_the_file(tmp_path):
    index = offload_weight(torch.ones(4), "w", tmp_path)
    load_offloaded_weight(tmp_path / "w.dat", index["w"]).zero_()
    assert load_offloaded_weight(tmp_path / "w.dat", index["w"]).sum() == 4


def test_a_file_that_is_too_short_is_refused(tmp_path):
    index = offload_weight(torch.ones(4), "w", tmp_path)
    (tmp_path / "w.dat").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"has 4 bytes; torch.float32 of shape \[4\] needs 16"):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])
    with pytest.raises(ValueError, match="'float5' is no dtype"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float5", "shape": [1]})


def test_a_model_is_offloaded_and_loaded(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    offload_state_dict(tmp_path / "new", model.state_dict())
    index = json.loads((tmp_path / "new/index.json").read_text())
    assert set(index) == set(model.state_dict())
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    load_offloaded_weights(empty, index, tmp_path / "new")
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor)
    (tmp_path / "new/0.weight.dat").write_bytes(b"")
    assert torch.equal(empty[0].weight, model[0].weight)
    load_offloaded_weights(empty, None, tmp_path)


def test_indices_are_added_to(tmp_path):
    save_offload_index({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [2]}}, tmp_path)
    assert sorted(json.loads((tmp_path / "index.json").read_text())) == ["a", "b"]


def test_state_dicts_of_both_kinds(tmp_path):
    from safetensors.torch import save_file

    state = {"a.weight": torch.ones(2), "b.weight": torch.zeros(3)}
    torch.save(state, tmp_path / "x.bin")
    save_file(state, tmp_path / "x.safetensors")
    for options in ({}, {"device_map": {"a": "cpu", "b": "disk"}}, {"device_map": {"": "cpu"}}):
        for name in ("x.bin", "x.safetensors"):
            loaded = load_state_dict(str(tmp_path / name), **options)
            assert set(loaded) == set(state)
            assert torch.equal(loaded["b.weight"], state["b.weight"])


def test_weights_on_the_disk_are_read_ahead_in_the_order_of_the_pass_before(tmp_path, monkeypatch):
    state = {f"layer{number}": torch.full((4,), float(number)) for number in range(8)}
    offload_state_dict(tmp_path, state)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    ahead = []
    monkeypatch.setattr(offload, "_will_need", lambda weight: ahead.append(int(weight[0])))
    for _ in range(2):
        for name in state:
            assert torch.equal(loader[name], state[name])
    assert ahead == [4, 5, 6, 7, 0, 1, 2, 3]  # each once in the second pass, half a round before it is used
    monkeypatch.undo()
    for _ in range(2):  # and the system takes the advice
        assert [int(loader[name][0]) for name in state] == list(range(8))
