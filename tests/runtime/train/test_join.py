"""Training on inputs that end at different times on different processes."""

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orc.runtime import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.distributed


def train(accelerator, loader, model, even_batches):
    """One epoch; the batches this process saw."""
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    Accelerator()  # which has settings of its own
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=even_batches):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            seen += 1
    return seen


def parts(accelerator, samples=7):
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(float(samples)).view(-1, 1))
    return accelerator.prepare(DataLoader(data, batch_size=1), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("steps", [1, 2])
def test_processes_that_have_run_out_answer_the_others(run_ranks, steps):
    def body(steps):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        loader, model = parts(accelerator)
        before = len(loader)
        seen = train(accelerator, loader, model, even_batches=False)
        weights = accelerator.gather(torch.cat([p.detach().view(-1) for p in model.parameters()])[None])
        again = train(accelerator, loader, model, even_batches=None)
        each_batch = accelerator.gradient_state.sync_each_batch
        return before, seen, torch.equal(weights[0], weights[1]), len(loader), again, each_batch

    zero, one = run_ranks(2, body, steps, timeout=30)
    assert zero == (4, 4, True, 4, 4, False)
    assert one == (4, 3, True, 4, 4, False)


def test_those_that_have_run_out_count_with_a_gradient_of_zero(run_ranks):
    """Three samples, two processes: the last step has one sample only, and is still divided by two."""

    def body():
        accelerator = Accelerator()
        loader, model = parts(accelerator, samples=3)
        with torch.no_grad():
            model.module.weight.zero_()
        train(accelerator, loader, model, even_batches=False)
        return round(model.module.weight.item(), 6)

    assert run_ranks(2, body, timeout=30) == [pytest.approx(-0.1 * (0.5 + 1.0))] * 2


def test_loaders_that_are_uneven_by_configuration_need_no_override(run_ranks):
    def body():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
        loader, model = parts(accelerator)
        return train(accelerator, loader, model, even_batches=None)

    assert run_ranks(2, body, timeout=30) == [4, 3]


def test_a_batch_sampler_of_the_users_own_is_overridden_too(run_ranks):
    def body():
        class Pairs(torch.utils.data.Sampler):
            batch_size, drop_last = 1, False

            def __iter__(self):
                return iter([[0], [1], [2]])

            def __len__(self):
                return 3

        accelerator = Accelerator()
        data = TensorDataset(torch.ones(3, 1))
        loader, model = accelerator.prepare(DataLoader(data, batch_sampler=Pairs()), torch.nn.Linear(1, 1))
        return train(accelerator, loader, model, even_batches=False), train(accelerator, loader, model, None)

    assert run_ranks(2, body, timeout=30) == [(2, 2), (1, 2)]


def test_an_error_inside_sets_the_loaders_back(run_ranks):
    def body():
        accelerator = Accelerator()
        loader, model = parts(accelerator)
        with (
            pytest.raises(OSError, match="no disk"),
            accelerator.join_uneven_inputs([model], even_batches=False),
        ):
            raise OSError("no disk")
        return len(loader), accelerator.gradient_state.sync_each_batch

    assert run_ranks(2, body) == [(4, False)] * 2


def test_iterable_loaders_keep_theirs_with_a_warning(run_ranks):
    def body():
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.ones(4, 1))

        accelerator = Accelerator()
        loader, model = accelerator.prepare(DataLoader(Stream(), batch_size=1), torch.nn.Linear(1, 1))
        mapped = accelerator.prepare(DataLoader(torch.ones(3, 1), batch_size=1))
        with (
            pytest.warns(UserWarning, match="for map-style datasets only") as caught,
            accelerator.join_uneven_inputs([model], even_batches=False),
        ):
            lengths = len(mapped)
        del loader
        return lengths, len(caught), caught[0].filename.endswith("test_join.py")

    assert run_ranks(2, body) == [(2, 1, True), (1, 1, True)]


def test_elsewhere_it_has_no_effect(run_ranks):
    def body():
        accelerator = Accelerator()
        loader, model = parts(accelerator)
        with pytest.warns(UserWarning, match="no effect.*not Linear"), accelerator.join_uneven_inputs([model], False):
            return len(loader)

    assert run_ranks(2, body, env={"ORC_STRATEGY": "none"}) == [4, 4]


def test_one_process_needs_no_joining():
    accelerator = Accelerator()
    loader, model = parts(accelerator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(accelerator, loader, model, even_batches=False) == 7


def test_losses_cannot_be_divided_by_counts_that_nobody_adds_up(run_ranks):
    def body():
        accelerator = Accelerator()
        _, model = parts(accelerator)
        loss = model(torch.ones(1, 1)).sum()
        with accelerator.join_uneven_inputs([model], even_batches=True):
            accelerator.backward(loss, normalize_by=1)
        with (
            pytest.raises(ValueError, match="cannot be used inside join_uneven_inputs"),
            accelerator.join_uneven_inputs([model], even_batches=False),
        ):
            accelerator.backward(loss, normalize_by=1)
        accelerator.backward(model(torch.ones(1, 1)).sum(), normalize_by=1)

    run_ranks(2, body)
