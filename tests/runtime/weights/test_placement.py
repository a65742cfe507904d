"""Rules that every plan keeps, tried on random trees of modules; ties over boundaries, buffers, balance."""

import random
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn

from orc.runtime import check_device_map, get_balanced_memory, infer_auto_device_map
from orc.runtime.memory.sizes import element_size


class Tree(nn.Module):
    """Random modules and tensors, on the meta device."""

    def __init__(self, chance, depth):
        super().__init__()
        if chance.random() < 0.2:
            self.scale = nn.Parameter(torch.empty(chance.randint(1, 20), device="meta"))
        for number in range(chance.randint(1, 4)):
            kinds = [Leaf, Leaf, Block, Group] if depth else [Leaf, Leaf, nn.Identity]
            kind = chance.choice(kinds)
            self.add_module(f"m{number}", kind(chance, depth - 1))
        if chance.random() < 0.2:
            self.register_buffer("mask", torch.empty(chance.randint(1, 60), device="meta", dtype=torch.int64))


class Block(Tree):
    pass


class Group(Tree):
    pass


class Leaf(nn.Module):
    def __init__(self, chance, depth):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(chance.randint(1, 12), chance.randint(1, 12), device="meta"))
        if chance.random() < 0.3:
            self.bias = nn.Parameter(torch.empty(chance.randint(1, 12), device="meta"))
        if chance.random() < 0.15:
            persistent = chance.random() < 0.5
            self.register_buffer("table", torch.empty(chance.randint(1, 99), device="meta"), persistent=persistent)


def names(model):
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def is_under(name, module):
    return not module or name == module or name.startswith(f"{module}.")


