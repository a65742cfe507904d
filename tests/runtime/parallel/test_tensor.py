"""Tensor parallelism on real ranks: alone, with sharding and with copies; what it computes, keeps, and refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orc.runtime import (
    Accelerator,
    AcceleratorState,
    ContextError,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
)
from orc.runtime.core.compute import Compute
from orc.runtime.parallel.fsdp2 import FSDP2
from orc.runtime.parallel.tensor import PARALLELIZER
from orc.runtime.testing import run_threads

RANKS_IMPORT = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "torch._functorch.partitioners",
    "torch._dynamo.backends.debugging",
    "torch._inductor.lowering",
    "networkx",
)
STEPS, WORDS = 6, 32
PLAN = {
    "emb": "embedding_rowwise",
    "blocks.*.qkv.*": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    """Attention and two layers, with heads that are counted from what a rank has."""

    def __init__(self, size, heads):
        super().__init__()
        self.norm, self.width = nn.LayerNorm(size), size // heads
        self.qkv = nn.ModuleList([nn.Linear(size, size, bias=False) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(size, size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        q, k, v = (one(self.norm(x)).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    def __init__(self, size=16, heads=4, tied=False):
        super().__init__()
        self.emb, self.head = nn.Embedding(WORDS, size), nn.Linear(size, WORDS, bias=False)
        self.blocks = nn.ModuleList([Block(size, heads), Block(size, heads)])
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama(tied=False, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = {"vocab_size": WORDS, "num_hidden_layers": 2, "tie_word_embeddings": tied, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options, **changes}))


def qwen():
    """Norms over each head, which a plan says in a style of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=4, vocab_size=WORDS, num_hidden_layers=2, use_cache=False))


def made(kind):
    name, _, tied = kind.partition("-")
    if name == "plain":
        return Plain(tied=bool(tied))
    return qwen() if name == "qwen" else llama(bool(tied))


def loss_of(model, ids):
    output = model(ids)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(shares):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, WORDS, (shares, 2, 8), generator=generator) for _ in range(STEPS)]


def alone(kind, shares, accumulate=1):
    """Losses, norms and weights of one process that has the samples of all."""
    torch.manual_seed(0)
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step, ids in enumerate(batches(shares)):
        loss = loss_of(model, ids.flatten(0, 1))
        (loss / accumulate).backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


def config_of(sizes, kind, **more):
    handler = TorchTensorParallelConfig(plan=PLAN) if kind.startswith("plain") else None
    return ParallelismConfig(**{f"{name}_size": size for name, size in sizes.items()}, tp_handler=handler, **more)


def plugin_of(sizes, kind, **more):
    if "dp_shard" not in sizes:
        return None
    block = "LlamaDecoderLayer" if kind.startswith("llama") else "Block"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[block], **more
    )


def trained(sizes, kind, accumulate=1, sharding=None, **options):
    """The same of this rank, with what it keeps."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=config_of(sizes, kind),
        fsdp_plugin=plugin_of(sizes, kind, **(sharding or {})),
        gradient_accumulation_steps=accumulate,
        **options,
    )
    torch.manual_seed(accelerator.process_index)  # the first rank's values count
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for ids in batches(accelerator.ctx.topology.data_size):
        with accelerator.accumulate(model):
            loss = loss_of(model, ids[accelerator.ctx.topology.data_rank])
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    held = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in model.parameters())
    return losses, norms, accelerator.get_state_dict(model), held


def compare(ranks, expected):
    losses, norms, weights = expected
    for rank in ranks:
        torch.testing.assert_close(rank[0], losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rank[1], norms, rtol=1e-4, atol=1e-5)
    assert ranks[0][2].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            ranks[0][2][name], value, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def all_of(cases):
    return [trained(*case) for case in cases]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [({"tp": 2}, "llama", 1), ({"tp": 2}, "llama-tied", 1), ({"tp": 2}, "qwen", 1), ({"tp": 2}, "plain", 2)]),
        (4, [({"dp_shard": 2, "tp": 2}, "llama-tied", 1), ({"dp_replicate": 2, "tp": 2}, "llama", 2)]),
        (4, [({"dp_shard": 2, "tp": 2}, "plain-tied", 2), ({"dp_replicate": 2, "dp_shard": 2}, "plain", 1)]),
        (8, [({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "plain-tied", 1)]),
    ],
    ids=["tp", "with transformers", "without", "three dimensions"],
)
def test_training_gives_the_numbers_of_one_process(world, cases, run_ranks):
    ranks = run_ranks(world, all_of, cases, timeout=240)
    for number, (sizes, kind, accumulate) in enumerate(cases):
        shares = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
        expected = alone(kind, shares, accumulate)
        compare([rank[number] for rank in ranks], expected)
        whole = sum(value.numel() for value in {value.data_ptr(): value for value in expected[2].values()}.values())
        parts = sizes.get("dp_shard", 1) * sizes.get("tp", 1)
        assert whole / parts <= max(rank[number][3] for rank in ranks) < 1.2 * whole / parts + 200


def test_precision_recomputing_offload_and_compiling_go_with_it(run_ranks):
    sharded, copied = {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}
    cases = [
        (sharded, {"sharding": {"activation_checkpointing": True, "cpu_offload": True}}, 1e-4),
        (sharded, {"mixed_precision": "bf16"}, 1e-2),
        (sharded, {"mixed_precision": "fp16"}, 1e-2),
        (copied, {"mixed_precision": "fp16"}, 1e-2),
        (copied, {"dynamo_backend": "aot_eager"}, 1e-4),
    ]

    def every():
        return [trained(sizes, "plain", **options)[:2] for sizes, options, _ in cases]

    expected = alone("plain", 2)[:2]
    for (_, options, tolerance), found in zip(cases, run_ranks(4, every, timeout=240)[0], strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-5, msg=lambda t, at=options: f"{at}: {t}")


def gradients_of_norms(sizes, breaks):
    """Gradients of what no rank has cut, of a model with dropout; if it *breaks*, after a backward that did not end."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, parallelism_config=config_of(sizes, "plain"))
    torch.manual_seed(accelerator.process_index)
    model = Plain()
    model.blocks.insert(1, nn.Dropout(0.5))
    model = accelerator.prepare(model)
    ids = batches(2)[0][accelerator.ctx.topology.data_rank]
    if breaks:
        handle = model.emb.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            accelerator.backward(loss_of(model, ids))
        handle.remove()
        model.zero_grad()
    accelerator.backward(loss_of(model, ids))
    return [one.grad for one in model.parameters() if not hasattr(one, "to_local")]


