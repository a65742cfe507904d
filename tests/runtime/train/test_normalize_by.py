"""Losses that are sums over tokens, divided by the tokens of the whole window over all processes."""

import pytest
import torch
import torch.distributed as dist

from orc.runtime import Accelerator, GradientAccumulationPlugin, GradScalerKwargs

LENGTHS = [3, 1, 7, 2, 5, 1, 4, 2, 6, 1, 1, 9]  # tokens of each micro-batch, for all ranks together


def tokens(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randn(LENGTHS[index], 3, generator=generator), torch.randn(LENGTHS[index], 1, generator=generator)


def a_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def summed(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")


def reference(windows):
    """Weights after one SGD step per window on the mean over all its tokens, in one process."""
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows:
        batch = [torch.cat(parts) for parts in zip(*(tokens(index) for index in window), strict=True)]
        (summed(model, batch) / len(batch[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(accelerator, batches, count=len, clip=False):
    model = a_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for index in batches:
        batch = tokens(index)
        with accelerator.accumulate(model):
            accelerator.backward(summed(model, batch), normalize_by=count(batch[0]))
            if clip and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    return (weights, norms) if clip else weights


def close(found, wanted, tolerance=1e-6):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)
    return True


@pytest.mark.parametrize("count", [len, lambda x: torch.tensor(len(x)), lambda x: torch.tensor([float(len(x))])])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_token_weighs_the_same_in_one_process(steps, count):
    windows = [range(start, start + steps) for start in range(0, 12, steps)]
    close(train(Accelerator(gradient_accumulation_steps=steps), range(12), count), reference(windows))


@pytest.mark.distributed
@pytest.mark.parametrize("each_batch", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_token_weighs_the_same_over_processes(run_ranks, steps, each_batch):
    def body(steps, each_batch):
        calls = []
        reduce = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: calls.append(1) or reduce(*args, **kwargs)
        plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each_batch)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        rank = accelerator.process_index
        return train(accelerator, range(rank, 12, 2)), len(calls)

    windows = [range(start, start + 2 * steps) for start in range(0, 12, 2 * steps)]
    wanted = reference(windows)
    for weights, calls in run_ranks(2, body, steps, each_batch):
        assert close(weights, wanted)
        assert calls == len(windows), "one all-reduce of the count per window"


@pytest.mark.distributed
def test_counts_that_are_tensors_and_clipping_over_processes(run_ranks):
    def body():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        return train(accelerator, range(accelerator.process_index, 12, 2), lambda x: torch.tensor(len(x)), clip=True)

    model = a_model()
    batch = [torch.cat(parts) for parts in zip(*(tokens(index) for index in range(4)), strict=True)]
    (summed(model, batch) / len(batch[0])).backward()
    first_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    wanted = reference([range(4), range(4, 8), range(8, 12)])
    for weights, norms in run_ranks(2, body):
        assert close(weights, wanted)
        assert norms[0] == pytest.approx(first_norm, rel=1e-4), "clipping sees the normalised gradient"


def test_a_short_last_window_is_right_too():
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = a_model()
    loader = torch.utils.data.DataLoader(range(6), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for index in loader:
        with accelerator.accumulate(model):
            batch = tokens(int(index))
            accelerator.backward(summed(model, batch), normalize_by=len(batch[0]))
            optimizer.step()
            optimizer.zero_grad()
    close([p.detach() for p in model.parameters()], reference([range(4), range(4, 6)]))


def test_with_a_loss_scale():
    scaler = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="fp16", kwargs_handlers=[scaler])
    weights = train(accelerator, range(12))
    assert not accelerator.optimizer_step_was_skipped
    close(weights, reference([range(start, start + 3) for start in range(0, 12, 3)]), tolerance=5e-3)


def test_a_parameter_of_two_optimizers_is_scaled_once():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2)]
    model, *_ = accelerator.prepare(model, *optimizers)
    for value, count in ((6.0, 1), (4.0, 4)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[value]])).sum(), normalize_by=count)
    assert model.weight.grad.item() == pytest.approx(2.0)


def test_batches_without_tokens_weigh_nothing():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    for counts, gradient in (((0, 5), 1.0), ((torch.tensor(0), torch.tensor(0)), 0.0)):
        model.weight.grad = None
        for count in counts:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(int(count), 1)).sum(), normalize_by=count)
        assert model.weight.grad.item() == pytest.approx(gradient)
