"""Shapes and devices of nested structures."""

import collections

import pytest
import torch

from orc.runtime import (
    TensorInformation,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    pad_input_tensors,
)

Pair = collections.namedtuple("Pair", "a b")
DATA = {"x": torch.zeros(2, 3), "y": Pair(torch.zeros(4, dtype=torch.int64), ["word"])}


def test_a_structure_travels_without_its_data():
    structure = get_data_structure(DATA)
    assert structure["x"] == TensorInformation(torch.Size([2, 3]), torch.float32)
    assert structure["y"] == Pair(TensorInformation(torch.Size([4]), torch.int64), ["word"])
    made = initialize_tensors(structure)
    assert (made["x"].shape, made["y"].a.dtype, made["y"].b) == ((2, 3), torch.int64, ["word"])
    assert initialize_tensors(get_data_structure(torch.tensor(1.0))).shape == ()
    assert get_shape(DATA) == {"x": [2, 3], "y": Pair([4], ["word"])}


def test_the_first_device():
    assert find_device([1, {"a": torch.zeros(1, device="meta")}, torch.zeros(1)]) == torch.device("meta")
    assert find_device([1, "a"]) is None
    assert ignorant_find_batch_size([1, DATA]) == 2
    assert ignorant_find_batch_size("a") is None


def test_types_are_kept():
    assert honor_type([1], (x for x in "ab")) == ["a", "b"]
    assert honor_type((1,), iter("ab")) == ("a", "b")
    assert honor_type(Pair(1, 2), iter("ab")) == Pair("a", "b")
    assert is_namedtuple(Pair(1, 2))
    assert not is_namedtuple((1, 2))
    assert is_torch_tensor(torch.ones(1))
    assert not is_torch_tensor([1])
    assert is_tensor_information(TensorInformation(torch.Size([]), torch.int8))


@pytest.mark.parametrize(("rows", "processes", "expected"), [(3, 2, 4), (4, 2, 4), (1, 4, 4), (5, 3, 6)])
def test_rows_are_repeated_until_they_divide(rows, processes, expected):
    data = {"a": torch.arange(rows), "other": torch.zeros(rows + 1)}
    padded = pad_input_tensors(data, rows, processes)
    assert padded["a"].tolist() == [*range(rows), *[rows - 1] * (expected - rows)]
    assert len(padded["other"]) == rows + 1
    columns = pad_input_tensors(torch.arange(rows).repeat(2, 1), rows, processes, dim=1)
    assert columns.shape == (2, expected)
