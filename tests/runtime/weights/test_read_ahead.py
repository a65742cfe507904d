"""Weights of the next layer that are brought to the device ahead of their turn: order, bounds, changes, failures."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from orc.runtime import align_module_device, cpu_offload, disk_offload, has_offloaded_params
from orc.runtime.hooks import remove_hook_from_submodules
from orc.runtime.weights.alignment import align_hooks
from orc.runtime.weights.dispatch import share_read_ahead
from orc.runtime.weights.read_ahead import ReadAhead

CPU = torch.device("cpu")
WIDTH, LAYERS, BUFFER = 16, 5, 300  # a layer's weights are four parts of a buffer's size


class LateLane:
    """Lane whose copies take place only when someone waits for them: a buffer that is filled too soon is copied wrong.

    A mark is a number of copies; what was computed has one below zero.
    """

    def __init__(self, room: int = 2**20) -> None:
        self.free = room
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.buffers: list[int] = []
        self.handed: list[int] = []
        self.threads: set[str] = set()
        self.layers = self.layers_waited_for = 0

    def buffer(self, size: int) -> torch.Tensor:
        self.buffers.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)

    def has_room(self, size: int) -> bool:
        return size <= self.free

    def room(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        assert self.layers_waited_for == self.layers, "memory of a third layer"
        return torch.full(shape, torch.nan, dtype=dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> int:
        self.asked.append((source, target))
        return len(self.asked)

    def computed(self) -> int:
        self.layers += 1
        return -self.layers

    def wait(self, mark: int) -> None:
        if mark < 0:
            self.layers_waited_for = -mark
            return
        for source, target in self.asked[self.done : mark]:
            target.copy_(source)
        self.done = max(self.done, mark)

    def hand_over(self, tensors: list[torch.Tensor], mark: int) -> None:
        self.wait(mark)
        self.handed.append(len(tensors))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()


@pytest.fixture
def lane() -> LateLane:
    return LateLane()


@pytest.fixture
def ahead(lane: LateLane) -> ReadAhead:
    return ReadAhead(CPU, lane, buffer_bytes=BUFFER)


X = torch.randn(3, WIDTH)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_layers_come_ahead_in_the_order_of_the_pass_before(tmp_path, lane, ahead, where):
    model = layers()
    expected = model(X)
    cpu_offload(model) if where == "cpu" else disk_offload(model, tmp_path)
    share_read_ahead(model, ahead)
    assert torch.equal(model(X), expected)
    assert not lane.handed, "the order is not known yet"
    for passes in (1, 2):
        with torch.inference_mode(where == "disk"):
            assert torch.equal(model(X), expected)
        assert lane.handed == [2] * (LAYERS - 1) * passes, "all but the first, each weight and bias"
    assert lane.done == len(lane.asked)
    assert lane.buffers == [BUFFER, BUFFER]
    assert lane.threads == {"orc-read-ahead_0"}
    assert all(value.is_meta for value in model.parameters())


def test_another_order_and_a_failure_give_up_what_is_on_its_way(lane, ahead):
    model = layers()
    cpu_offload(model)
    share_read_ahead(model, ahead)
    whole = layers()
    for _ in range(2):
        model(X)
    before = len(lane.handed)
    for index in (3, 1, 4, 0, 2):
        assert torch.equal(model[index](X), whole[index](X))
    assert len(lane.handed) == before
    for _ in range(2):
        model(X)
    with pytest.raises(RuntimeError):
        model[1](torch.zeros(1, WIDTH + 1))
    assert all(value.is_meta for value in model.parameters())
    assert torch.equal(model(X), whole(X))
    before = lane.layers
    model(X)
    assert lane.layers - before == LAYERS - 1, "nothing for the pass after"


def test_weights_that_were_changed_since_are_not_used(lane, ahead):
    model, state = layers(), layers().state_dict()
    cpu_offload(model, state_dict=state)
    share_read_ahead(model, ahead)
    for _ in range(2):
        model(X)
    assert torch.equal(model[0](X), layers()[0](X))  # the weights of the second are on their way
    with torch.no_grad():
        state["1.weight"].zero_()
    assert torch.equal(model[1](X), state["1.bias"].expand(3, -1))
    (hook,) = align_hooks(model[2])
    hook.weights_map = {"weight": torch.zeros(WIDTH, WIDTH), "bias": torch.ones(WIDTH)}
    assert torch.equal(model[2](X), torch.ones(3, WIDTH))


def test_where_there_is_no_room_for_two_layers_each_comes_in_its_turn(ahead, lane):
    model = layers()
    expected = model(X)
    lane.free = 4 * WIDTH * WIDTH  # without the bias
    cpu_offload(model)
    share_read_ahead(model, ahead)
    for _ in range(3):
        assert torch.equal(model(X), expected)
    assert not lane.asked


def test_weights_become_the_data_type_of_the_model_and_tied_ones_come_once(lane, ahead):
    model = layers()
    model[3].weight = model[1].weight
    expected = copy.deepcopy(model).to(torch.bfloat16)(X.bfloat16())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["3.weight"] = state["1.weight"]
    cpu_offload(model.to(torch.bfloat16), state_dict=state)
    share_read_ahead(model, ahead)
    for _ in range(3):
        assert torch.equal(model(X.bfloat16()), expected)
    assert lane.handed == 2 * [1, 2, 1, 2]


def test_an_error_in_the_thread_is_raised_where_its_layer_is_used(lane, ahead, monkeypatch):
    model = layers()
    expected = model(X)
    cpu_offload(model)
    share_read_ahead(model, ahead)
    for _ in range(2):
        model(X)
    monkeypatch.setattr(lane, "room", lambda shape, dtype: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(OSError, match="the disk is gone"):
        model(X)
    assert all(value.is_meta for value in model.parameters())
    monkeypatch.undo()
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_reads_ahead_for_itself(lane, ahead, again):
    model = layers()
    cpu_offload(model)
    share_read_ahead(model, ahead)
    for _ in range(2):
        model(X)
    other = again(model)
    shared = {id(hook.read_ahead) for one in other for hook in align_hooks(one)}
    assert len(shared) == 1
    assert id(ahead) not in shared
    remove_hook_from_submodules(model)
    assert not has_offloaded_params(model[0])
    assert torch.equal(model(X), layers()(X))


def test_a_block_of_code_gets_weights_by_itself(lane, ahead):
    model = layers()
    cpu_offload(model)
    share_read_ahead(model, ahead)
    for _ in range(2):
        model(X)
    before = len(lane.asked)
    for layer in model:
        with align_module_device(layer):
            assert not layer.weight.is_meta
    assert len(lane.asked) == before
