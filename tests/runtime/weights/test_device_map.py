"""Planning where modules go: limits, strategies, coverage."""

import pytest
import torch
from torch import nn

from orc.runtime import (
    check_device_map,
    clean_device_map,
    find_tied_parameters,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    retie_parameters,
)


def blocks():
    def block():
        return nn.ModuleDict({f"linear{i}": nn.Linear(2, 2) for i in (1, 2, 3)})

    return nn.ModuleDict({"block1": block(), "block2": block()})


def layers(count=4):
    """Layers of 400 bytes."""
    return nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(count)))


S = 400


def test_documented_maps():
    model = blocks()
    check_device_map(model, {"block1": 0, "block2": 1})
    check_device_map(model, {"block1": 0, "block2.linear1": 0, "block2.linear2": 1, "block2.linear3": 1})
    check_device_map(model, {"": "cpu"})
    with pytest.raises(ValueError, match=r"any device for the following parameters: block2\.linear3\.weight"):
        check_device_map(model, {"block1": 0, "block2.linear1": 1, "block2.linear2": 1})


def test_a_name_that_begins_like_another_covers_nothing():
    model = nn.ModuleDict({"block1": nn.Linear(1, 1), "block10": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="block10"):
        check_device_map(model, {"block1": 0})


def test_limits_as_text():
    assert get_max_memory({0: "10GiB", 1: "10GB", "cpu": "30GIB"}) == {0: 10 * 2**30, 1: 10**10, "cpu": 30 * 2**30}
    assert list(get_max_memory({"cpu": 5, 1: 1, 0: 1})) == [0, 1, "cpu"]
    limits = {"cpu": "1MB", 0: 7}
    get_max_memory(limits)
    assert limits == {"cpu": 10**6, 0: 7}, "Transformers compares with what it gave"
    with pytest.raises(ValueError, match="max_memory: 'gpu' is no device"):
        get_max_memory({"gpu": 1})
    with pytest.raises(ValueError, match="not in a valid format"):
        get_max_memory({0: "much"})


def test_what_is_free(monkeypatch):
    free = get_max_memory()
    assert list(free) == ["cpu"]
    assert 10**7 < free["cpu"] < 10**15
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1000 * (index + 1), 5000))
    assert list(get_max_memory().items())[:2] == [(0, 900), (1, 1800)]


def test_a_model_that_fits_is_not_spread():
    assert infer_auto_device_map(layers(), {0: 4 * S, 1: 4 * S}) == {"": 0}
    assert infer_auto_device_map(layers(), {0: 10 * S, 1: 10 * S}, clean_result=False) == dict.fromkeys("0123", 0)


def test_balanced_strategies():
    limits = {0: 10 * S, 1: 10 * S}
    assert infer_auto_device_map(layers(), get_balanced_memory(layers(), limits)) == {"0": 0, "1": 0, "2": 1, "3": 1}
    low = get_balanced_memory(layers(), limits, low_zero=True)
    assert infer_auto_device_map(layers(), low) == {"": 1}
    assert low[0] == 0
    three = dict.fromkeys(range(3), 20 * S)
    spread = infer_auto_device_map(layers(6), get_balanced_memory(layers(6), three))
    assert sorted(spread.values()) == [0, 0, 1, 1, 2, 2]


def test_balancing_one_device_changes_nothing():
    assert get_balanced_memory(layers(), {0: 100, "cpu": 50}) == {0: 100, "cpu": 50}


def test_devices_are_filled_in_order_when_memory_is_short():
    found = infer_auto_device_map(layers(8), {0: 3 * S, 1: 2 * S, "cpu": 3 * S})
    assert list(found.values()) == [0, 0, 1, 1, "cpu", "cpu", "disk", "disk"]
    balanced = get_balanced_memory(layers(8), {0: 3 * S, 1: 2 * S, "cpu": 3 * S})
    assert infer_auto_device_map(layers(8), balanced) == found


def test_tying_again():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False, device="meta")})
    retie_parameters(model, [["a.weight", "b.weight"]])
    assert model["a"].weight is model["b"].weight
    assert not model["b"].weight.is_meta
    assert find_tied_parameters(model) == [["a.weight", "b.weight"]]


def test_cleaning_a_map():
    found = clean_device_map({"a.x": 0, "a.y.1": 0, "a.y.2": 0, "b.x": 0, "b.y": 1, "c": 1})
    assert found == {"a": 0, "b.x": 0, "b.y": 1, "c": 1}
    assert clean_device_map({"a.x": "cpu", "b": "cpu"}) == {"": "cpu"}
    assert clean_device_map({"a": 0}) == {"a": 0}


def test_a_hundred_billion_parameters_take_no_memory():
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in model.parameters()) == 100_010_000_000
    assert all(parameter.is_meta for parameter in model.parameters())
    found = infer_auto_device_map(model, {0: "100GiB", 1: "150GiB", "cpu": "100GB"})
    assert list(dict.fromkeys(found.values())) == [0, 1, "cpu", "disk"]


def test_where_nothing_has_room_it_says_what_each_device_has():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    message = (
        r"no device has room for 2, which needs 16640 bytes \(cpu: 16640 of 40000 bytes used, 16640 kept free .*; "
        r"disk: 16640 of 20000 bytes used\)"
    )
    with pytest.raises(ValueError, match=message):
        infer_auto_device_map(model, {"cpu": 40000, "disk": "20KB"})
