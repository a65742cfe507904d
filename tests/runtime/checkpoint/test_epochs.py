"""What a loader yields after `load_state`: documented scripts count epochs and steps by themselves."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from orc.runtime import Accelerator
from orc.runtime.core.context import reset_default

STEPS = 6  # per epoch


def save_at(make_run, directory, step):
    """Train until *step* and save there, inside of the loop."""
    run = make_run()
    for now in run.train(3):
        if now == step:
            run.accelerator.save_state(directory)
            return


def test_saved_behind_the_loop_the_next_pass_is_a_whole_epoch(tmp_path, make_run):
    uninterrupted = make_run().run(2).state()
    reset_default()
    run = make_run().run()
    run.accelerator.save_state(tmp_path / "s")
    reset_default()
    other = make_run(seed=3)
    other.accelerator.load_state(tmp_path / "s")
    assert len(list(other.train())) == STEPS
    assert other.state() == uninterrupted


def test_saved_within_an_epoch_the_next_pass_is_its_rest(tmp_path, make_run):
    save_at(make_run, tmp_path / "s", 2)
    reset_default()
    other = make_run(seed=3)
    other.accelerator.load_state(tmp_path / "s")
    assert [len(list(other.train())) for _ in range(2)] == [STEPS - 2, STEPS]


@pytest.mark.parametrize("keeps", [False, True])
def test_saved_behind_a_break_the_next_pass_is_a_new_one_unless_the_iterator_is_kept(tmp_path, make_run, keeps):
    run = make_run()
    batches = iter(run.loader) if keeps else run.loader
    for number, _ in enumerate(batches):
        if number == 1:
            break
    run.accelerator.save_state(tmp_path / "s")
    uninterrupted = [[value.tolist() for value in batch] for batch in (batches if keeps else run.loader)]
    reset_default()
    other = make_run(seed=3)
    other.accelerator.load_state(tmp_path / "s")
    assert [[value.tolist() for value in batch] for batch in other.loader] == uninterrupted
    assert len(uninterrupted) == (STEPS - 2 if keeps else STEPS)


@pytest.mark.parametrize("skips", [True, False])
def test_saved_at_the_last_batch_the_next_pass_is_the_next_epoch(tmp_path, make_run, skips):
    """A script that saves every n steps computes ``epoch, skip = divmod(step, len(loader))`` when it resumes."""
    uninterrupted = make_run().run(2).state()
    reset_default()
    save_at(make_run, tmp_path / "s", STEPS)
    reset_default()
    other = make_run(seed=3)
    other.accelerator.load_state(tmp_path / "s")
    if skips:
        other.loader = other.accelerator.skip_first_batches(other.loader, 0)
    assert other.loader.epoch == 1
    assert len(list(other.train())) == STEPS
    assert other.state() == uninterrupted


@pytest.mark.parametrize("step", [2, STEPS, STEPS + 4])
def test_the_documented_pattern_of_epochs_and_steps_resumes_exactly(tmp_path, make_run, step):
    uninterrupted = make_run().run(3).state()
    reset_default()
    save_at(make_run, tmp_path / f"step_{step}", step)
    reset_default()
    run = make_run(seed=3)
    run.accelerator.load_state(tmp_path / f"step_{step}")
    starting_epoch, resume_step = divmod(step, len(run.loader))
    whole = run.loader
    for epoch in range(starting_epoch, 3):
        skips = epoch == starting_epoch and resume_step > 0
        run.loader = run.accelerator.skip_first_batches(whole, resume_step) if skips else whole
        run.run()
    assert run.steps == 3 * STEPS - step
    assert run.state() == uninterrupted


def test_evaluation_between_epochs_does_not_move_the_training_loader(tmp_path, make_run):
    run = make_run()
    held_out = run.accelerator.prepare(DataLoader(torch.arange(8.0).view(8, 1), batch_size=2))
    run.run()
    assert len(list(held_out)) == 4
    run.accelerator.save_state(tmp_path / "s")
    reset_default()
    other = make_run(seed=3)
    held_out = other.accelerator.prepare(DataLoader(torch.arange(8.0).view(8, 1), batch_size=2))
    other.accelerator.load_state(tmp_path / "s")
    assert len(list(other.train())) == STEPS
    assert len(list(held_out)) == 4


class Noisy(Dataset):
    """Augments with torch's generator, as transforms do: in a worker with that worker's."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + torch.rand(())


def build(seed):
    torch.manual_seed(seed)
    accelerator = Accelerator()
    return accelerator, accelerator.prepare(DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2))


def test_augmentation_in_workers_is_repeated_from_the_start_of_an_epoch(tmp_path, make_run):
    make_run()
    accelerator, loader = build(1)
    list(loader)
    accelerator.save_state(tmp_path / "s")
    expected = torch.cat(list(loader)).tolist()
    reset_default()
    accelerator, loader = build(2)
    accelerator.load_state(tmp_path / "s")
    assert torch.cat(list(loader)).tolist() == expected


def test_augmentation_in_workers_in_the_middle_of_an_epoch_is_new_but_the_same_each_time(tmp_path, make_run):
    make_run()
    accelerator, loader = build(1)
    first = []
    for number, batch in enumerate(loader):
        first.append(batch)
        if number == 1:
            accelerator.save_state(tmp_path / "s")
    following = torch.cat(list(loader)).tolist()
    rests = []
    for seed in (2, 3):
        reset_default()
        accelerator, loader = build(seed)
        accelerator.load_state(tmp_path / "s")
        rests.append(torch.cat(list(loader)))
        assert torch.cat(list(loader)).tolist() == following
    assert rests[0].tolist() == rests[1].tolist()
    assert rests[0].int().tolist() == torch.cat(first[2:]).int().tolist()
    drawn = {round(number % 1, 6) for number in torch.cat(first).tolist()}
    assert drawn.isdisjoint(round(number % 1, 6) for number in rests[0].tolist())