class Case:
    """A random tree, maybe with ties, and what a plan is asked for."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.model = Tree(chance, 3)
        leaves = [module for module in self.model.modules() if isinstance(module, Leaf)]
        if chance.random() < 0.5 and len(leaves) > 1:
            for follower in chance.sample(leaves[1:], min(len(leaves) - 1, chance.randint(1, 2))):
                follower.weight = leaves[0].weight
        self.whole = chance.choice([(), ("Block",), ("Group",), ("Block", "Group")])
        self.dtype = chance.choice([None, None, "float16", "int8"])
        parameters = [name for name, _ in self.model.named_parameters()]
        self.special = dict.fromkeys(chance.sample(parameters, chance.randint(0, 1)), "float32")
        self.bytes = {}
        for name, tensor in names(self.model).items():
            size = tensor.numel() * element_size(tensor, self.dtype, self.special.get(name))
            self.bytes.setdefault(id(tensor), size)
        total = int(sum(self.bytes.values()))
        self.limits = {
            key: int(total * chance.choice([0, 0.1, 0.3, 0.5, 0.9, 1.2])) for key in range(chance.randint(0, 3))
        }
        self.limits["cpu"] = int(total * chance.choice([0.05, 0.3, 0.7, 2]))
        self.fallback, self.clean = chance.random() < 0.5, chance.random() < 0.7

    def plan(self, limits=None):
        return infer_auto_device_map(
            self.model, limits or dict(self.limits), list(self.whole), self.dtype, self.special,
            clean_result=self.clean, offload_buffers=True, fallback_allocation=self.fallback,
        )  # fmt: skip

    def inside(self, *modules):
        """The tensors inside of *modules*, each once."""
        own = names(self.model).items()
        return {id(tensor) for name, tensor in own if any(is_under(name, module) for module in modules)}

    def size(self, tensors):
        return sum(self.bytes[tensor] for tensor in tensors)

    def layers(self):
        """The layers that have parameters: what is placed as a whole."""
        found, waiting = [], list(self.model.named_children())
        found += [name for name, _ in self.model.named_parameters(recurse=False)]
        while waiting:
            name, module = waiting.pop()
            children = list(module.named_children())
            if not children or type(module).__name__ in self.whole:
                found += [name] if any(True for _ in module.parameters()) else []
            else:
                found += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
                waiting += [(f"{name}.{key}", child) for key, child in children]
        return found


def held(case, plan):
    """The tensors on each device of *plan*."""
    by_device = defaultdict(list)
    for name, device in plan.items():
        by_device[device].append(name)
    return {device: case.inside(*modules) for device, modules in by_device.items()}


def place(name, plan):
    return next(device for module, device in plan.items() if is_under(name, module))


SEEDS = range(200)


@pytest.fixture(scope="module")
def plans():
    cases = [Case(seed) for seed in SEEDS]
    return [(case, case.plan()) for case in cases]


def test_every_parameter_and_buffer_is_in_one_entry(plans):
    for case, plan in plans:
        check_device_map(case.model, plan)
        for name in names(case.model):
            assert sum(is_under(name, module) for module in plan) == 1, (name, plan)


def test_no_device_holds_more_than_its_limit_buffers_and_each_tied_weight_included(plans):
    for case, plan in plans:
        for device, tensors in held(case, plan).items():
            assert case.size(tensors) <= case.limits.get(device, float("inf")), (device, plan)


def test_no_module_of_a_class_that_stays_whole_is_split(plans):
    split = 0
    for case, plan in plans:
        for name, module in case.model.named_modules():
            places = {place(f"{name}.{key}" if name else key, plan) for key in names(module)}
            split += bool(name) and len(places) > 1
            assert len(places) <= 1 or type(module).__name__ not in case.whole, (name, plan)
    assert split > 50, "the trees are too small for their devices"


def test_offloaded_layers_fit_where_they_come_to(plans):
    tried = 0
    for case, plan in plans:
        on = held(case, plan)
        for keeper, away in ((0, ("cpu", "disk")), ("cpu", ("disk",))):
            layers = [layer for layer in case.layers() if place(layer, plan) in away]
            if case.size(on.get(keeper, ())) and layers:
                needed = max(case.size(on[keeper] | case.inside(layer)) for layer in layers)
                assert needed <= case.limits[keeper], (keeper, plan)
                tried += 1
    assert tried > 20


def test_the_fallback_leaves_a_device_empty_only_if_no_layer_fits(plans):
    tried = 0
    for case, plan in plans:
        order = [*(key for key in case.limits if key != "cpu"), "cpu", "disk"]
        for device in [key for key in order[:-1] if case.fallback and not case.size(held(case, plan).get(key, ()))]:
            waiting = [layer for layer in case.layers() if order.index(place(layer, plan)) > order.index(device)]
            for layer in waiting:
                others = [case.size(case.inside(other)) for other in waiting if other != layer]
                kept = max(others, default=0) if device in (0, "cpu") else 0
                size = case.size(case.inside(layer))
                assert not 0 < size <= case.limits[device] - kept, (device, layer, plan)
                tried += 1
    assert tried > 50


def test_balanced_limits_lower_the_peak_and_offload_nothing_that_fits():
    lower = 0
    for seed in SEEDS:
        case = Case(seed)
        limits = {key: 2 * limit for key, limit in case.limits.items()}
        balanced = get_balanced_memory(case.model, dict(limits), list(case.whole), case.dtype, case.special)
        assert all(balanced[key] <= limits[key] for key in limits)
        case.fallback = False
        (full, even) = (held(case, case.plan(dict(given))) for given in (limits, balanced))
        if not full.keys() & {"cpu", "disk"} and even.keys() != full.keys():
            assert not even.keys() & {"cpu", "disk"}
            peaks = [max(case.size(tensors) for tensors in on.values()) for on in (even, full)]
            assert peaks[0] <= peaks[1], seed
            lower += peaks[0] < peaks[1]
    assert lower > 30


def linear(size):
    return nn.Linear(size // 4, 1, bias=False, device="meta")


@pytest.mark.parametrize(("blocks", "devices", "places"), [(1, 2, [0]), (3, 3, [0, 1, 2]), (4, 3, [0, 1, 1, 2])])
def test_blocks_that_stay_whole_are_spread_over_all_devices(blocks, devices, places):
    class Pair(nn.Sequential):
        pass

    model = nn.Sequential(*(Pair(linear(100), linear(100)) for _ in range(blocks)))
    limits = get_balanced_memory(model, dict.fromkeys(range(devices), 1000), "Pair")
    plan = infer_auto_device_map(model, limits, "Pair", clean_result=False)
    assert list(plan.values()) == places


def test_where_device_0_has_no_room_leaving_it_free_changes_nothing():
    model = nn.Sequential(*(linear(100) for _ in range(4)))
    limits = {0: 0, 1: 1000, 2: 1000}
    assert get_balanced_memory(model, limits, low_zero=True) == get_balanced_memory(model, limits)


def test_a_small_device_leaves_its_share_to_the_others():
    model = nn.Sequential(*(linear(20) for _ in range(45)))
    plan = infer_auto_device_map(model, get_balanced_memory(model, {0: 2000, 1: 100, 2: 2000}))
    assert [list(plan.values()).count(device) for device in range(3)] == [20, 5, 20]


def with_tie(extra=0):
    """A layer of 100 bytes, and a module with one of 48 and one that shares the 100 and has *extra* bytes."""
    shared = linear(100)
    head = nn.Linear(25, 1, bias=False, device="meta")
    head.weight = shared.weight
    if extra:
        head.register_buffer("table", torch.empty(extra // 4, device="meta"))
    return nn.ModuleDict({"embed": shared, "block": nn.ModuleDict({"inner": linear(48), "head": head})})


def test_a_tied_layer_inside_of_another_module_comes_along():
    model = nn.ModuleDict({**with_tie(extra=20), "last": linear(48)})
    plan = infer_auto_device_map(model, {0: 170, 1: 1000})
    assert plan == {"embed": 0, "block.head": 0, "block.inner": 1, "last": 1}


def test_a_weight_that_stays_on_two_devices_needs_room_on_both():
    model = with_tie(extra=80)
    assert infer_auto_device_map(model, {0: 100, 1: 228}, "ModuleDict") == {"": 1}
    assert infer_auto_device_map(model, {0: 0, 1: 120, 2: 228}, "ModuleDict") == {"embed": 1, "block": 2}
    plan = infer_auto_device_map(model, {0: 0, 1: 120, 2: 227}, "ModuleDict", offload_buffers=True)
    assert plan == {"embed": 1, "block": "disk"}


def test_a_weight_that_is_on_a_device_already_needs_no_room_again():
    model = nn.ModuleDict({"embed": linear(100), "norm": linear(100), "head": linear(100)})
    for name, own in (("norm", 20), ("head", 500)):
        model[name].weight = model["embed"].weight
        model[name].register_buffer("table", torch.empty(own // 4, device="meta"))
    plan = infer_auto_device_map(model, {0: 0, 1: 120, 2: 1000})
    assert plan == {"embed": 1, "norm": 1, "head": 2}


def test_the_last_layer_needs_no_room_for_another():
    model = nn.Sequential(*(linear(100) for _ in range(4)))
    assert infer_auto_device_map(model, {0: 200, "cpu": 300}) == {"0": 0, "1": "cpu", "2": "cpu", "3": "cpu"}


def test_buffers_stay_beside_the_largest_offloaded_layer_or_it_warns():
    model = nn.Sequential(linear(100), linear(100))
    model[0].register_buffer("table", torch.empty(10, device="meta"))
    model[1].register_buffer("table", torch.empty(10, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infer_auto_device_map(model, {0: 180, "cpu": 1000}) == {"": "cpu"}
        assert infer_auto_device_map(model, {0: 179, "cpu": 1000}, offload_buffers=True) == {"": "cpu"}
    with pytest.warns(UserWarning, match=r"buffers of the offloaded layers \(80 bytes\) do not fit on device 0"):
        infer_auto_device_map(model, {0: 179, "cpu": 1000})
