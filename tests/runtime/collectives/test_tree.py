"""Local operations on nested structures."""

import collections
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orc.runtime.collectives.tree import (
    concatenate,
    convert_to_fp32,
    elements,
    find_batch_size,
    flatten,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
    unflatten,
)

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Output:
    loss: object
    extra: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


LEAVES = st.one_of(st.integers(0, 9).map(torch.tensor), st.integers(), st.text(max_size=3), st.none())
TREES = st.recursive(
    LEAVES,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), child, max_size=3),
        st.dictionaries(st.text(max_size=2), child, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, child, child),
        st.builds(Output, child, child),
        st.builds(Frozen, child),
    ),
    max_leaves=12,
)


@given(TREES)
def test_flatten_and_unflatten_are_inverse(tree):
    leaves, spec = flatten(tree)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    rebuilt = unflatten(spec, leaves)
    before, after = list(elements(tree)), list(elements(rebuilt))
    assert [path for path, _ in before] == [path for path, _ in after]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))
    assert type(rebuilt) is type(tree)


def test_special_mappings_keep_what_they_are():
    original = collections.defaultdict(list, a=torch.ones(1))
    result = recursively_apply(lambda t: t + 1, original)
    assert type(result) is collections.defaultdict
    assert result["missing"] == []
    assert original["a"].item() == 1.0

    class Batch(collections.UserDict):
        note = None

    batch = Batch(x=torch.ones(1))
    batch.note = "kept"
    result = send_to_device(batch, "cpu")
    assert (type(result).__name__, result.note, list(result)) == ("Batch", "kept", ["x"])


def test_paths_name_every_element():
    tree = {"a": [1, (torch.ones(1),)], "b": Output(loss=2)}
    assert [path for path, _ in elements(tree)] == ["['a'][0]", "['a'][1][0]", "['b']['loss']", "['b']['extra']"]


def test_recursively_apply():
    data = {"x": torch.ones(2), "y": ["text", torch.zeros(1)]}
    assert recursively_apply(lambda t, n: t.numel() + n, data, 10) == {"x": 12, "y": ["text", 11]}
    assert recursively_apply(str.upper, data, test_type=lambda v: isinstance(v, str))["y"][0] == "TEXT"
    with pytest.raises(TypeError, match="cannot be applied to str"):
        recursively_apply(torch.sum, data, error_on_other_type=True)


def test_send_to_device():
    data = Pair({"x": torch.ones(2), "skip": torch.ones(1), "n": 3}, [torch.zeros(1)])
    result = send_to_device(data, "meta", skip_keys="skip")
    assert (result.a["x"].device.type, result.a["skip"].device.type, result.a["n"]) == ("meta", "cpu", 3)
    assert result.b[0].device.type == "meta"
    assert send_to_device(data.a["x"], "cpu") is data.a["x"], "what is there already is not copied"

    class Own:
        def to(self, device):
            return f"on {device}"

    assert send_to_device([Own()], "cpu") == ["on cpu"]


def test_small_helpers():
    data = {"none": torch.tensor(1.0), "x": [torch.arange(6).view(3, 2)]}
    assert find_batch_size(data) == 3
    assert find_batch_size({"a": 1}) is None
    assert slice_tensors(data["x"], slice(1, 3))[0].tolist() == [[2, 3], [4, 5]]
    assert listify(data) == {"none": 1.0, "x": [[[0, 1], [2, 3], [4, 5]]]}
    joined = concatenate([{"a": torch.zeros(1, 2)}, {"a": torch.ones(2, 2)}])
    assert joined["a"].tolist() == [[0, 0], [1, 1], [1, 1]]
    with pytest.raises(TypeError, match="2, 1 tensors"):
        concatenate([[torch.ones(1), torch.ones(1)], [torch.ones(1)]])
    halves = convert_to_fp32({"h": torch.ones(1, dtype=torch.float16), "i": torch.ones(1, dtype=torch.int8)})
    assert (halves["h"].dtype, halves["i"].dtype) == (torch.float32, torch.int8)


def test_concatenate_joins_by_key_not_by_position():
    joined = concatenate([{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(2), "a": torch.zeros(2)}])
    assert {key: tensor.tolist() for key, tensor in joined.items()} == {"a": [0.0] * 3, "b": [1.0] * 3}
    assert list(joined) == ["a", "b"]
