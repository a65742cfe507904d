"""Seeds, and generators that are equal on all processes."""

import random
import sys
import types

import numpy
import pytest
import torch

from orc.runtime import Accelerator, RunContext, set_seed, synchronize_rng_state, synchronize_rng_states, use_context
from orc.runtime.core.availability import is_package


def draws():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_set_seed_repeats_python_numpy_and_torch():
    set_seed(42)
    first = draws()
    set_seed(42)
    assert draws() == first
    set_seed(43)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_deterministic_algorithms():
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.distributed
def test_a_device_specific_seed_differs_per_process(run_ranks):
    def body():
        Accelerator()
        set_seed(10, device_specific=True)
        mine = draws()
        set_seed(10)
        return mine, draws()

    (mine_0, common_0), (mine_1, common_1) = run_ranks(2, body)
    assert common_0 == common_1 == mine_0 != mine_1


@pytest.mark.distributed
def test_generators_take_the_state_of_rank_0(run_ranks):
    def body():
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        generator = torch.Generator().manual_seed(100 + accelerator.process_index)
        synchronize_rng_states(["torch", "generator"], generator)
        return torch.rand(1).item(), torch.rand(1, generator=generator).item()

    zero, one = run_ranks(2, body)
    assert zero == one
    torch.manual_seed(0)
    assert zero[0] == torch.rand(1).item()


def test_xla_is_seeded_where_it_is(monkeypatch):
    seeds = []
    package, model = types.ModuleType("torch_xla"), types.ModuleType("torch_xla.core.xla_model")
    package.__file__ = "torch_xla.py"
    model.set_rng_state = seeds.append
    model.get_rng_state = lambda: 7
    monkeypatch.setitem(sys.modules, "torch_xla", package)
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    is_package.cache_clear()
    try:
        set_seed(42)
        with use_context(RunContext.fake(0, 2)):
            synchronize_rng_state("xla")
    finally:
        is_package.cache_clear()
    assert seeds == [42, 7]


def test_generators_of_absent_devices_are_refused():
    with use_context(RunContext.fake(0, 2)):
        for kind in ("xpu", "npu", "xla"):
            with pytest.raises(ValueError, match=f"there is no {kind} device here"):
                synchronize_rng_state(kind)


def test_wrong_generators_are_refused():
    with pytest.raises(ValueError, match="unknown random number generator 'numpy'"):
        synchronize_rng_state("numpy")
    with pytest.raises(ValueError, match="needs the generator"):
        synchronize_rng_state("generator")
