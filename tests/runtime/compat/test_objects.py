"""Small questions about models, mappings and the machine."""

import platform
import socket

import pytest
import torch
from torch import nn

from orc.runtime import (
    check_os_kernel,
    clean_state_dict_for_safetensors,
    convert_dict_to_env_variables,
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    is_port_in_use,
    merge_dicts,
    model_has_dtensor,
    recursive_getattr,
)
from orc.runtime.core.handlers import TorchDynamoPlugin
from orc.runtime.parallel.compile import compile_model


def test_mappings_are_merged_into_the_destination():
    destination = {"a": {"x": 1, "y": 2}, "b": 3, "c": 4}
    assert merge_dicts({"a": {"y": 5, "z": {"deep": 6}}, "b": 7, "c": {"new": 8}}, destination) is destination
    assert destination == {"a": {"x": 1, "y": 5, "z": {"deep": 6}}, "b": 7, "c": {"new": 8}}


def test_a_port_that_somebody_listens_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not is_port_in_use(port)
        listener.listen()
        assert is_port_in_use(port)
        assert is_port_in_use(str(port))


def test_names():
    class Inner:
        pass

    assert get_pretty_name(nn.Linear) == "Linear"
    assert get_pretty_name(nn.Linear(1, 1)) == "Linear"
    assert get_pretty_name(Inner) == "test_names.<locals>.Inner"
    model = nn.Sequential(nn.Linear(1, 2))
    assert recursive_getattr(model, "0.weight") is model[0].weight


def test_compiled_models():
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    assert is_compiled_module(compiled)
    assert not is_compiled_module(model)
    assert has_compiled_regions(nn.Sequential(compiled))
    assert not has_compiled_regions(nn.Sequential(model))
    assert not model_has_dtensor(model)


def test_blocks_compiled_in_place_are_compiled_regions():
    model = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    assert compile_model(model, plugin) is model
    assert has_compiled_regions(model)


def test_a_state_dict_for_safetensors(tmp_path, caplog):
    from safetensors.torch import load_file, save_file

    shared = torch.ones(2, 3)
    state = {"a": shared, "b": shared, "c": shared.t(), "version": 1}
    clean = clean_state_dict_for_safetensors(state)
    assert list(clean) == ["a", "c"]
    assert "left out: b" in caplog.text
    save_file(clean, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["c"].shape == (3, 2)


def test_old_kernels_are_warned_of(monkeypatch, recwarn):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: "5.10.0-generic")
    check_os_kernel()
    assert not recwarn.list
    monkeypatch.setattr(platform, "release", lambda: "4.18.0")
    with pytest.warns(UserWarning, match="4.18.0 is older than 5.5"):
        check_os_kernel()


def test_lines_of_an_environment_file():
    with pytest.warns(UserWarning, match="'BAD' is left out") as caught:
        lines = convert_dict_to_env_variables({"A": "1", "BAD": "secret\nB=2", "C": 3})
    assert lines == ["A=1\n", "C=3\n"]
    assert "secret" not in str(caught[0].message)
