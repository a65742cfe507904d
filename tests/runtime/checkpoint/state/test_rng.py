"""The random number generators: what is saved of each, and what cannot be restored."""

import builtins
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state import rng
from orc.runtime.checkpoint.state.rng import capture, reseed, restore
from orc.runtime.core.compute import Compute
from orc.runtime.train import seeding

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeds():
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    random.gauss(0, 1), np.random.randn()


def draw():
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(2).tolist()


class Xla(Compute):
    """The generator of torch_xla."""

    library = "torch_xla"
    state = 7

    def rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state


class Gpus:
    """GPUs whose generators are texts; they take texts only."""

    def __init__(self, monkeypatch, states):
        self.states, self.seeded = states, []
        cuda = SimpleNamespace(
            device_count=lambda: len(self.states),
            get_rng_state=lambda device: self.states[device.index],
            set_rng_state=self.put,
            device=lambda device: nullcontext(),
            manual_seed=self.seeded.append,
        )
        monkeypatch.setattr(torch, "cuda", cuda)

    def put(self, state, device):
        if not isinstance(state, str):
            raise RuntimeError("RNG state is wrong size")
        self.states[device.index] = state


def test_every_generator_goes_on_where_it_was_and_its_state_is_plain():
    state = capture()
    expected = draw()
    assert draw() != expected
    restore(state, CPU)
    assert draw() == expected
    version, internal, gauss = state["python"]
    assert (version, len(internal), type(gauss)) == (3, 625, float)
    name, keys, position, has_gauss, cached = state["numpy"]
    assert (name, keys.dtype, keys.shape) == ("MT19937", torch.int64, (624,))
    assert [type(one) for one in (name, position, has_gauss, cached)] == [str, int, int, float]
    assert has_gauss == 1
    assert sorted(state) == ["numpy", "python", "torch"]


def test_a_state_holds_from_the_moment_it_was_taken():
    state = capture()
    copy = state["numpy"][1].clone(), state["torch"].clone()
    np.random.rand(2000)
    torch.rand(3)
    assert torch.equal(state["numpy"][1], copy[0])
    assert torch.equal(state["torch"], copy[1])


def test_without_numpy_the_others_are_saved_and_restored(monkeypatch):
    real = builtins.__import__

    def imported(name, *arguments, **options):
        if name == "numpy":
            raise ImportError("no numpy")
        return real(name, *arguments, **options)

    whole = capture()
    monkeypatch.setattr(builtins, "__import__", imported)
    state = capture()
    assert sorted(state) == ["python", "torch"]
    expected = random.random(), torch.rand(2).tolist()
    restore(state, CPU)
    assert (random.random(), torch.rand(2).tolist()) == expected
    with pytest.raises(CheckpointError, match=r"^random number generators cannot be restored: no numpy$"):
        restore(whole, CPU)


def test_a_state_that_lacks_something_or_is_none_is_refused():
    whole = capture()
    for spoiled, reason in [
        ({name: value for name, value in whole.items() if name != "python"}, "'python'"),
        ({name: value for name, value in whole.items() if name != "torch"}, "'torch'"),
        (whole | {"python": 3}, "cannot unpack non-iterable int object"),
        (whole | {"python": (1, 2)}, "not enough values to unpack (expected 3, got 2)"),
    ]:
        with pytest.raises(CheckpointError) as told:
            restore(spoiled, CPU)
        assert str(told.value) == f"random number generators cannot be restored: {reason}"


def test_the_generator_of_the_gpu_that_a_process_uses_is_saved_whatever_its_number_is_later(monkeypatch):
    gpus = Gpus(monkeypatch, ["zero", "one"])
    state = capture(device=torch.device("cuda", 1))
    assert state["cuda"] == "one"
    for index, expected in ((0, ["one", "x"]), (1, ["x", "one"])):
        gpus.states[:] = ["x", "x"]
        restore(state, torch.device("cuda", index))
        assert gpus.states == expected
    assert gpus.seeded == []
    assert "cuda" not in capture(device=CPU), "a process on the CPU opens no GPU"


@pytest.mark.parametrize(
    ("saved", "reason"), [({}, "it was saved without a GPU"), ({"cuda": 3}, "RNG state is wrong size")]
)
def test_a_state_that_does_not_fit_the_gpu_is_a_warning_and_a_seed_that_is_the_same_each_time(
    monkeypatch, saved, reason
):
    state = capture() | saved
    gpus = Gpus(monkeypatch, ["a", "a"])
    for index in (0, 0, 1):
        with pytest.warns(UserWarning, match=f"the random numbers on cuda:{index} begin anew.*{reason}"):
            restore(state, torch.device("cuda", index))
    assert gpus.states == ["a", "a"]
    assert gpus.seeded[0] == gpus.seeded[1] != gpus.seeded[2]
    assert torch.equal(torch.get_rng_state(), state["torch"])


def test_what_was_saved_on_a_gpu_is_restored_without():
    restore(capture() | {"cuda": "zero", "mps": "nothing here"}, CPU)


def test_the_generator_of_apples_gpus_is_saved_and_restored(monkeypatch):
    plain, got = capture(), []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(get_rng_state=lambda: "m", set_rng_state=got.append))
    state = capture()
    assert state["mps"] == "m"
    restore(plain, CPU)
    assert got == []
    restore(state, CPU)
    assert got == ["m"]


def test_the_generator_of_torch_xla_is_saved_and_restored():
    xla = Xla()
    state = capture(xla)
    assert state["xla"] == 7
    xla.state = 8
    restore(state, CPU)
    assert xla.state == 8
    restore(state, CPU, xla)
    assert xla.state == 7
    with pytest.raises(CheckpointError, match=r"^it was saved without torch_xla$"):
        restore(capture(), CPU, xla)


def test_a_new_rank_is_seeded_by_checkpoint_and_rank(monkeypatch):
    seeds = []
    monkeypatch.setattr(seeding, "set_seed", seeds.append)
    for name, rank in (("0af3", 0), ("0af3", 5), ("0af4", 5)):
        rng.reseed(name, rank)
    assert seeds == [626701373, 4000306006, 2435704398]
    monkeypatch.undo()
    reseed("0af3", 5)
    first = draw()
    reseed("0af3", 5)
    assert draw() == first
