"""The loss on a CUDA device as a number: who brings it to the host, when, and that nobody waits."""

import json

import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.observe import loss as module
from orc.runtime.observe.loss import LossReader


class Cuda:
    """Events that happen when the test says so."""

    def __init__(self):
        self.said, self.done, self.capturing = [], False, False

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self):
        return self

    def current_stream(self, device=None):
        return None

    def record(self, stream):
        self.said.append("copy begun")
        self.done = False

    def query(self):
        self.said.append("looked")
        return self.done


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(module, "_pinned", lambda: torch.empty(()))
    return Cuda()


def test_a_loss_of_another_kind_of_tensor_is_left_alone(cuda):
    class Distributed(torch.Tensor):
        pass

    reader = LossReader(cuda)
    reader.wanted = True
    reader.note(torch.tensor(1.0).as_subclass(Distributed))
    assert (cuda.said, reader.wanted) == ([], True)


def test_nothing_is_copied_unless_it_is_wanted(cuda):
    reader = LossReader(cuda)
    reader.note(torch.tensor(1.0))
    assert (cuda.said, reader.value) == ([], None)


def test_a_loss_is_known_once_it_has_arrived_and_is_not_waited_for(cuda):
    reader = LossReader(cuda)
    reader.wanted = True
    reader.note(torch.tensor(1.5))
    assert (cuda.said, reader.value, reader.wanted) == (["copy begun"], None, False)
    reader.wanted = True
    reader.note(torch.tensor(2.5))  # the first is on its way
    assert (cuda.said, reader.value) == (["copy begun", "looked"], None)
    cuda.done = True
    reader.note(torch.tensor([3.5], dtype=torch.bfloat16))
    assert (cuda.said[2:], reader.value) == (["looked", "copy begun"], 1.5)
    cuda.done = True
    reader.note(torch.tensor(4.5))
    assert reader.value == 3.5


def test_nothing_of_cuda_is_called_while_a_graph_is_captured(cuda):
    reader = LossReader(cuda)
    reader.wanted = cuda.capturing = True
    reader.note(torch.tensor(1.0))
    cuda.capturing = False
    reader.note(torch.tensor(2.0))
    cuda.capturing = cuda.done = True
    reader.note(torch.tensor(3.0))
    assert (cuda.said, reader.value) == (["copy begun"], None)


def test_losses_of_several_elements_are_left_alone(cuda):
    reader = LossReader(cuda)
    reader.wanted = True
    reader.note(torch.ones(2))
    assert (cuda.said, reader.wanted) == ([], True)


def test_the_thread_that_writes_metrics_reads_no_tensor_and_the_last_line_has_the_last_loss(
    cuda, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORC_METRICS", "1")
    monkeypatch.setenv("ORC_METRICS_INTERVAL_S", "1000")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    reporter = accelerator._watching.watch.reporter
    reader = reporter.meter.loss_reader = LossReader(cuda)
    cuda.query = lambda: True
    losses = []
    for batch in loader:
        reader.wanted = True
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    accelerator.backward(model(batch).square().mean())  # the one before has arrived
    assert reporter._loss(last=False) == pytest.approx(losses[-1])
    reporter.meter.loss = "no tensor"
    assert reporter._loss(last=False) == pytest.approx(losses[-1])
    reporter.meter.loss = torch.tensor(77.0)
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] == 77.0
