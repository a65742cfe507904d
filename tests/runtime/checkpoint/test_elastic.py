"""A run that goes on from a checkpoint in the middle of an epoch with fewer or more ranks."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, DataLoaderConfiguration, ProjectConfiguration

pytestmark = pytest.mark.distributed

SAMPLES = 101


def phase(root, steps, by_samples, dispatch, epochs=1):
    """Resume, train for *steps* (`None`: to the end of *epochs*) and save; what was seen, in the order of the data."""
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(TensorDataset(torch.arange(float(SAMPLES))[:, None]), batch_size=2, shuffle=True)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(root, automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
        step_scheduler_with_optimizer=by_samples,
    )
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    resumed = accelerator.resume()
    seen = []
    first = 0 if resumed is None else resumed.epoch
    batches = (batch for epoch in range(first, epochs) for batch in epoch_of(loader, epoch))
    for taken, (x,) in enumerate(batches, 1):
        accelerator.backward(model(x).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(x).flatten().int().tolist()
        if taken == steps:
            accelerator.save_state()
            break
    place = None if resumed is None else (resumed.step, resumed.epoch, resumed.offset)
    return place, seen, schedule.last_epoch


def epoch_of(loader, number):
    loader.set_epoch(number)
    return loader


@pytest.mark.parametrize(("by_samples", "dispatch"), [(True, None), (False, True)])
def test_an_epoch_is_seen_once_by_4_then_3_then_2_then_4_ranks(tmp_path, run_ranks, by_samples, dispatch):
    seen, steps, ranks_times_steps = [], 0, 0
    for world, count in ((4, 3), (3, 4), (2, 5), (4, None)):
        results = run_ranks(world, phase, str(tmp_path), count, by_samples, dispatch)
        place, mine, scheduled = results[0]
        assert all(result == results[0] for result in results)
        assert place == (None if not seen else (steps, 0, len(seen)))
        seen += mine
        count = count or -(-len(mine) // (2 * world))
        steps += count
        ranks_times_steps += count * world
        assert scheduled == (ranks_times_steps if by_samples else steps)
    assert len(seen) == SAMPLES
    assert sorted(seen) == list(range(SAMPLES))


def test_two_epochs_are_each_seen_once_when_the_ranks_change_within_and_between_them(tmp_path, run_ranks):
    seen = []
    # The first ends with the epoch; the third ends where one sample of the second epoch is left over.
    for world, count in ((4, 13), (3, 10), (2, 10), (4, None)):
        seen += run_ranks(world, phase, str(tmp_path), count, True, None, 2)[0][1]
    first, second = seen[:SAMPLES], seen[SAMPLES:]
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
