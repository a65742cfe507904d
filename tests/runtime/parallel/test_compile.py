"""Prepared models compiled by torch.compile."""

import pytest
import torch

from orc.runtime import Accelerator, TorchDynamoPlugin, compile_regions, extract_model_from_parallel
from orc.runtime.core.context import RunContext, use_context


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).relu()


class Blocks(torch.nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.head = torch.nn.Linear(2, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(accelerator, model, steps=4):
    torch.manual_seed(0)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        with accelerator.accumulate(model):
            output = model(torch.randn(4, 2))
            accelerator.backward(output.square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return output


@pytest.fixture
def made():
    torch.manual_seed(1)
    return Blocks()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_compiled_model_trains_like_the_plain_one(made, precision):
    import copy

    plain = copy.deepcopy(made)
    accelerator = Accelerator(mixed_precision=precision, dynamo_backend="eager", gradient_accumulation_steps=2)
    model = accelerator.prepare(made)
    assert type(model).__name__ == "OptimizedModule"
    assert accelerator.prepare(model) is model
    torch._dynamo.utils.counters.clear()
    output = train(accelerator, model)
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"], "autocast is part of the graph"
    other = Accelerator(gradient_accumulation_steps=2)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, train(other, other.prepare(plain)), rtol=1e-2, atol=1e-2)
    assert list(accelerator.get_state_dict(model)) == list(plain.state_dict())


def test_unwrapping_keeps_or_removes_the_compiled_form(made):
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    model = accelerator.prepare(made)
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is made


def test_evaluation_models_are_compiled_too(made):
    model = Accelerator(dynamo_backend="eager").prepare_model(made, evaluation_mode=True)
    assert type(model).__name__ == "OptimizedModule"


@pytest.mark.distributed
def test_compiled_and_data_parallel(run_ranks):
    def body():
        accelerator = Accelerator(dynamo_backend="eager", gradient_accumulation_steps=2)
        torch.manual_seed(accelerator.process_index)
        inner = Blocks()
        model = accelerator.prepare(inner)
        calls = []

        def hook(state, bucket):
            calls.append(1)
            return (
                torch.distributed.all_reduce(bucket.buffer() / 2, async_op=True)
                .get_future()
                .then(lambda done: done.value()[0])
            )

        model._orig_mod.register_comm_hook(None, hook)
        kept = accelerator.unwrap_model(model)
        kinds = type(model._orig_mod).__name__, type(kept).__name__, type(kept._orig_mod).__name__
        train(accelerator, model)
        weights = accelerator.gather(inner.head.weight.detach())
        bare = accelerator.unwrap_model(model, keep_torch_compile=False) is inner
        return kinds, len(calls), torch.equal(weights[0], weights[1]), bare

    kinds = ("DistributedDataParallel", "OptimizedModule", "Blocks")
    assert run_ranks(2, body) == [(kinds, 2, True, True)] * 2


def test_repeated_blocks_are_compiled_once(made):
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(dynamo_plugin=plugin)
    model = accelerator.prepare(made)
    assert model is made
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True] * 3
    assert model.head._compiled_call_impl is None
    torch._dynamo.utils.counters.clear()
    model(torch.ones(1, 2, requires_grad=True))
    assert torch._dynamo.utils.counters["frames"]["ok"] == 1, "the second block finds the code of the first"


def test_a_script_compiles_the_blocks_of_its_model_or_all_of_one_that_has_none(made):
    assert compile_regions(made, backend="eager") is made
    assert [block._compiled_call_impl is not None for block in made.blocks] == [True] * 3
    assert made._compiled_call_impl is made.head._compiled_call_impl is None
    assert compile_regions(made.head, backend="eager")._compiled_call_impl is not None


def test_the_environment_chooses_and_the_script_wins(monkeypatch, made):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    monkeypatch.setenv("ORC_DYNAMO_USE_DYNAMIC", "true")
    plugin = Accelerator().dynamo_plugin
    assert plugin.to_kwargs() == {"backend": "eager", "mode": "default", "dynamic": True}
    assert Accelerator(dynamo_backend="inductor").dynamo_plugin.to_kwargs()["backend"] == "inductor"
    assert Accelerator(dynamo_backend="no").prepare(made) is made
    disabled = Accelerator(kwargs_handlers=[TorchDynamoPlugin(disable=True)])
    assert disabled.prepare(made) is made


def test_without_a_back_end_nothing_is_compiled(made):
    assert Accelerator().prepare(made) is made
    assert Accelerator().dynamo_plugin.backend == "NO"


def test_saying_it_twice_or_wrongly_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="configured twice"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
    with pytest.raises(ValueError, match="'inducter' is not one of no, eager"):
        Accelerator(dynamo_backend="inducter")


def test_what_the_script_compiled_is_found_below_what_prepare_put_around_it(made):
    context = RunContext.fake(0, 2)
    with use_context(context):
        compiled = torch.compile(made, backend="eager")
        accelerator = Accelerator()
        prepared = accelerator.prepare(compiled)
        assert type(prepared).__name__ == "DistributedDataParallel"
        assert accelerator.unwrap_model(prepared) is compiled
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is made
    assert extract_model_from_parallel(made) is made
