"""A fault at any message of a save leaves the checkpoint before or the new one, whole, on every kind of storage."""

from __future__ import annotations

import threading

import pytest
import torch

from orc.runtime import Accelerator
from orc.runtime.checkpoint.errors import CheckpointError, RankMissing
from orc.runtime.checkpoint.format.layout import NAME
from orc.runtime.checkpoint.replication.barrier import Barrier
from orc.runtime.checkpoint.storage.remote import Remote, place, read_manifest
from orc.runtime.testing import run_threads


class Lost(RankMissing):
    """The message that the test takes away."""


@pytest.fixture(params=["directory", "memory", "s3"])
def target(request, tmp_path):
    """A directory for checkpoints on each kind of storage."""
    if request.param == "directory":
        return str(tmp_path / "state")
    request.getfixturevalue(f"{request.param}_store")
    return f"{request.param}://bucket/state"


def saving(directory, value):
    """Save a model of one weight, *value*, on every rank; what each rank was told."""

    def live():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, value)
        accelerator.prepare(model)
        try:
            accelerator.save_state(directory)
        except CheckpointError as error:
            return str(error)
        return None

    return run_threads(2, live, timeout_s=20)


def loaded(directory):
    """The weight that every rank loads."""

    def live():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        accelerator.load_state(directory)
        return next(model.parameters()).item()

    first, second = run_threads(2, live, timeout_s=20)
    assert first == second
    return first


def messages(monkeypatch, fault=None):
    """Count what is held on each rank; take the verdict of message *fault* = (rank, number, when) away."""
    counts, names, hold = {}, [], Barrier.hold

    def faulty(barrier, what, *args, **options):
        if not threading.current_thread().name.startswith("rank-"):
            return hold(barrier, what, *args, **options)
        number = counts[barrier.rank] = counts.get(barrier.rank, 0) + 1
        if barrier.rank == 0:
            names.append(what)
        if fault == (barrier.rank, number, "before"):
            raise Lost("taken away before")
        result = hold(barrier, what, *args, **options)
        if fault == (barrier.rank, number, "after"):
            raise Lost("taken away after")
        return result

    monkeypatch.setattr(Barrier, "hold", faulty)
    return names


def test_a_fault_at_any_message_leaves_one_whole_checkpoint(target, monkeypatch):
    monkeypatch.setattr("orc.runtime.checkpoint.save._COMMIT_PATIENCE_S", 0.3)
    for name, value in {"PATIENCE_S": 0.3, "READERS_S": 0.1, "_VERDICT_S": 0.3}.items():
        monkeypatch.setattr(f"orc.runtime.checkpoint.replication.barrier.{name}", value)
    with monkeypatch.context() as patch:
        names = messages(patch)
        assert saving(target, 1.0) == [None, None]
    assert loaded(target) == 1.0
    assert any("committing" in name for name in names)
    last, outcomes = 1.0, set()
    for number in range(1, len(names) + 1):
        for rank in (0, 1):
            for when in ("before", "after"):
                new = last + 1
                with monkeypatch.context() as patch:
                    messages(patch, (rank, number, when))
                    told = saving(target, new)
                assert any(told), (rank, number, when)
                found = loaded(target)
                assert found in (last, new), (rank, names[number - 1], when)
                outcomes.add(found == new)
                last = found
    assert outcomes == {True, False}
    assert saving(target, last + 1) == [None, None]
    assert loaded(target) == last + 1
    where = place(target)
    if isinstance(where, Remote):  # the next save has cleared what those that failed have left
        manifest = read_manifest(where)
        assert set(where.entries()) == {NAME, *(manifest.prefix + name for name in manifest.files)}
