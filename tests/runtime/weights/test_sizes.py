"""Bytes of models: the documented numbers, from shapes alone."""

import pytest
import torch
from torch import nn

from orc.runtime import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    estimate_memory,
    get_max_layer_size,
    init_empty_weights,
    named_module_tensors,
)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


class Bert(nn.Module):
    """The tensors of bert-base-cased, in its structure."""

    def __init__(self, hidden=768, layers=12, vocabulary=28996, positions=512, inner=3072):
        super().__init__()
        self.embeddings = nn.Module()
        self.embeddings.word_embeddings = nn.Embedding(vocabulary, hidden)
        self.embeddings.position_embeddings = nn.Embedding(positions, hidden)
        self.embeddings.token_type_embeddings = nn.Embedding(2, hidden)
        self.embeddings.LayerNorm = nn.LayerNorm(hidden)
        for name in ("position_ids", "token_type_ids"):
            self.embeddings.register_buffer(name, torch.zeros(1, positions, dtype=torch.int64), persistent=False)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(self.block(hidden, inner) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)

    @staticmethod
    def block(hidden, inner):
        return nn.Sequential(
            *(nn.Linear(hidden, hidden) for _ in range(4)),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, inner),
            nn.Linear(inner, hidden),
            nn.LayerNorm(hidden),
        )


def test_documented_numbers_of_bert():
    with init_empty_weights():
        model = Bert()
    assert [estimate.row() for estimate in estimate_memory(model)] == [
        ("float32", "84.95 MB", "413.18 MB", "1.61 GB"),
        ("float16", "42.47 MB", "206.59 MB", "826.36 MB"),
        ("int8", "21.24 MB", "103.29 MB", "413.18 MB"),
        ("int4", "10.62 MB", "51.65 MB", "206.59 MB"),
    ]
    total, (largest, names) = calculate_maximum_sizes(model)
    assert (total, largest, names) == (433_249_280, 89_075_712, ["embeddings.word_embeddings"])
    with pytest.raises(ValueError, match="no estimate for fp4; choose from float32, float16, int8, int4"):
        estimate_memory(model, ["fp4"])


def test_sizes_of_all_modules():
    assert compute_module_sizes(Small()) == {
        "": 236,
        "linear1": 64,
        "linear1.weight": 48,
        "linear1.bias": 16,
        "batchnorm": 72,
        "batchnorm.weight": 16,
        "batchnorm.bias": 16,
        "batchnorm.running_mean": 16,
        "batchnorm.running_var": 16,
        "batchnorm.num_batches_tracked": 8,
        "linear2": 100,
        "linear2.weight": 80,
        "linear2.bias": 20,
    }


def test_a_dtype_shrinks_what_is_wider():
    sizes = compute_module_sizes(Small(), dtype=torch.float16)
    assert (sizes["linear1"], sizes["batchnorm"], sizes["batchnorm.num_batches_tracked"]) == (32, 40, 8)
    assert compute_module_sizes(Small(), dtype=torch.float64)["linear1"] == 64
    assert compute_module_sizes(Small(), dtype="int4")["linear1"] == 8
    special = compute_module_sizes(Small(), dtype="float16", special_dtypes={"linear1.weight": torch.float32})
    assert special["linear1"] == 48 + 8


def test_buffers_only():
    assert compute_module_sizes(Small(), buffers_only=True)[""] == 40


def test_shared_tensors_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    sizes = compute_module_sizes(model)
    assert sizes[""] == 64
    assert (sizes["1"], "1" in sizes) == (0, False)  # for programs that ask for every module


def test_the_largest_layer():
    model = nn.Sequential(Small(), Small(), nn.Linear(4, 5))
    sizes = compute_module_sizes(model)
    layers = list(model.named_children())
    assert get_max_layer_size(layers, sizes, []) == (100, ["0.linear2", "1.linear2", "2"])
    assert get_max_layer_size(layers, sizes, ["Small"]) == (236, ["0", "1"])
    assert get_max_layer_size(layers, sizes, "Small") == (236, ["0", "1"])
    model._no_split_modules = ["Small"]
    assert calculate_maximum_sizes(model) == (572, (236, ["0", "1"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GiB", 10 * 2**30),
        ("10GB", 10 * 10**9),
        ("30GIB", 30 * 2**30),
        ("5MB", 5 * 10**6),
        ("1.5KB", 1500),
        ("1 kib", 1024),
        ("8Gb", 10**9),
        ("12345", 12345),
        (12345, 12345),
        (0, 0),
    ],
)
def test_sizes_as_text(text, expected):
    assert convert_file_size_to_int(text) == expected


@pytest.mark.parametrize("bad", ["10 parsecs", "-1GB", "", "GB", -1, 1.5, True, None])
def test_text_that_is_no_size(bad):
    with pytest.raises(ValueError, match="is not in a valid format"):
        convert_file_size_to_int(bad)


def test_bytes_as_text():
    shown = [convert_bytes(size) for size in (0, 1023, 1024, 413.18 * 2**20, 1.61 * 2**30, 2**50)]
    assert shown == ["0 bytes", "1023 bytes", "1.0 KB", "413.18 MB", "1.61 GB", "1.0 PB"]


def test_bytes_per_element():
    widths = {torch.float32: 4, torch.bfloat16: 2, torch.float8_e4m3fn: 1, torch.bool: 1 / 8, "int4": 0.5, "fp8": 1}
    assert {dtype: dtype_byte_size(dtype) for dtype in widths} == widths
    with pytest.raises(ValueError, match="not a valid dtype: float3"):
        dtype_byte_size("float3")


def test_named_tensors():
    def names(**options):
        return [name for name, _ in named_module_tensors(model, **options)]

    model = Small()
    model.batchnorm.register_buffer("cache", torch.zeros(1), persistent=False)
    model.scale = nn.Parameter(torch.ones(1))
    assert names() == ["scale"]
    assert names(recurse=True)[-4:] == [f"batchnorm.{n}" for n in ("running_mean", "running_var",
                                                                   "num_batches_tracked", "cache")]  # fmt: skip
    assert "batchnorm.cache" not in names(recurse=True, remove_non_persistent=True)
    assert "batchnorm.running_mean" not in names(recurse=True, include_buffers=False)
