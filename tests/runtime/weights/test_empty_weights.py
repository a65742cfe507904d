"""Models on the meta device, and real tensors in their place."""

import pytest
import torch
from torch import nn

from orc.runtime import init_empty_weights, init_on_device, set_module_tensor_to_device


def test_parameters_are_empty_and_buffers_real():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_buffers_too():
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(2)
        assert torch.ones(1).is_meta
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_the_block_ends_after_an_exception():
    original = nn.Module.register_parameter
    with pytest.raises(KeyError), init_on_device("meta"):
        raise KeyError
    assert nn.Module.register_parameter is original


def test_parameters_keep_what_they_are():
    class Special(nn.Parameter):
        pass

    with init_on_device(torch.device("meta")):
        module = nn.Module()
        special = Special(torch.ones(2), requires_grad=False)
        special.note = "kept"
        module.register_parameter("weight", special)
        module.register_parameter("none", None)
    assert (type(module.weight), module.weight.note, module.weight.requires_grad) == (Special, "kept", False)
    assert module.none is None


def test_a_tensor_is_put_in_place():
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"0.weight is on the meta device, we need a `value` to put in on cpu."):
        set_module_tensor_to_device(model, "0.weight", "cpu")
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(3, 2, dtype=torch.float16))
    assert isinstance(model[0].weight, nn.Parameter)
    assert (model[0].weight.device.type, model[0].weight.dtype) == ("cpu", torch.float32)
    set_module_tensor_to_device(model, "0.weight", "cpu", dtype=torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert model[0].weight.is_meta
    with pytest.raises(ValueError, match=r'shape torch.Size\(\[2\]\) in "0.bias".*torch.Size\(\[3\]\)'):
        set_module_tensor_to_device(model, "0.bias", "cpu", value=torch.ones(2))
    with pytest.raises(ValueError, match="Linear does not have a parameter or a buffer named nothing"):
        set_module_tensor_to_device(model, "0.nothing", "cpu")
    with pytest.raises(ValueError, match="no submodule 1"):
        set_module_tensor_to_device(model, "1.weight", "cpu")


def test_tied_tensors_are_moved_once():
    value = torch.ones(2, 2)
    moved = {value.data_ptr(): {}}
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for name in ("0.weight", "1.weight"):
        set_module_tensor_to_device(model, name, "cpu", value=value, dtype=torch.float16, tied_params_map=moved)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
