"""The way of batches to a CUDA device: what happens on which stream, and when the next one begins."""

import collections
import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from orc.runtime import prepare_data_loader
from orc.runtime.core.accumulation import GradientRecord
from orc.runtime.core.context import RunContext
from orc.runtime.data import adapter
from orc.runtime.data.lane import Lane, one_ahead
from orc.runtime.launch.environment import detect

META = torch.device("meta")


class Cuda:
    """Streams and events that note in *said* what is asked of them."""

    def __init__(self):
        self.said = []
        self.current = "computing"

    def Stream(self, device):
        return _Stream(self, "lane")

    def current_stream(self, device):
        return _Stream(self, self.current)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class _Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def record_event(self):
        self.cuda.said.append(("event on", self.name))
        return self

    def wait_event(self, event):
        self.cuda.said.append((self.name, "waits for", event.name))

    def synchronize(self):
        self.cuda.said.append(("the host waits for", self.name))


class Copied(torch.overrides.TorchFunctionMode):
    """Notes in *cuda* each copy, and the stream that was current."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to:
            self.cuda.said.append(("copy on", self.cuda.current, (kwargs or {}).get("non_blocking", False)))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def taken(monkeypatch):
    """``taken(batch)``: what happens when it is begun and when it is received, and what comes out."""
    cuda = Cuda()
    # torch looks at the stream that it is given before it asks any mode.
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, on: cuda.said.append(("recorded on", on.name)))

    def take(batch, *, waits=False):
        lane = Lane(META, waits=waits, cuda=cuda)
        with Copied(cuda):
            arriving = lane.start(batch)
            begun, cuda.said = cuda.said, []
            content = lane.receive(arriving)
        return begun, cuda.said, content

    return take


def test_a_batch_is_copied_on_a_stream_of_its_own_and_recorded_on_the_one_that_uses_it(taken):
    begun, received, content = taken(torch.ones(2))
    assert begun == [("copy on", "lane", True), ("event on", "lane")]
    assert received == [("computing", "waits for", "lane"), ("recorded on", "computing")]
    assert content.device == META


def test_every_tensor_of_a_nested_batch_is_recorded(taken):
    Pair = collections.namedtuple("Pair", "a b")
    batch = {"pair": Pair(torch.ones(1), [torch.ones(1), "text"]), "more": (torch.ones(1), 3)}
    begun, received, content = taken(batch)
    assert begun == [("copy on", "lane", True)] * 3 + [("event on", "lane")]
    assert received == [("computing", "waits for", "lane")] + [("recorded on", "computing")] * 3
    assert content["pair"].b[1] == "text"
    assert content["pair"].a.device == content["more"][0].device == META


def test_a_packed_sequence_keeps_its_sizes_on_the_host(taken):
    _, received, content = taken(torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]))
    assert (content.data.device, content.batch_sizes.device.type) == (META, "cpu")
    assert received == [("computing", "waits for", "lane"), ("recorded on", "computing")]


def test_the_way_keeps_nothing_of_a_batch_that_was_received(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    lane = Lane(META, waits=False, cuda=Cuda())
    arriving = lane.start({"x": torch.ones(2)})
    lane.receive(arriving)
    assert arriving.content is None


def test_the_host_waits_for_the_copy_alone_where_the_memory_may_be_written_to(taken):
    begun, _, _ = taken(torch.ones(2), waits=True)
    assert begun == [("copy on", "lane", True), ("event on", "lane"), ("the host waits for", "lane")]


class Box:
    """An object that moves by itself."""

    def to(self, device, non_blocking=False):
        self.moved = torch.device(device), non_blocking
        return self


@pytest.mark.parametrize("waits", [True, False])
def test_what_moves_by_itself_is_copied_on_the_stream_that_uses_it(taken, waits):
    batch = {"box": Box(), "x": torch.ones(1)}
    begun, received, content = taken(batch, waits=waits)
    assert begun == []
    assert received == [("copy on", "computing", not waits)]
    assert content["box"].moved == (META, not waits)


@pytest.mark.parametrize(
    "batch", [torch.ones(2, device=META), torch.eye(2).to_sparse(), torch.nn.Parameter(torch.ones(1)), ["text"], []]
)
def test_what_is_no_plain_tensor_of_the_host_does_not_take_the_lane(taken, batch):
    begun, _, _ = taken(batch)
    assert begun == []


# ---- loaders


class Recorder:
    """Lane that notes when batches are begun and received, and moves nothing."""

    def __init__(self, device, *, waits):
        self.device, self.waits, self.said = device, waits, []
        made.append(self)

    def start(self, batch):
        self.said.append(f"begin {first(batch)}")
        return batch

    def receive(self, batch):
        return batch


made: list[Recorder] = []


def first(batch):
    return int(batch.flatten()[0])


class Rows(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(6))


@pytest.fixture
def loader_of(monkeypatch):
    monkeypatch.setattr(adapter, "Lane", Recorder)
    made.clear()

    def make(data=range(6), *, device="cuda:0", workers=0, **options):
        context = RunContext(0, 1, 0, 1, 0, torch.device("cpu"), None, detect({}), gradient=GradientRecord())
        own = {name: options.pop(name) for name in ("pin_memory", "collate_fn") if name in options}
        given = DataLoader(data, batch_size=2, num_workers=workers, **own)
        return prepare_data_loader(given, context=context, put_on_device=True, device=device, **options)

    return make


def order(loader):
    """The order in which batches are begun and given out."""
    for batch in loader:
        made[0].said.append(f"give {first(batch)}")
    return made[0].said


ONE_AHEAD = ["begin 0", "begin 2", "give 0", "begin 4", "give 2", "give 4"]
IN_TURN = ["begin 0", "give 0", "begin 2", "give 2", "begin 4", "give 4"]


@pytest.mark.parametrize(
    ("data", "workers", "wanted"),
    [(range(6), 2, ONE_AHEAD), (range(6), 0, IN_TURN), (Rows(), 0, ONE_AHEAD)],
    ids=["workers", "no workers", "stream"],
)
def test_the_next_batch_is_on_its_way_where_it_was_read_ahead(loader_of, data, workers, wanted):
    loader = loader_of(data, workers=workers)
    assert order(loader) == wanted
    made[0].said.clear()
    assert order(loader) == wanted
    assert len(made) == 1


def test_a_pass_that_is_left_and_restored_counts_what_was_given_out(loader_of):
    loader = loader_of(workers=2)
    for batch in loader:
        if first(batch) == 2:
            state = loader.state_dict()
            break
    again = loader_of(workers=2)
    again.load_state_dict(state)
    assert [first(batch) for batch in again] == [4]


def test_a_loader_leaves_its_lane_behind_when_it_is_pickled(loader_of):
    loader = loader_of()
    list(loader)
    assert loader.lane is made[0]
    assert loader.__getstate__()["lane"] is None


@pytest.mark.parametrize("options", [{"device": "meta"}, {"device": "cpu"}, {"prefetch_to_device": False}])
def test_only_a_cuda_device_has_a_lane_and_only_if_wanted(loader_of, monkeypatch, options):
    monkeypatch.setattr(adapter, "send_to_device", lambda batch, *_: batch)
    assert [first(batch) for batch in loader_of(**options)] == [0, 2, 4]
    assert made == []


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize(
    ("options", "waits"), [({}, True), ({"pin_memory": True}, False), ({"non_blocking": True}, False)]
)
def test_copies_of_memory_that_the_loader_pins_are_not_waited_for(loader_of, monkeypatch, options, waits):
    list(loader_of(**options))
    assert made[0].waits is waits
    sent = []
    monkeypatch.setattr(adapter, "send_to_device", lambda batch, device, non_blocking: sent.append(non_blocking))
    list(loader_of(prefetch_to_device=False, **options))
    assert sent == [not waits] * 3


def test_an_error_comes_after_the_batches_that_were_read_before_it():
    def source():
        yield from (1, 2)
        raise OSError("gone")

    batches = one_ahead(source(), lambda batch: batch * 10)
    assert [next(batches), next(batches)] == [10, 20]
    with pytest.raises(OSError, match="gone"):
        next(batches)
    assert list(one_ahead(iter(()), lambda batch: batch)) == []


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_memory_that_is_pinned_for_cuda_alone_is_waited_for_on_the_way_to_other_devices(monkeypatch):
    said = []
    monkeypatch.setattr(
        adapter, "send_to_device", lambda batch, device, non_blocking: said.append(non_blocking) or batch
    )
    list(prepare_data_loader(DataLoader(range(2), pin_memory=True), device=META, put_on_device=True))
    assert said == [False] * 2
