"""Estimates of a parallel run: what is predicted from shapes is what lies on the processes."""

import pytest
import torch
from torch import nn

from orc.runtime.weights.parallel_memory import (
    OPTIMIZERS,
    Training,
    estimate_parallel_memory,
    parse_parallelism,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 21), nn.Linear(21, 10)  # no whole number of rows for two shards

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(10, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def bytes_on_this_process(model, optimizer):
    """Return the bytes of parameters, gradients and optimizer states that this process really has."""

    def local(one):
        tensor = one.to_local() if hasattr(one, "to_local") else one
        return int(tensor.numel() * tensor.element_size())

    parameters = list(model.parameters())
    bare = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in bare.state.values() for value in state.values() if torch.is_tensor(value)]
    return (
        sum(map(local, parameters)),
        sum(local(one.grad) for one in parameters if one.grad is not None),
        sum(map(local, states)),
    )


def trained(pp, shard, replicate):
    from orc.runtime import (
        Accelerator,
        AcceleratorState,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
    )

    AcceleratorState._reset_state()
    words = torch.arange(20).view(4, 5) % 17
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if shard > 1 else None,
        parallelism_config=ParallelismConfig(
            pp_size=pp,
            dp_shard_size=shard,
            dp_replicate_size=replicate,
            pp_handler=PipelineParallelConfig(loss_fn=loss_fn, example_args=(words,)),
        ),
    )
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(words, target=words))
    optimizer.step()
    return accelerator.ctx.topology.place("pp"), bytes_on_this_process(model, optimizer)


@pytest.mark.parametrize(("pp", "shard", "replicate"), [(2, 2, 1), (1, 2, 2)])
def test_what_is_predicted_lies_on_the_processes(run_ranks, pp, shard, replicate):
    sizes = {"pp": pp, "dp_shard": shard, "dp_replicate": replicate}
    with torch.device("meta"):
        empty = Net()
    stages = estimate_parallel_memory(empty, Training(sizes)).stages
    found = run_ranks(4, trained, pp, shard, replicate, env={"ORC_USE_CPU": "1"}, timeout=200)
    for place in range(pp):
        # The first shard is the largest, which is the one that is predicted.
        largest = max(measured for stage, measured in found if stage == place)
        expected = stages[place]
        assert largest == (expected.parameters, expected.gradients, expected.optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_of_each_optimizer_have_their_size(optimizer):
    model = nn.Linear(256, 512, bias=False)
    expected = {
        "adamw": 2 * 4 * 2**17 + 4,
        "adam8bit": 2 * (2**17 + 4 * 2**9),
        "adafactor": 4 * (256 + 512),
        "sgd": 0,
        "momentum": 4 * 2**17,
    }
    (stage,) = estimate_parallel_memory(model, Training(optimizer=optimizer)).stages
    assert (stage.parameters, stage.gradients, stage.optimizer) == (4 * 2**17, 4 * 2**17, expected[optimizer])
    assert (stage.gathered, stage.activations) == (0, None)


@pytest.mark.parametrize("tokens", ["cp", "sp"])
def test_processes_that_share_sequences_share_the_shards(tokens):
    training = Training({"dp_shard": 2, tokens: 2})
    (stage,) = estimate_parallel_memory(nn.Linear(256, 512, bias=False), training).stages
    assert stage.parameters == 4 * 2**17 / 4


def test_activations_follow_the_formula():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    def kept(checkpointing=False, **sizes):
        training = Training(sizes, mixed_precision="bf16", batch=2, sequence=32, checkpointing=checkpointing)
        return [stage.activations for stage in estimate_parallel_memory(model, training).stages]

    layer, logits = 2 * 32 * 64, 4 * 2 * 32 * 100
    assert kept() == [4 * 34 * layer + logits]
    assert kept(cp=2) == [(4 * 34 * layer + logits) / 2]
    assert kept(tp=2) == [4 * 22 * layer + logits / 2]
    assert kept(checkpointing=True) == [4 * 2 * layer + 34 * layer + logits]
    assert kept(pp=2) == [2 * 2 * 34 * layer / 2, 2 * 34 * layer / 2 + logits / 2]
    # Of a model with a plan the plan says what tensor parallelism cuts.
    whole, half = (estimate_parallel_memory(model, Training({"tp": n})).largest.parameters for n in (1, 2))
    norms = 4 * 64 * (2 * 4 + 1)
    embedding = 4 * 64 * 100
    assert half in ((whole - norms - embedding) // 2 + norms + embedding, (whole - norms) // 2 + norms)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_shrd=2", "did you mean 'dp_shard'"),
        ("tp", "each once"),
        ("tp=2,tp=2", "each once"),
        ("cp=2,sp=2", "two ways"),
        ("tp=0", "at least one"),
    ],
)
def test_layouts_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_parallelism(text)