@pytest.mark.parametrize(
    ("sizes", "breaks"),
    [({"tp": 2}, False), ({"dp_replicate": 2, "tp": 2}, True)],
    ids=["with seeds of their own", "after a backward that broke off"],
)
def test_what_no_rank_has_cut_gets_the_same_gradients_on_all(sizes, breaks, run_ranks):
    first, *others = run_ranks(2 * len(sizes), gradients_of_norms, sizes, breaks)
    assert len(first) == 4
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-7)


class Scaled(Block):
    """A block with one factor for all heads, of which a rank has some."""

    def __init__(self, size, heads):
        super().__init__(size, heads)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)) * self.factor)


def first_update(sizes, kind, block):
    """What the first update says, and who listens to the second."""
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, parallelism_config=config_of(sizes, kind), fsdp_plugin=plugin_of(sizes, kind))
    torch.manual_seed(0)  # by chance the parts of a scalar's gradient may be nearly the same
    model = Plain()
    model.blocks[1] = block(16, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(loss_of(model, batches(2)[0][accelerator.ctx.topology.data_rank]))
    try:
        optimizer.step()
    except ContextError as error:
        return str(error), optimizer.steps
    return len(accelerator.events.before_step), optimizer.steps


def first_updates():
    tried = [
        ({"tp": 2, "dp_shard": 2}, Scaled),
        ({"tp": 2, "dp_replicate": 2}, Scaled),
        ({"tp": 2, "dp_shard": 2}, Block),
    ]
    return [first_update(sizes, "plain", block) for sizes, block in tried]


def test_what_a_plan_leaves_whole_and_a_rank_uses_on_its_part_is_refused_before_it_drifts(run_ranks):
    for sharded, copied, right in run_ranks(4, first_updates, timeout=120):
        for said, steps in (sharded, copied):
            assert "different gradients of blocks.1.factor, which the plan leaves whole" in said
            assert steps == 0
        assert right == (0, 1)


@pytest.mark.parametrize(
    ("make", "plan", "message"),
    [
        (Plain, None, "Plain has no plan of its own.*TorchTensorParallelConfig"),
        (Plain, {"head": "colwize"}, "head is 'colwize', which is no style.*did you mean 'colwise'"),
        (Plain, {"hed": "colwise"}, "'hed' is the name of no module of Plain, did you mean 'head'"),
        (Plain, {"blocks.*.norm": "colwise"}, "a LayerNorm has no matrix to cut"),
        (lambda: Plain(tied=True), {"head": "rowwise"}, "emb.weight and head.weight are one weight"),
        (lambda: Plain(size=15, heads=3), PLAN, r"blocks.0.qkv.0 has 15 output features; .*blocks.1.down has|blocks.0"),
        (lambda: llama(num_attention_heads=2, num_key_value_heads=1), None, "num_key_value_heads is 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank_with_all_its_names(make, plan, message):
    model = make()

    def ask():
        handler = None if plan is None else TorchTensorParallelConfig(plan=plan)
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
        with pytest.raises(ContextError, match=message):
            accelerator.prepare(model)

    run_threads(2, ask)
    assert not any(hasattr(one, "to_local") for one in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_plugin": {"fsdp_version": 1}}, "the strategies tensor and fsdp1 cannot be used together"),
        ({"tp_handler": {"enable_async_tp": True}}, "enable_async_tp needs GPUs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="fp16")]}, "and here replicas averages them"),
    ],
)
def test_what_does_not_go_with_tensor_parallelism_is_refused_by_name(options, message):
    def ask():
        plugin = options.get("fsdp_plugin")
        handler = TorchTensorParallelConfig(plan=PLAN, **options.get("tp_handler", {}))
        accelerator = Accelerator(
            cpu=True,
            kwargs_handlers=options.get("kwargs_handlers"),
            fsdp_plugin=FullyShardedDataParallelPlugin(**plugin) if plugin else None,
            parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2, tp_handler=handler),
        )
        with pytest.raises(ContextError, match=message):
            accelerator.prepare(Plain())

    run_threads(4, ask)


def saved(sizes, folder):
    """Train, save the state and the model, train one step more; the weights then."""
    return _with_state(sizes, folder, load=False)


def loaded(sizes, folder):
    """Load that state into another layout, train one step more; the weights then."""
    return _with_state(sizes, folder, load=True)


def _with_state(sizes, folder, load):
    AcceleratorState._reset_state(reset_partial_state=False)
    config = config_of(sizes, "plain") if sizes else None
    accelerator = Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin_of(sizes, "plain"))
    torch.manual_seed(int(load))
    model = Plain(tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(ids):
        accelerator.backward(loss_of(model, ids))
        optimizer.step()
        optimizer.zero_grad()

    first, second = batches(1)[:2]  # the same for all: any layout then gives the same numbers
    if load:
        accelerator.load_state(folder)
        drawn = accelerator.gather(torch.rand(1)).view(-1, sizes.get("tp", 1))
        assert (drawn == drawn[:, :1]).all()  # dropout has to be the same along tp
    else:
        step(first[0])
        accelerator.save_state(folder)
        accelerator.save_model(model, f"{folder}-model")
    step(second[0])
    return accelerator.get_state_dict(model)


def test_a_state_is_loaded_into_another_layout(run_ranks, tmp_path):
    from safetensors.torch import load_file

    layouts = [(1, {}), (2, {"tp": 2}), (4, {"dp_shard": 2, "tp": 2})]
    for source, target in [(1, 0), (0, 1), (2, 1)]:
        folder = str(tmp_path / f"{source}-{target}")
        expected = run_ranks(layouts[source][0], saved, layouts[source][1], folder)[0]
        found = run_ranks(layouts[target][0], loaded, layouts[target][1], folder)[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        whole = load_file(f"{folder}-model/model.safetensors")
        assert all(whole[name].shape == expected[name].shape for name in whole)
        assert {"blocks.0.up.weight", "blocks.1.norm.bias"} <= whole.keys()


def test_a_model_that_transformers_has_cut_is_trained_as_it_is(run_ranks, tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path)

    def train():
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
        cut = DistributedConfig(tp_size=2, tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=cut)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for ids in batches(1):
            losses.append(loss_of(model, ids[0]))
            accelerator.backward(losses[-1])
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    losses = run_ranks(2, train, timeout=180)[0]
    torch.testing.assert_close(losses, alone("llama", 1)[0], rtol=1e-4, atol=1e-5)


def test_shards_on_gpus_are_refused_over_gloo_where_torch_crashes():
    class Context:
        device, backend, distributed, group = torch.device("cuda", 0), "gloo", True, object()
        compute = Compute()

    assert "use nccl, with one rank for each GPU" in PARALLELIZER.requires(Context())
    assert "use nccl, with one rank for each GPU" in FSDP2().requires(Context())
    Context.backend = "nccl"
    assert PARALLELIZER.requires(Context()) is FSDP2().requires(Context()) is None


def test_a_model_of_16_bits_that_came_cut_is_trained_in_float32(run_ranks):
    def train(dtype):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        AcceleratorState._reset_state(reset_partial_state=False)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        config = ParallelismConfig(tp_size=2, dp_shard_size=2)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin, parallelism_config=config)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(torch.bfloat16).to(dtype)
        styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = parallelize_module(model, accelerator.torch_device_mesh["tp"], styles)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: one.full_tensor() for name, one in model.state_dict().items()}

    def both():
        expected = train(torch.float32)
        with pytest.warns(UserWarning, match="4 parameters of 16 bits are trained in mixed precision"):
            found = train(torch.bfloat16)
        return found, expected

    for found, expected in run_ranks(4, both):
        assert {one.dtype for one in found.values()} == {torch.float32}
        torch.testing.assert_close(found, expected)
