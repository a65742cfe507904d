"""Scripts that skip batches after loading: once is right, twice is told."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from orc.runtime import Accelerator, DataLoaderConfiguration

BATCHES = 12


def build(accumulate=1, dispatch=None):
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(torch.arange(24.0)[:, None], batch_size=2))


def train(run, skip=0, stop=None, loader=None):
    accelerator, model, optimizer, prepared = run
    seen = []
    for number, batch in enumerate(loader or prepared, 1):
        if number <= skip:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(int(batch[0]) // 2)
        if number == stop:
            break
    return seen


@pytest.fixture
def saved(tmp_path):
    run = build()
    for number, batch in enumerate(run[3], 1):
        run[0].backward(run[1](batch).mean())
        run[2].step()
        if number == 4:
            run[0].save_state(str(tmp_path / "state"))
            break
    return str(tmp_path / "state")


def test_a_script_that_skips_by_hand_what_the_loader_has_left_out_is_told_how_much_it_loses(saved):
    run = build()
    run[0].load_state(saved)
    with pytest.warns(UserWarning, match="restored to batch 4 of epoch 0, and then 4 of its batches went by"):
        assert train(run, skip=4) == [8, 9, 10, 11]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(run) == list(range(BATCHES)), "the next epoch is nobody's business"


def test_a_script_that_skips_all_that_is_left_is_told(saved):
    run = build()
    run[0].load_state(saved)
    with pytest.warns(UserWarning, match="and then 8 of its batches"):
        assert train(run, skip=9) == []


def test_whoever_skips_once_or_not_at_all_is_not_bothered(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = build()
        run[0].load_state(saved)
        assert train(run) == [4, 5, 6, 7, 8, 9, 10, 11]
        run[0].load_state(saved)
        assert train(run, loader=run[0].skip_first_batches(run[3], 4)) == [4, 5, 6, 7, 8, 9, 10, 11]
        run[0].load_state(saved)
        assert train(run, stop=1) == [4]


def test_batches_that_are_accumulated_are_not_taken_for_skipped_ones(saved):
    run = build(accumulate=4)
    run[0].load_state(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(run) == [4, 5, 6, 7, 8, 9, 10, 11]
    run[0].load_state(saved)
    with pytest.warns(UserWarning, match="and then 4 of its batches"):
        train(run, skip=4)
