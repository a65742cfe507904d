"""Mapped tensors, read from the file that they are mapped from."""

import os

import pytest
import torch

from orc.runtime.checkpoint.storage import copying
from orc.runtime.checkpoint.storage.copying import CopyQueue


@pytest.fixture
def given(tmp_path):
    """A file with tensors of several kinds, and what is mapped of it."""
    path = tmp_path / "a file (deleted)"  # as the list of mappings calls what has no name any more
    state = {
        "large": torch.randn(3000, 7),
        "half": torch.randn(300).bfloat16(),
        "yes": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 2),
        "turned": torch.randn(4, 5).t(),
    }
    torch.save(state, path)
    return path, state, torch.load(path, mmap=True, weights_only=True)


def fill(path, lazily, targets):
    with CopyQueue() as copies:
        copies.read_from(path)
        for name, target in targets.items():
            copies.start(target, lazily[name])


def empty(state):
    return {name: torch.empty_like(value) for name, value in state.items()}


def test_tensors_are_read_from_the_file_without_touching_what_is_mapped(given, monkeypatch):
    path, state, lazily = given
    monkeypatch.setattr(copying, "_PIECE", 10_000)  # several pieces and a rest
    read, real = [], os.preadv

    def reads(fd, buffers, at):
        read.append(len(buffers[0]))
        return real(fd, [buffers[0][:4000]], at)  # in parts

    monkeypatch.setattr(os, "preadv", reads)
    targets = empty(state)
    fill(path, lazily, targets)
    for name, value in state.items():
        assert torch.equal(targets[name], value)
    assert max(read) == 10_000
    # All but what has another layout in memory than its place.
    assert {state["half"].nbytes, 2, 4} <= {*read}
    assert state["turned"].is_contiguous() is False


def test_readers_of_gradients_notice_that_a_parameter_was_filled(given):
    path, state, lazily = given
    parameter = torch.nn.Parameter(torch.zeros(3000, 7))
    result = (parameter * parameter).sum()
    fill(path, lazily, {"large": parameter})
    assert torch.equal(parameter, state["large"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_what_is_not_read_is_copied(given, tmp_path, monkeypatch):
    path, state, lazily = given
    double = {"large": torch.empty(3000, 7, dtype=torch.float64)}
    fill(path, lazily, double)
    assert torch.equal(double["large"], state["large"].double())
    monkeypatch.setattr(os, "preadv", None)

    def whole():
        targets = empty(state)
        fill(path, lazily, targets)
        return all(torch.equal(targets[name], value) for name, value in state.items())

    with monkeypatch.context() as without:  # no list of mappings
        without.setattr(copying, "_MAPS", tmp_path / "none")
        assert whole()
    torch.save({name: torch.zeros_like(value) for name, value in state.items()}, tmp_path / "other")
    (tmp_path / "other").replace(path)  # another file has its name
    assert whole()
    path.unlink()
    assert whole()


def test_a_file_that_has_become_shorter_is_an_error(given):
    path, _, lazily = given
    with CopyQueue() as copies:
        copies.read_from(path)
        os.truncate(path, 5000)
        copies.start(torch.empty(3000, 7), lazily["large"])
        with pytest.raises(OSError, match="it has become shorter") as failed:
            copies.wait()
    assert failed.value.filename == str(path)


def test_files_are_closed_whatever_happens(given):
    path, _, lazily = given
    before = sorted(os.listdir("/proc/self/fd"))
    fill(path, lazily, {"large": torch.empty(3000, 7)})
    with pytest.raises(RuntimeError, match="must match the size"):
        fill(path, lazily, {"large": torch.empty(2)})
    assert sorted(os.listdir("/proc/self/fd")) == before
