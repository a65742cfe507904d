"""Checkpoints of machines that share no directory: whole on each, the same step on all."""

import json
import os
import shutil
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator
from orc.runtime.checkpoint.replication.sites import _joined

pytestmark = pytest.mark.distributed
EACH = ["manifest.json", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"]


@pytest.fixture
def disks(tmp_path):
    """``disks(0, 1)``: the environment of ranks on machines 0 and 1, each with a disk of its own."""

    def variables(*machines, **more):
        return [{"ORC_CHECKPOINT_DIR": str(tmp_path / str(machine))} | more for machine in machines]

    return variables


class Run:
    """Dropout, Adam and a shuffled loader: everything that a checkpoint has to bring back exactly."""

    def __init__(self, batch_size=2, seed=0):
        torch.manual_seed(seed)
        fixed = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.arange(48.0), torch.randn(48, 4, generator=fixed))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.accelerator = Accelerator()
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model,
            torch.optim.Adam(model.parameters(), lr=0.01),
            DataLoader(data, batch_size=batch_size, shuffle=True),
        )
        torch.manual_seed(seed + self.accelerator.process_index)
        self.seen = []

    def train(self, epochs=2, save_at=(), stop=None, save=None):
        """Saves after the steps *save_at*; at *stop* it leaves."""
        for _ in range(epochs):
            for number, x in self.loader:
                self.accelerator.backward(self.model(x).pow(2).mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.seen.append(number.int().tolist())
                if len(self.seen) in save_at:
                    (save or self.accelerator.save_state)()
                if len(self.seen) == stop:
                    return self
        return self

    def weights(self):
        return [parameter.tolist() for parameter in self.model.parameters()]


def whole():
    run = Run().train()
    return run.seen, run.weights()


def saved(*save_at, stop=None):
    return Run().train(save_at=save_at, stop=stop or max(save_at)).seen


def continued(epochs=1, batch_size=2, save_at=()):
    """Where the run goes on, what it sees, its weights at once and in the end."""
    run = Run(batch_size, seed=50)
    resumed = run.accelerator.resume()
    before = run.weights()
    run.train(epochs, save_at)
    return resumed.step if resumed else None, run.seen, before, run.weights()


def identity(tmp_path, machine, number):
    return json.loads((tmp_path / str(machine) / f"checkpoint_{number}" / "manifest.json").read_text())["id"]


def listing(tmp_path, machine):
    return sorted(name for name in os.listdir(tmp_path / str(machine)) if not name.startswith(".orc-owner"))


def test_each_machine_has_the_whole_checkpoint_with_the_states_of_all_ranks(tmp_path, run_ranks, disks):
    run_ranks(4, saved, 2, env=disks(0, 0, 1, 1), nodes=2)
    for machine in (0, 1):
        assert listing(tmp_path, machine) == ["checkpoint_0"]
        files = {*EACH, "random_states_2.pkl", "random_states_3.pkl", "sampler.bin"}
        assert {*os.listdir(tmp_path / str(machine) / "checkpoint_0")} == files
    assert identity(tmp_path, 0, 0) == identity(tmp_path, 1, 0)


def test_machines_that_share_the_directory_write_one_checkpoint(tmp_path, run_ranks, disks):
    run_ranks(2, saved, 2, env=disks(0, 0), nodes=2)
    assert listing(tmp_path, 0) == ["checkpoint_0"]
    assert [step for step, *_ in run_ranks(2, continued, env=disks(0, 0), nodes=2)] == [2, 2]


def test_a_replaced_machine_gets_the_checkpoint_and_training_goes_on_exactly(tmp_path, run_ranks, disks):
    uninterrupted = run_ranks(2, whole, nodes=2)
    seen = run_ranks(2, saved, 7, 15, env=disks(0, 1), nodes=2)

    def in_small_pieces():
        from orc.runtime.checkpoint.replication import relay

        relay.PIECE = 1000
        return continued()

    # The fresh machine is the first or the second.
    for machines in ((0, 2), (3, 1)):
        for rank, (step, rest, _, weights) in enumerate(run_ranks(2, in_small_pieces, env=disks(*machines), nodes=2)):
            assert step == 15
            assert seen[rank] + rest == uninterrupted[rank][0]
            assert weights == uninterrupted[rank][1]
        fresh = next(machine for machine in machines if machine > 1)
        assert listing(tmp_path, fresh) == ["checkpoint_1"]
        assert identity(tmp_path, fresh, 1) == identity(tmp_path, 0, 1)


def test_two_machines_then_one_then_two(tmp_path, run_ranks, disks):
    uninterrupted = run_ranks(2, whole, nodes=2)
    seen = run_ranks(2, saved, 5, env=disks(0, 1), nodes=2)
    # At step 8 the second machine is away.
    [(step, alone, *_)] = run_ranks(1, lambda: continued(1, 4, [3]), env=disks(0))
    both = [a + b for a, b in zip(*(ranks[0] for ranks in uninterrupted), strict=True)]
    assert step == 5
    assert alone == both[5:12]
    (first, rest, loaded, _), (second, other, same, _) = run_ranks(2, continued, env=disks(0, 1), nodes=2)
    assert (first, second) == (8, 8)
    assert loaded == same
    assert [a + b for a, b in zip(rest, other, strict=True)] == both[8:12]
    assert seen[0] == uninterrupted[0][0][:5]
    # The number is after those of every machine, whoever leads.
    run_ranks(2, lambda: Run().accelerator.save_state(), env=disks(4, 1), nodes=2)
    assert listing(tmp_path, 4) == ["checkpoint_2"]
    assert listing(tmp_path, 1) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_four_machines_go_on_as_three(tmp_path, run_ranks, disks):
    seen = run_ranks(4, lambda: Run(3).train(save_at=[1], stop=1).seen, env=disks(0, 1, 2, 3), nodes=4)
    assert all(len(batches) == 1 for batches in seen)
    # Machine 0, which held the store and the lowest rank, is gone; another has lost its disk.
    results = run_ranks(3, lambda: continued(1, 4), env=disks(3, 5, 1), nodes=3)
    assert [step for step, *_ in results] == [1, 1, 1]
    assert results[0][2] == results[1][2] == results[2][2]
    rest = [
        sample for batches in zip(*(some for _, some, *_ in results), strict=True) for one in batches for sample in one
    ]
    assert sorted(rest + [sample for batches in seen for sample in batches[0]]) == list(range(48))
    assert listing(tmp_path, 5) == ["checkpoint_0"]


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_copy_is_replaced_by_that_of_another_machine(tmp_path, run_ranks, disks):
    run_ranks(2, saved, 3, env=disks(0, 1), nodes=2)
    damage(tmp_path / "0" / "checkpoint_0" / "model.safetensors")
    (tmp_path / "0" / "checkpoint_0" / "notes.txt").write_text("mine")

    def told():
        import contextlib
        import io

        with contextlib.redirect_stderr(io.StringIO()) as text:
            return continued()[0], text.getvalue()

    (step, text), (other, nothing) = run_ranks(2, told, env=disks(0, 1), nodes=2)
    assert (step, other, nothing) == (3, 3, "")
    assert "rank 0: " in text
    assert "model.safetensors does not hold what was saved" in text
    assert "copied from the machine of rank 1" in text
    assert (tmp_path / "0" / "checkpoint_0" / "notes.txt").read_text() == "mine"
    same = [(tmp_path / str(machine) / "checkpoint_0" / "model.safetensors").read_bytes() for machine in (0, 1)]
    assert same[0] == same[1]


def test_what_is_damaged_everywhere_is_passed_over_by_all(tmp_path, run_ranks, disks):
    run_ranks(2, saved, 3, 6, env=disks(0, 1), nodes=2)
    damage(tmp_path / "0" / "checkpoint_1" / "optimizer.bin")
    damage(tmp_path / "1" / "checkpoint_1" / "model.safetensors")
    assert [step for step, *_ in run_ranks(2, continued, env=disks(0, 1), nodes=2)] == [3, 3]
    shutil.rmtree(tmp_path / "0" / "checkpoint_0")
    damage(tmp_path / "1" / "checkpoint_0" / "sampler.bin")

    def refused():
        try:
            continued()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for text in run_ranks(2, refused, env=disks(0, 1), nodes=2):
        assert "CheckpointError: no checkpoint can be resumed from:" in text
        assert "rank 1: " in text
        assert "sampler.bin does not hold what was saved" in text


# Where one machine dies, and the step that both go on from: the new one once it is complete on a machine.
DEATHS = [("create", 3), ("seal", 3), ("commit", 6)]


@pytest.mark.parametrize(("moment", "step"), DEATHS)
def test_a_machine_that_dies_in_a_save_leaves_all_at_one_step(tmp_path, run_ranks, disks, moment, step):
    run_ranks(2, saved, 3, env=disks(0, 1), nodes=2)

    other = str(tmp_path / "0" / "checkpoint_1")

    def dies():
        from orc.runtime.checkpoint.storage.destination import LocalDestination

        def gone(*_):
            while moment == "commit" and not os.path.exists(other):  # complete on the other machine
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        if os.environ["RANK"] == "1":
            setattr(LocalDestination, moment, gone)
        run = Run()
        run.accelerator.resume()
        run.train(save_at=[3])

    with pytest.raises(AssertionError, match="ended by signal 9"):
        run_ranks(2, dies, env=disks(0, 1), nodes=2)
    assert listing(tmp_path, 1) == ["checkpoint_0", "checkpoint_1.site-1.tmp"]
    assert ("checkpoint_1" in listing(tmp_path, 0)) == (step == 6)
    results = run_ranks(2, lambda: continued(save_at=[1]), env=disks(0, 1, ORC_CHECKPOINT_KEEP="1"), nodes=2)
    assert [where for where, *_ in results] == [step, step]
    assert results[0][2] == results[1][2]
    # What the dead machine left is gone with the next save.
    assert listing(tmp_path, 0) == listing(tmp_path, 1)
    assert len(listing(tmp_path, 1)) == 1


def test_saving_in_the_background_reaches_every_machine(tmp_path, run_ranks, disks):
    def save():
        run = Run()
        run.train(save_at=[2, 4], stop=5, save=lambda: run.accelerator.save_state(block=False))
        run.accelerator.wait_for_checkpoint()

    run_ranks(2, save, env=disks(0, 1), nodes=2)
    assert listing(tmp_path, 1) == ["checkpoint_0", "checkpoint_1"]
    for machine in (0, 1):
        assert sorted(os.listdir(tmp_path / str(machine) / "checkpoint_1")) == [*EACH, "sampler.bin"]
    assert [step for step, *_ in run_ranks(2, continued, env=disks(2, 1), nodes=2)] == [4, 4]


def test_files_of_hooks_reach_every_machine(tmp_path, run_ranks, disks):
    def save():
        run = Run()

        def hook(models, weights, directory):
            with open(os.path.join(directory, f"hook-{run.accelerator.process_index}"), "w") as file:
                file.write("x" * 10 * run.accelerator.process_index)

        run.accelerator.register_save_state_pre_hook(hook)
        run.accelerator.save_state()

    run_ranks(2, save, env=disks(0, 1), nodes=2)
    for machine in (0, 1):
        directory = tmp_path / str(machine) / "checkpoint_0"
        assert [(directory / f"hook-{rank}").read_text() for rank in (0, 1)] == ["", "x" * 10]
        assert "hook-0" in (directory / "manifest.json").read_text()


def test_a_named_directory_is_loaded_as_it_was_saved_last(tmp_path, run_ranks):
    def save(machines):
        os.makedirs(machines[int(os.environ["GROUP_RANK"])], exist_ok=True)
        os.chdir(machines[int(os.environ["GROUP_RANK"])])
        run = Run(seed=len(machines[0]))
        run.accelerator.save_state("out")
        return run.weights()

    def load(machines):
        os.chdir(machines[int(os.environ["GROUP_RANK"])])
        run = Run(seed=99)
        run.accelerator.load_state("out")
        return run.weights()

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    old, _ = run_ranks(2, save, [one, two], nodes=2)
    [new] = run_ranks(1, save, [one + "/../one"])
    assert old != new
    assert run_ranks(2, load, [one, two], nodes=2) == [new, new]
    assert os.listdir(two) == ["out"]


def test_what_no_machine_has_is_an_error_and_makes_nothing(tmp_path, run_ranks):
    def load(path):
        try:
            Run().accelerator.load_state(path)
        except Exception as error:
            return str(error)

    path = tmp_path / "not" / "there"
    for text in run_ranks(2, load, str(path), nodes=2):
        assert text == f"{path}: there is no such checkpoint"
    assert list(tmp_path.iterdir()) == []


def test_what_the_configuration_says_is_believed(tmp_path, run_ranks, disks):
    def save():
        try:
            Run().accelerator.save_state()
        except Exception as error:
            return str(error)

    for text in run_ranks(2, save, env=disks(0, 1, ORC_CHECKPOINT_SHARED="1"), nodes=2):
        assert "cannot be seen from here" in text
        assert "leave ORC_CHECKPOINT_SHARED at auto" in text
    assert listing(tmp_path, 0) == []
    for text in run_ranks(2, save, env=disks(0, 0, ORC_CHECKPOINT_SHARED="0"), nodes=2):
        assert "several machines share" in text
    assert listing(tmp_path, 0) == []


def test_sites_are_joined_by_whoever_sees_another():
    assert _joined([0, 2, 4], [[0], [], [2], [], [4]]) == [0, 2, 4]
    assert _joined([0, 2, 4], [[0], [], [0, 2], [], [2, 4]]) == [0, 0, 0]
    assert _joined([0, 2, 4], [[0, 4], [], [2], [], []]) == [0, 2, 0]
    assert _joined([0, 1, 2, 3], [[], [1, 3], [], [2, 3]]) == [0, 1, 1, 1]
