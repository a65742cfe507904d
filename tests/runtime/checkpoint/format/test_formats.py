"""The two formats of a checkpoint's files: what is written and read, and what is refused."""

import builtins
import io
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.format import state_file
from orc.runtime.checkpoint.format.state_file import DTYPES, is_array, without_aliases, write_tensors

# Pickles


def pickle(state):
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return memory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.ones(2, dtype=np.float16),
        np.array([1 + 2j]),
        np.array(["words"]),
        np.array([b"bytes"]),
        np.array([True]),
        np.array("2024-01-01", dtype="datetime64[D]"),
        np.empty(0),
        np.array(3, dtype=np.uint8),
    ],
)
def test_arrays_of_every_plain_kind_are_taken_and_read_as_they_were(array):
    assert is_array(array)
    found = state_file.read(pickle({"a": array}))["a"]
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tolist() == array.tolist()


def test_other_things_are_no_arrays():
    class ndarray:
        dtype = np.dtype("int64")

    class Own(np.ndarray):
        pass

    others = [np.float64(1), np.array([object()]), np.zeros(1, dtype=[("x", "i4")]), [1], torch.zeros(1), ndarray()]
    assert [is_array(one) for one in (*others, np.zeros(1).view(Own))] == [False] * 7


@pytest.mark.parametrize("environment", [{}, {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}])
def test_what_could_run_code_is_not_read_whatever_the_environment_allows(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    class Code:
        def __reduce__(self):
            return print, ("run",)

    for state in (Code(), {"a": [Code()]}, np.array([Code()])):
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            state_file.read(pickle(state))


def test_what_a_script_has_allowed_stays_allowed_and_nothing_is_added():
    class Own:
        pass

    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([Own, np.ndarray])
    try:
        allowed = torch.serialization.get_safe_globals()
        assert state_file.read(pickle({"a": np.zeros(1)}))["a"].tolist() == [0.0]
        assert sorted(map(str, torch.serialization.get_safe_globals())) == sorted(map(str, allowed))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_tensors_go_where_they_are_wanted(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "a")
    assert state_file.read(tmp_path / "a")["x"].tolist() == [1.0, 1.0]
    assert state_file.read(tmp_path / "a", "meta")["x"].device.type == "meta"


def test_a_file_is_mapped_where_that_is_asked_for(tmp_path):
    path = tmp_path / "a"
    torch.save({"x": torch.ones(2)}, path)

    def is_mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    state = state_file.read(path, "cpu")
    assert not is_mapped()
    state = state_file.read(path, "cpu", mmap=True)
    assert is_mapped()
    assert state["x"].tolist() == [1.0, 1.0]


def test_without_numpy_all_else_is_read(monkeypatch):
    memory, real = pickle({"x": torch.ones(2), "n": [1, "a"]}), builtins.__import__

    def imported(name, *arguments, **options):
        if name == "numpy":
            raise ImportError("no numpy")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", imported)
    assert state_file.read(memory)["n"] == [1, "a"]


def test_with_a_torch_that_can_allow_nothing_arrays_are_no_part_of_a_state(monkeypatch):
    monkeypatch.setattr(state_file, "_CAN_ALLOW", False)
    assert not is_array(np.zeros(1))
    assert state_file.read(pickle({"n": 1})) == {"n": 1}
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        state_file.read(pickle({"a": np.zeros(1)}))


# Safetensors


def written(tensors, metadata=None):
    memory = io.BytesIO()
    write_tensors(memory, tensors, metadata or {})
    return memory.getvalue()


def header(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_element_is_read_by_the_library_as_it_was_written(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    found = load_tensors(written({"a": tensor, "empty": torch.empty(0, 3, dtype=dtype)}))
    assert (found["a"].dtype, found["a"].shape, found["empty"].shape) == (dtype, (2, 3), (0, 3))
    assert found["a"].view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()


def test_tensors_of_any_layout_and_with_gradients_are_written():
    tensors = {
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "every other": torch.arange(6.0)[::2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(3.0),
    }
    found = load_tensors(written(tensors))
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }


def test_the_widest_elements_come_first_and_the_content_is_aligned():
    content = written(
        {
            "c": torch.ones(1, dtype=torch.uint8),
            "b": torch.ones(1, dtype=torch.float64),
            "d": torch.ones(2, dtype=torch.float32),
            "a": torch.ones(1, dtype=torch.uint8),
        },
        {"format": "pt"},
    )
    found, size = header(content)
    assert found == {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        "d": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [16, 17]},
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [17, 18]},
    }
    assert list(found) == ["__metadata__", "b", "d", "a", "c"]
    assert size % 8 == 0
    text = json.dumps(found, separators=(",", ":")).encode()
    assert content[8:].startswith(text + b" " * (size - len(text)))
    assert size - len(text) < 8
    assert len(content) == 8 + size + 18


def test_a_type_without_a_name_in_the_format_is_refused_before_anything_is_written():
    memory = io.BytesIO()
    with pytest.raises(CheckpointError) as told:
        write_tensors(memory, {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)}, {})
    assert str(told.value) == "b has dtype torch.complex128, which safetensors cannot store"
    assert memory.getvalue() == b""


def test_a_tensor_with_several_names_is_kept_under_the_first():
    shared, other = torch.arange(4.0), torch.ones(4)
    state = OrderedDict(a=shared, b=other, c=shared, d=shared.detach(), e=torch.empty(0), f=torch.empty(0))
    kept, aliases = without_aliases(state)
    assert list(kept) == ["a", "b", "e", "f"], "what is empty shares nothing"
    assert kept["a"] is shared
    assert aliases == {"c": "a", "d": "a"}


@pytest.mark.parametrize(
    "view",
    [
        lambda square: square[:1],
        lambda square: square.view(-1),
        lambda square: square.t(),
        lambda square: square.view(torch.int32),
        lambda square: square.clone(),
    ],
)
def test_another_look_at_the_same_memory_is_a_tensor_of_its_own(view):
    square = torch.arange(4.0).reshape(2, 2)
    kept, aliases = without_aliases({"a": square, "b": view(square), "c": square.view(2, 2)})
    assert list(kept) == ["a", "b"]
    assert aliases == {"c": "a"}


def test_what_is_no_tensor_cannot_be_stored():
    with pytest.raises(CheckpointError) as told:
        without_aliases({"a": torch.ones(1), "extra": [1]})
    assert str(told.value) == (
        "the state of the model holds extra of type list, which safetensors cannot store: pass safe_serialization=False"
    )
