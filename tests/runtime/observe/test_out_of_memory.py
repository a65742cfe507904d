"""What is said of a GPU's memory when a script has run out of it; the GPU is a double, its tensors are the CPU's."""

import sys
from types import SimpleNamespace

import pytest
import torch

from orc.runtime.observe import out_of_memory
from orc.runtime.observe.out_of_memory import explain_out_of_memory, explanation, holders, is_out_of_memory

MIB = 1 << 20
CPU = torch.device("cpu")


def trained():
    """A layer of one MiB with its gradient and two moments, and who knows of it."""
    layer = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    return layer, optimizer


def test_memory_is_told_by_what_it_is_for_and_shared_memory_once():
    layer, optimizer = trained()
    batch = torch.zeros(MIB // 4)
    moment = optimizer.state[layer.weight]["exp_avg"]
    held = holders(CPU, [layer.weight, layer, optimizer, batch, batch[:10], moment, "text", layer.weight.grad])
    count = optimizer.state[layer.weight]["step"].nbytes
    assert held == {"parameters": MIB, "gradients": MIB, "optimizer state": 2 * MIB + count, "others": MIB}
    assert sum(holders(torch.device("cuda", 0), [layer.weight, optimizer, batch]).values()) == 0


def test_what_pretends_to_be_a_tensor_is_not_asked():
    class Proxy:
        @property
        def __class__(self):
            raise AssertionError("it was woken")

    assert sum(holders(CPU, [Proxy()]).values()) == 0


def test_of_a_tensor_that_is_cut_the_part_of_this_rank_counts():
    part = torch.zeros(MIB // 4)
    whole = torch.empty(MIB, device="meta")
    whole._local_tensor = part
    assert holders(CPU, [whole, part])["others"] == MIB


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 16 GiB, of which 14 are taken."""
    stats = {
        "allocated_bytes.all.current": 10 << 30,
        "reserved_bytes.all.current": 12 << 30,
        "allocated_bytes.all.peak": 11 << 30,
    }
    blocks = [{"size": 2 << 30, "state": "active_allocated"}] * 3 + [{"size": 4 << 30, "state": "inactive"}]
    segments = [{"device": 1, "blocks": blocks}, {"device": 0, "blocks": [{"size": 1, "state": "active_allocated"}]}]
    answers = {"mem_get_info": (2 << 30, 16 << 30), "memory_stats": stats, "get_device_name": "L4"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(out_of_memory, "gc", SimpleNamespace(get_objects=list))
    return torch.device("cuda", 1)


def test_the_explanation_says_whose_the_memory_is(gpu, monkeypatch):
    monkeypatch.setattr(out_of_memory, "holders", lambda device, objects: {"parameters": 3 << 30, "gradients": 0})
    assert explanation(gpu) == [
        "memory of L4 (16.00 GiB): 10.00 GiB tensors (at most 11.00 GiB), 2.00 GiB kept by torch's allocator, "
        "2.00 GiB libraries and other processes, 2.00 GiB free",
        "of the tensors: parameters 3.00 GiB; 7.00 GiB that Python does not see (activations kept for backward, "
        "workspaces)",
        "largest blocks: 3 × 2.00 GiB",
    ]


def test_it_follows_the_traceback_of_an_error_about_memory_alone(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: sys.stderr.write(f"Traceback: {error}\n"))
    monkeypatch.setattr(out_of_memory, "_installed", False)
    for _ in range(2):  # a second context of the process says nothing twice
        explain_out_of_memory(gpu)
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("the step failed") from None
    except RuntimeError as error:
        sys.excepthook(RuntimeError, error, error.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback: the step failed"
    assert [line.startswith("orc: ") for line in lines[1:]] == [True] * 3
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "Traceback: no\n"
    assert not is_out_of_memory(None)


def test_errors_that_name_each_other_as_their_cause_are_looked_through_once():
    error, other = RuntimeError("the step failed"), ValueError("the batch")
    error.__cause__, other.__cause__ = other, error  # as `raise error from error` does with one
    assert not is_out_of_memory(error)
    other.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    other.__cause__ = None
    assert is_out_of_memory(error)
