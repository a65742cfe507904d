"""Saving and loading on several ranks."""

import os
import random
from datetime import timedelta
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, InitProcessGroupKwargs, ProjectConfiguration, RunContext, use_context
from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.checkpoint.state.ownership import FILE


def listed(directory):
    """What is in *directory* but the mark of the run that saves there."""
    return sorted(name for name in os.listdir(directory) if not name.startswith(FILE))


pytestmark = pytest.mark.distributed


def build(root, seed=0, batch_size=2, **options):
    torch.manual_seed(seed)
    fixed = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.arange(48.0), torch.randn(48, 4, generator=fixed))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    project = ProjectConfiguration(root, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(seed + accelerator.process_index)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator, model, optimizer, loader, epochs, stop=None):
    """The samples of every step on this rank, and the final weights."""
    seen = []
    for _ in range(epochs):
        for number, x in loader:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.append(number.int().tolist())
            if len(seen) == stop:
                return seen
    return seen, [parameter.tolist() for parameter in model.parameters()]


def test_all_ranks_save_and_continue_exactly(tmp_path, run_ranks):
    def whole():
        return train(*build(None), 2)

    def second(root):
        run = build(root, seed=50)
        resumed = run[0].resume()
        return resumed.step, resumed.epoch, resumed.offset, train(*run, 1)

    uninterrupted = run_ranks(2, whole)

    # The place in the loop is lost when the loop is left, so the save happens inside of it.
    def inside(root):
        accelerator, model, optimizer, loader = build(root)
        seen = []
        for _ in range(2):
            for number, x in loader:
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                seen.append(number.int().tolist())
                if len(seen) == 15:
                    accelerator.save_state()
                    return seen
        return None

    seen = run_ranks(2, inside, str(tmp_path))
    files = sorted(os.listdir(tmp_path / "checkpoints" / "checkpoint_0"))
    assert files == [
        "manifest.json",
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "random_states_1.pkl",
        "sampler.bin",
    ]
    for rank, (step, epoch, offset, (rest, weights)) in enumerate(run_ranks(2, second, str(tmp_path))):
        assert (step, epoch, offset) == (15, 1, 12)
        assert seen[rank] + rest == uninterrupted[rank][0]
        assert weights == uninterrupted[rank][1]

    def at_another_world_size(root, batch_size):
        run = build(root, seed=9, batch_size=batch_size)
        run[0].resume()
        return train(*run, 1)[0]

    [alone] = run_ranks(1, at_another_world_size, str(tmp_path), 4)
    pairs = [a + b for a, b in zip(*(ranks[0][15:] for ranks in uninterrupted), strict=True)]
    assert alone == pairs

    [other] = run_ranks(1, at_another_world_size, str(tmp_path), 9)
    assert list(chain.from_iterable(other)) == list(chain.from_iterable(pairs))


def test_ranks_that_are_new_draw_numbers_of_their_own(tmp_path, run_ranks):
    def draw(root, load):
        accelerator, *_ = build(root)
        directory = os.path.join(root, "checkpoints", "checkpoint_0")
        accelerator.load_state(directory) if load else accelerator.save_state()
        return torch.rand(1).item(), random.random()

    (old,) = run_ranks(1, draw, str(tmp_path), False)
    first = run_ranks(3, draw, str(tmp_path), True)
    assert first[0] == old
    assert len({number for numbers in first for number in numbers}) == 6, "no two ranks share a seed"
    assert run_ranks(3, draw, str(tmp_path), True) == first, "the same each time"


def test_a_save_waits_as_long_as_the_scripts_collectives(monkeypatch):
    with use_context(RunContext.fake(0, 2)):
        assert Accelerator()._checkpointing.checkpoints.barrier.timeout_s == 600
        chosen = InitProcessGroupKwargs(timeout=timedelta(seconds=7))
        checkpoints = Accelerator(kwargs_handlers=[chosen])._checkpointing.checkpoints
        assert checkpoints.barrier.timeout_s == checkpoints._background_barrier.timeout_s == 7
    monkeypatch.setenv("ORC_TIMEOUT_S", "8")
    with use_context(RunContext.fake(0, 2)):
        assert Accelerator()._checkpointing.checkpoints.barrier.timeout_s == 8


