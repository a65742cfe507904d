"""Copies of many tensors in threads."""

import pytest
import torch

from orc.runtime.checkpoint.storage import copying
from orc.runtime.checkpoint.storage.copying import CopyQueue


@pytest.fixture(params=[1, 2])
def torch_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_large_and_small_tensors_of_any_layout_arrive_whole(torch_threads, monkeypatch):
    monkeypatch.setattr(copying, "_PIECE", 1000)
    sources = [
        torch.randn(1001, 3),  # several pieces and a rest
        torch.randn(250),  # exactly one
        torch.randn(30, 40).t(),
        torch.randn(7, dtype=torch.float64),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.arange(5000, dtype=torch.uint8),
    ]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    columns = torch.zeros(40, 30).t().contiguous().t()  # another layout than its source
    parameter = torch.nn.Parameter(torch.zeros(1001, 3))
    with CopyQueue() as copies:
        for target, source in zip(targets, sources, strict=True):
            copies.start(target, source)
        copies.start(columns, sources[2].contiguous())
        copies.start(parameter, sources[0].double())
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)
    assert torch.equal(columns, sources[2])
    assert torch.equal(parameter, sources[0])


def test_tensors_made_in_inference_mode_can_be_filled():
    with torch.inference_mode():
        target = torch.zeros(3)
        with CopyQueue() as copies:
            copies.start(target, torch.ones(3))
        assert target.tolist() == [1.0, 1.0, 1.0]


def test_what_cannot_be_copied_is_an_error_of_the_block():
    with pytest.raises(RuntimeError, match="must match the size"), CopyQueue() as copies:
        copies.start(torch.zeros(3), torch.ones(2))
