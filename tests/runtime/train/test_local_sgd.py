"""Local SGD: parameters drift apart and are averaged; no gradient travels."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, LocalSGD


def train(steps=20, sgd_steps=8, accumulation=1, block=LocalSGD, **options):
    """Train on data that depends on the rank.

    Returns the weight after each step, whether it was equal on all ranks then, the calls of DDP's gradient all-reduce,
    and all parameters at the end.
    """
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    net[2].bias.requires_grad_(False)
    data = TensorDataset(*torch.randn(2, steps * 8, 2))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=8 // accelerator.num_processes)
    )
    reductions = 0

    def hook(state, bucket):
        nonlocal reductions
        reductions += 1
        return (
            torch.distributed.all_reduce(bucket.buffer() / 2, async_op=True).get_future().then(lambda f: f.value()[0])
        )

    if accelerator.use_distributed:
        model.register_comm_hook(None, hook)
    weights, equal = [], []
    block = block or (lambda **_: contextlib.nullcontext(SimpleNamespace(step=lambda: None)))
    with block(accelerator=accelerator, model=model, local_sgd_steps=sgd_steps, **options) as local_sgd:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x) - y[:, :1]) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
            weights.append(net[0].weight.detach().clone())
            equal.append(same(accelerator, weights[-1]))
    state = net.state_dict()
    return weights, equal, reductions, state, all(same(accelerator, value) for value in state.values())


def same(accelerator, value):
    everywhere = accelerator.gather(value[None])
    return all(torch.equal(everywhere[0], one) for one in everywhere)


@pytest.mark.distributed
def test_parameters_meet_every_eight_steps_and_at_the_end(run_ranks):
    for _, equal, reductions, _, at_end in run_ranks(2, train):
        assert [step + 1 for step, met in enumerate(equal) if met] == [8, 16]
        assert len(equal) == 20
        assert reductions == 0, "no gradient is all-reduced"
        assert at_end, "parameters and buffers are equal after the block"


@pytest.mark.distributed
def test_the_meeting_is_the_mean(run_ranks):
    def body():
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1, bias=False)
        model = accelerator.prepare(net)
        storage = net.weight.data_ptr()
        with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
            seen = []
            for step in range(3):
                net.weight.data.fill_(step + 10.0 * accelerator.process_index)
                local_sgd.step()
                seen.append(net.weight.item())
        return seen, net.weight.item(), net.weight.data_ptr() == storage

    assert run_ranks(2, body) == [([0.0, 6.0, 2.0], 7.0, True), ([10.0, 6.0, 12.0], 7.0, True)]


@pytest.mark.distributed
def test_switched_off_it_is_plain_data_parallel_training(run_ranks):
    for off, plain in run_ranks(2, lambda: (train(enabled=False), train(block=None))):
        weights, equal, reductions, _, _ = off
        assert all(equal)
        assert reductions == 20
        assert all(torch.equal(a, b) for a, b in zip(weights, plain[0], strict=True))


@pytest.mark.distributed
def test_accumulation_works_inside(run_ranks):
    """Two batches per optimizer step: weights change on every second batch, and are averaged on every fourth call."""
    for weights, equal, reductions, _, at_end in run_ranks(2, lambda: train(steps=8, sgd_steps=4, accumulation=2)):
        changed = [not torch.equal(a, b) for a, b in itertools.pairwise(weights)]
        assert changed == [True, False, True, False, True, False, True]
        assert equal == [True, False, False, True, True, False, False, True]
        assert reductions == 0
        assert at_end


def test_one_process_trains_as_without_it():
    inside, *_ = train()
    outside, *_ = train(enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.distributed
def test_a_block_that_fails_does_not_wait_for_the_others(run_ranks):
    def body():
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        try:
            with LocalSGD(accelerator, model, local_sgd_steps=8):
                if accelerator.is_main_process:
                    raise KeyError("mine")
                raise KeyError("ours")
        except KeyError as error:
            return str(error), model.require_backward_grad_sync

    assert run_ranks(2, body) == [("'mine'", True), ("'ours'", True)]


@pytest.mark.distributed
def test_what_cannot_work_is_refused(run_ranks):
    def body():
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1)
        model = accelerator.prepare(net)
        messages = []
        for bad in (lambda: LocalSGD(accelerator, net, 2), lambda: LocalSGD(accelerator, model, 0)):
            try:
                bad()
            except ValueError as error:
                messages.append(str(error))

        class Sharded(type(accelerator)):
            distributed_type = "FSDP"

        accelerator.__class__ = Sharded
        LocalSGD(accelerator, model, 2, enabled=False)
        try:
            LocalSGD(accelerator, model, 2)
        except NotImplementedError as error:
            messages.append(str(error))
        return messages

    expected = [
        "LocalSGD needs the model that prepare() returned, not the one inside it",
        "LocalSGD: local_sgd_steps must be at least 1, not 0",
        "LocalSGD works with plain replicas on CPUs or GPUs, not with FSDP",
    ]
    assert run_ranks(2, body) == [expected, expected]


@pytest.mark.distributed
def test_it_equals_separate_training_averaged_by_hand(run_ranks):
    """20 steps on two processes against two models in one process that are averaged after steps 8, 16 and 20."""

    def data():
        torch.manual_seed(0)
        return torch.randn(20, 2, 4, 3), torch.nn.Linear(3, 1)

    def body():
        inputs, net = data()
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for step in range(20):
                accelerator.backward(model(inputs[step, accelerator.process_index]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        return [parameter.detach() for parameter in net.parameters()]

    inputs, first = data()
    _, second = data()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (first, second)]
    for step in range(20):
        for rank, (net, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
            optimizer.zero_grad()
            net(inputs[step, rank]).square().mean().backward()
            optimizer.step()
        if step + 1 in (8, 16, 20):
            for a, b in zip(first.parameters(), second.parameters(), strict=True):
                a.data = b.data = (a.data + b.data) / 2
                b.data = b.data.clone()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, list(first.parameters()), rtol=0, atol=0)
