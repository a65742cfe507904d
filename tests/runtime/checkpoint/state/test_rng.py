"""The random number generators: what is saved of each, and what cannot be restored."""

import builtins
import random
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
    """GPUs whose generators are numbers."""

    def __init__(self, monkeypatch, states):
        self.states, self.asked = states, []
        cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: len(self.states),
            get_rng_state_all=lambda: list(self.states),
            set_rng_state_all=lambda states: self.asked.append(("all", states)),
            set_rng_state=lambda state, device: self.asked.append((state, device)),
        )
        monkeypatch.setattr(torch, "cuda", cuda)


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


def test_generators_of_all_gpus_are_saved_and_each_gets_its_own(monkeypatch):
    gpus = Gpus(monkeypatch, ["zero", "one"])
    state = capture()
    assert state["cuda"] == ["zero", "one"]
    restore(state, torch.device("cuda", 1))
    assert gpus.asked == [("all", ["zero", "one"])]


@pytest.mark.parametrize(
    ("index", "saved", "expected"),
    [
        (1, ["zero", "one", "two"], "one"),
        (0, ["zero", "one", "two"], "zero"),
        (None, ["zero", "one", "two"], "zero"),
        (1, ["only"], "only"),
        (2, ["zero", "one", "two", "three"], "two"),
        (3, ["zero", "one", "two"], "two"),
    ],
)
def test_a_process_that_sees_other_gpus_gets_the_generator_of_its_own(monkeypatch, index, saved, expected):
    gpus = Gpus(monkeypatch, ["a", "b"])
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    restore(capture() | {"cuda": saved}, device)
    assert gpus.asked == [(expected, device)]


def test_what_was_saved_without_a_gpu_is_not_restored_on_one(monkeypatch):
    state = capture()
    Gpus(monkeypatch, ["a"])
    with pytest.raises(CheckpointError, match=r"^it was saved without a GPU$"):
        restore(state, CPU)


def test_what_was_saved_on_a_gpu_is_restored_without():
    restore(capture() | {"cuda": ["zero"], "mps": "nothing here"}, CPU)


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
