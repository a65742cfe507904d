"""The same training on other numbers of processes: batch sizes, learning rates, what each rank reads."""

import pytest
import torch
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, RunContext, set_seed, use_context


def prepared(rank, world_size, batch_size, items=512, **options):
    accelerator = Accelerator(**options)
    return accelerator, accelerator.prepare(DataLoader(list(range(items)), batch_size=batch_size))


@pytest.mark.parametrize("single", [256, 128, 64, 32])
def test_documented_batch_sizes_are_equivalent(single):
    for world_size, batch_size in ((1, single), (2, single // 2), (8, single // 8)):
        step = set()
        for rank in range(world_size):
            with use_context(RunContext.fake(rank, world_size)):
                _, loader = prepared(rank, world_size, batch_size)
                assert loader.total_batch_size == single
                first = next(iter(loader))
                assert len(first) == batch_size
                step |= set(first.tolist())
        assert step == set(range(single))  # together the ranks train on the same samples


def test_the_troubleshooting_example():
    with use_context(RunContext.fake(0, 2)):
        assert prepared(0, 2, 8)[1].total_batch_size == 16
        assert prepared(0, 2, 16, split_batches=True)[1].total_batch_size == 16


def test_learning_rates_are_scaled_by_the_script():
    with use_context(RunContext.fake(0, 2)):
        accelerator = Accelerator()
        model = torch.nn.Linear(1, 1)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1e-3 * accelerator.num_processes))
        assert optimizer.param_groups[0]["lr"] == 2e-3


def test_a_seed_makes_two_runs_equal():
    losses = []
    for _ in range(2):
        set_seed(42)
        accelerator = Accelerator()
        inputs = torch.randn(32, 4)
        model, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(inputs, batch_size=4, shuffle=True))
        losses.append([model(batch).square().mean().item() for batch in loader])
    assert losses[0] == losses[1]