def test_a_save_on_one_rank_only_names_the_rank_that_did_not_come(tmp_path, run_ranks):
    def save_on_main(root):
        accelerator = build(root)[0]
        if accelerator.is_main_process:
            accelerator._checkpointing.checkpoints.barrier.timeout_s = 1.0
            try:
                accelerator.save_state()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return None

    def save_on_other(root):
        accelerator = build(root)[0]
        if not accelerator.is_main_process:
            accelerator._checkpointing.checkpoints.barrier.timeout_s = 1.0
            try:
                accelerator.save_state()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return None

    text = run_ranks(2, save_on_main, str(tmp_path))[0]
    assert "RankMissing: save_state: rank 1 of 2 did not come within 1 s. Every rank must call it" in text
    text = run_ranks(2, save_on_other, str(tmp_path))[1]
    assert "RankMissing: save_state: rank 0 has not come within 1 s" in text
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path, run_ranks):
    def save(root):
        accelerator = build(root)[0]
        accelerator.save_state()
        if accelerator.process_index == 1:
            from orc.runtime.checkpoint.storage import durable

            def full(fd, data):
                raise OSError(28, "No space left on device")

            durable.os.write = full
        try:
            accelerator.save_state()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for text in run_ranks(2, save, str(tmp_path)):
        assert text == "CheckpointError: rank 1: OSError: [Errno 28] No space left on device"
    assert listed(tmp_path / "checkpoints") == ["checkpoint_0"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_damage_of_any_file_is_found(tmp_path, run_ranks, ranks):
    """The ranks share out the reading; no file is left out."""

    def load(root):
        accelerator, *_ = build(root)
        accelerator.save_state()
        directory = os.path.join(root, "checkpoints", "checkpoint_0")
        refused = []
        names = sorted(set(os.listdir(directory)) - {"manifest.json"})

        def flip(name):
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                with open(os.path.join(directory, name), "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    last = file.read(1)[0]
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([last ^ 1]))
            accelerator.wait_for_everyone()

        for damaged in names:
            flip(damaged)
            with pytest.raises(CheckpointError) as error:
                accelerator.load_state(directory)
            refused += [name for name in names if name in str(error.value)]
            flip(damaged)
        accelerator.load_state(directory)
        return refused == names

    assert run_ranks(ranks, load, str(tmp_path)) == [True] * ranks


def test_each_node_can_have_a_checkpoint_of_its_own(tmp_path, run_ranks):
    def save(root):
        accelerator = build(root, save_on_each_node=True)[0]
        disk = os.path.join(root, os.environ["GROUP_RANK"])
        os.makedirs(disk, exist_ok=True)
        os.chdir(disk)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        accelerator.save_state("/proc/self/cwd/out")  # one name, as for local disks, another place on each node
        accelerator.load_state("/proc/self/cwd/out")
        return sorted(os.listdir("out"))

    common = ["manifest.json", "model.safetensors", "optimizer.bin"]
    files = run_ranks(2, save, str(tmp_path), nodes=2)
    assert files == [[*common, "random_states_0.pkl", "random_states_1.pkl", "sampler.bin"]] * 2
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_several_accelerators_of_one_run_save_and_load_one_after_the_other(tmp_path, run_ranks):
    def body(root):
        weights = []
        for number in range(3):
            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(2 + number, 1))
            accelerator.save_state(os.path.join(root, str(number)), block=number != 1)
            accelerator.load_state(os.path.join(root, str(number)))
            weights.append(accelerator.unwrap_model(model).weight.shape[1])
        return weights

    assert run_ranks(2, body, str(tmp_path)) == [[2, 3, 4]] * 2
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]
