"""Where batches go, and which ranks of a device mesh get which."""

import collections

import pytest
import torch
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, prepare_data_loader, send_to_device
from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext, current_context
from orc.runtime.launch.environment import detect

META = torch.device("meta")


def prepare(loader, **options):
    context = RunContext(0, 1, 0, 1, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())
    return prepare_data_loader(loader, context=context, **options)


class Box:
    """An object with a `to` of its own, as tokenizers make."""

    def __init__(self, value):
        self.value, self.calls = value, []

    def to(self, device, non_blocking=False):
        self.calls.append((torch.device(device), non_blocking))
        return self


class Old(Box):
    def to(self, device):
        self.calls.append(device)
        return self


def test_batches_are_put_on_the_device_only_when_asked():
    data = [{"x": torch.ones(2), "name": "a"}] * 4
    for options, where in (({}, "cpu"), ({"put_on_device": True, "device": META}, "meta"), ({"device": META}, "cpu")):
        batches = list(prepare(DataLoader(data, batch_size=2), **options))
        assert [batch["x"].device.type for batch in batches] == [where] * 2
        assert batches[0]["name"] == ["a", "a"]


def test_copies_may_be_asynchronous():
    boxes = [Box(0), Box(1)]
    for non_blocking in (False, True):
        loader = prepare(
            DataLoader(boxes, batch_size=1, collate_fn=lambda items: items[0]),
            put_on_device=True,
            device=META,
            non_blocking=non_blocking,
        )
        assert [box.calls[-1] for box in loader] == [(META, non_blocking)] * 2


def test_send_to_device_keeps_keys_that_are_to_be_skipped_and_what_cannot_move():
    Pair = collections.namedtuple("Pair", "a b")
    old = Old(1)
    data = {
        "x": torch.ones(1),
        "stay": torch.ones(1),
        "pair": Pair(torch.ones(1), [{"stay": torch.ones(1), "y": torch.ones(1)}]),
        "old": old,
        "text": "t",
    }
    moved = send_to_device(data, "meta", non_blocking=True, skip_keys="stay")
    assert (moved["x"].device, moved["pair"].a.device, moved["pair"].b[0]["y"].device) == (META,) * 3
    assert moved["stay"] is data["stay"]
    assert moved["pair"].b[0]["stay"].device.type == "cpu"
    assert type(moved["pair"]) is Pair
    assert old.calls == [META]
    assert moved["text"] == "t"
    assert send_to_device(data, "meta", skip_keys=["stay", "x"])["x"] is data["x"]
    assert send_to_device(data["x"], "cpu") is data["x"]


def test_ranks_of_one_data_share_read_the_same(run_ranks):
    def body(dimensions):
        Accelerator()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=dimensions)
        loader = prepare_data_loader(DataLoader(range(8), batch_size=2), torch_device_mesh=mesh)
        assert current_context().world_size == 4
        return [batch.tolist() for batch in loader]

    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert run_ranks(4, body, ("dp", "tp")) == [first, first, second, second]
    assert run_ranks(4, body, ("dp_replicate", "dp_shard")) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_the_stateful_loader_is_the_prepared_loader(kind):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(6))

    data = range(6) if kind == "map" else Stream()
    loader = prepare(DataLoader(data, batch_size=2), use_stateful_dataloader=True)
    source = iter(loader)
    next(source)
    state = loader.state_dict()
    other = prepare(DataLoader(data, batch_size=2), use_stateful_dataloader=True)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[2, 3], [4, 5]]
