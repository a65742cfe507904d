"""Gradient compression of data-parallel training, by the documented options."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

NO, FP16, BF16 = DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16
POWER, BATCHED = DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD


class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 10)

    def forward(self, x):
        return self.layer(x)


def gradients(options, steps=1):
    """The gradient after *steps* steps of the documented example, its exact value, and the dtype that travelled."""
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    torch.manual_seed(0)
    inner = MyModel()
    data = TensorDataset(torch.randn(64, 10), torch.randn(64, 10))
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.05), DataLoader(data, batch_size=16)
    )
    travelled = set()
    reduce = torch.distributed.all_reduce

    def spy(tensor, *args, **kwargs):
        travelled.add(tensor.dtype)
        return reduce(tensor, *args, **kwargs)

    torch.distributed.all_reduce = spy
    try:
        first = everything(model, data)
        for _ in range(steps):
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                exact = torch.autograd.grad(loss, inner.layer.weight, retain_graph=True)[0]
                optimizer.zero_grad()
                accelerator.backward(loss)
                grad = inner.layer.weight.grad.clone()
                optimizer.step()
    finally:
        torch.distributed.all_reduce = reduce
    exact = accelerator.reduce(exact, "mean")
    return (grad - exact).abs().max().item(), exact.abs().max().item(), travelled, everything(model, data) < first


def everything(model, data):
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).item()


CASES = [
    ({"comm_hook": FP16}, torch.float16, 1e-3),
    ({"comm_hook": BF16}, torch.bfloat16, 1e-2),
    ({"comm_hook": POWER}, torch.float32, 1e-6),  # plain for its first thousand steps
    ({"comm_hook": POWER, "comm_wrapper": FP16}, torch.float16, 1e-3),
    ({"comm_hook": BATCHED, "comm_wrapper": BF16}, torch.bfloat16, 1e-2),
    ({"comm_hook": NO, "comm_wrapper": FP16}, torch.float16, 1e-3),
    ({"comm_hook": "fp16"}, torch.float16, 1e-3),
]


@pytest.mark.distributed
def test_compressed_gradients_are_the_average(run_ranks):
    def body():
        return [gradients(options) for options, _, _ in CASES]

    for results in run_ranks(2, body):
        for (options, dtype, tolerance), (error, size, travelled, learnt) in zip(CASES, results, strict=True):
            assert error <= tolerance * size, options
            assert dtype in travelled, options
            assert learnt, options


@pytest.mark.distributed
def test_power_sgd_compresses_with_its_options(run_ranks):
    def body():
        found = []
        for hook in (POWER, BATCHED):
            options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
            found.append(gradients({"comm_hook": hook, "comm_state_option": options}, steps=12))
        return found

    for results in run_ranks(2, body):
        for error, size, _, learnt in results:
            assert 1e-4 * size < error, "an approximation of rank 2"
            assert learnt


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_hook": POWER, "comm_state_option": {"matrix_rank": 2}}, "comm_hook power_sgd.*matrix_rank"),
        ({"comm_hook": FP16, "comm_state_option": {"a": 2}}, "comm_hook fp16 has no options"),
        ({"comm_hook": FP16, "comm_wrapper": POWER}, "comm_wrapper power_sgd wraps nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(run_ranks, options, message):
    def body():
        with pytest.raises(ValueError, match=message):
            Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)]).prepare(MyModel())

    run_ranks(2, body)


def test_an_unknown_hook_is_refused():
    with pytest.raises(ValueError, match="top_k"):
        DistributedDataParallelKwargs(comm_hook="top_k")
