"""Sequence parallelism: pieces of sequences, and in attention heads, over real ranks learn what one process learns."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

RANKS_IMPORT = (
    "transformers.models.llama.modeling_llama",
    *("torch._functorch.partitioners", "torch._inductor.lowering", "networkx"),
)
VOCABULARY, LENGTH = 32, 16


class Layer(nn.Module):
    def __init__(self, heads, size):
        super().__init__()
        self.mixed, self.heads = nn.Linear(size, 3 * size, bias=False), heads

    def forward(self, hidden):
        query, key, value = self.mixed(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + attended.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Two layers of attention, which are computed again in backward."""

    def __init__(self, heads=4, size=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, size), nn.Embedding(LENGTH, size)
        self.layers = nn.ModuleList(Layer(heads, size) for _ in range(2))
        self.out = nn.Linear(size, VOCABULARY)

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.places(position_ids)
        for layer in self.layers:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return self.out(hidden)


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options}))


def rows_of(samples):
    rows = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = rows.clone()
    labels[:, :5] = -100  # a prompt: pieces have different numbers of labels
    return [{"input_ids": row, "labels": marked} for row, marked in zip(rows, labels, strict=True)]


def aggregated(loss, shift_labels, group, ranks):
    """The loss over all pieces, as the documentation of sequence parallelism has it."""
    from torch.distributed.nn.functional import all_gather

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
        losses = all_gather(loss, group=group)
        counts = all_gather((shift_labels != -100).sum(), group=group)
    total = sum(losses[rank] * counts[rank] for rank in range(ranks) if counts[rank] > 0)
    return total / max(sum(counts), 1)


def trained(sizes, shard, whose, folder, steps=2):
    from orc.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if shard else None
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(sp_backend="torch", **sizes),
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2,
    )
    topology = accelerator.ctx.topology
    shares, group, ranks = topology.data_size, topology.group("sp"), topology.size("sp")
    data = rows_of(4 * steps * shares)

    def one():
        torch.manual_seed(0)
        return llama() if whose == "transformers" else Decoder()

    def loss_of(model, batch, reduction="mean"):
        labels = batch.pop("shift_labels")
        logits = model(**batch)
        logits = getattr(logits, "logits", logits)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    model = one()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))
    norms, seen = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            seen.append({name: list(value.shape) for name, value in batch.items()})
            labels = batch["shift_labels"]
            if accelerator.num_processes == ranks:
                accelerator.backward(aggregated(loss_of(model, dict(batch)), labels, group, ranks))
            else:  # over gloo torch's differentiable all_gather knows no groups
                accelerator.backward(loss_of(model, dict(batch), "sum"), normalize_by=(labels != -100).sum())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    plain, expected = one(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(steps):
        for batch in range(2 * shares):
            at = 2 * (2 * step * shares + batch)
            given = torch.utils.data.default_collate(data[at : at + 2])
            following = functional.pad(given.pop("labels"), (0, 1), value=-100)[:, 1:]
            given |= {"shift_labels": following, "position_ids": torch.arange(LENGTH).expand(2, LENGTH)}
            (loss_of(plain, given) / (2 * shares)).backward()
        expected.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items() if state else ():
        torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-5)
    return seen[0], norms, expected


@pytest.mark.parametrize(
    ("sizes", "shard", "whose"),
    [
        ({"sp_size": 2}, False, "torch"),
        ({"sp_size": 2, "dp_replicate_size": 2}, False, "torch"),
        ({"sp_size": 2, "tp_size": 2}, False, "transformers"),
        ({"sp_size": 2, "dp_shard_size": 2}, True, "torch"),
    ],
)
def test_pieces_and_heads_teach_what_whole_sequences_teach(run_ranks, tmp_path, sizes, shard, whose):
    ranks = math.prod(sizes.values())
    for seen, norms, expected in run_ranks(ranks, trained, sizes, shard, whose, str(tmp_path / "saved")):
        assert seen == {"input_ids": [2, 8], "position_ids": [2, 8], "shift_labels": [2, 8]}
        assert norms == pytest.approx(expected, rel=1e-4)


def refusals():
    """What is refused on this rank before anything is computed."""
    from orc.runtime import (
        Accelerator,
        ContextError,
        DeepSpeedSequenceParallelConfig,
        ParallelismConfig,
        PartialState,
    )
    from orc.runtime.parallel.sequence import SequenceCut

    def accelerator(**options):
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2, **options))

    def batch(**options):
        fixed = DeepSpeedSequenceParallelConfig(8, False)
        tokens = torch.arange(32).view(2, 16)
        config = {"sp_handler": fixed} if options.pop("fixed", False) else {}
        given = [options.pop("instead")] if "instead" in options else [{"input_ids": tokens, **options}]
        loader = torch.utils.data.DataLoader(given, batch_size=None)
        return next(iter(accelerator(sp_backend="torch", **config).prepare(loader)))

    class Meta(Decoder):  # not even moved to the device
        def _apply(self, *args, **kwargs):
            raise AssertionError("the model was moved before it was refused")

    def prepared(model, **options):
        return accelerator(sp_backend="torch", **options).prepare_model(model)

    unmoved = Meta()
    unmoved.config = type("Config", (), {"num_attention_heads": 3})
    flash = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    marked = torch.ones(2, 16, dtype=torch.long)
    marked[:, 0] = 0
    odd = prepared(Decoder(heads=1))
    whole = torch.arange(8).repeat(2, 1), torch.arange(8)  # the same for all
    learning = prepared(Decoder())
    learning(whole[0] + PartialState().process_index, whole[1])
    wrong = [
        (
            "sp_backend='deepspeed' .the default. is computed by DeepSpeed: pass",
            lambda: accelerator().prepare(Decoder()),
        ),
        ("3 attention heads cannot be shared out to sp_size=2", lambda: prepared(unmoved)),
        ("1 attention heads cannot be shared out", lambda: odd(torch.ones(2, 8).long(), torch.arange(8))),
        ("sp_attn_implementation='flash_attention_2' is not computed", lambda: prepared(Decoder(), sp_handler=flash)),
        ("given the same tokens, so nobody has cut", lambda: prepared(Decoder())(*whole)),
        ("given the same tokens, so nobody has cut", lambda: learning.eval()(*whole)),
        ("did not call torch.nn.functional.scaled_dot", lambda: prepared(nn.Linear(4, 4))(torch.ones(2, 4))),
        ("input_ids of shape .batch, tokens., not a list", lambda: batch(instead=[torch.ones(2, 2)])),
        ("16 tokens, and sp_seq_length=8", lambda: batch(fixed=True)),
        ("hides more than padding on the right", lambda: batch(attention_mask=marked)),
        ("packed sequences would attend to each other", lambda: batch(position_ids=torch.arange(32).view(2, 16))),
    ]
    for message, call in wrong:
        with pytest.raises(ContextError, match=message):
            call()
    four = SequenceCut(0, 4)
    with pytest.raises(ContextError, match=r"6 tokens cannot be cut into sp_size=4 equal pieces.*multiple of 4 \(8\)"):
        four({"input_ids": torch.ones(2, 6)})
    plain = functional.scaled_dot_product_attention
    broken = prepared(Decoder())
    broken.module.tokens.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken(torch.ones(2, 8).long(), torch.arange(8)).sum().backward()
    heads = torch.rand(3, 2, 8, 4, 4).unbind()
    torch.testing.assert_close(functional.scaled_dot_product_attention(*heads), plain(*heads))
    assert functional.scaled_dot_product_attention is plain

    class Both(nn.Module):  # each token attends to those after it, too
        def forward(self, tokens):
            heads = tokens.unflatten(-1, (2, 2)).transpose(1, 2)
            return functional.scaled_dot_product_attention(heads, heads, heads)

    both = prepared(Both())
    both(torch.ones(2, 8, 4))
    kept = batch(attention_mask=marked.flip(1), name="a")
    with pytest.raises(ContextError, match="not causal; sequences in pieces, or with padding"):
        both(torch.ones(2, 8, 4))
    return {name: getattr(value, "shape", value) for name, value in kept.items()}


def test_what_heads_and_sequences_do_not_allow_is_refused_on_every_rank(run_ranks):
    for kept in run_ranks(2, refusals):
        assert kept == {"input_ids": (2, 8), "name": "a", "position_ids": (2, 8)}


def composed(kind):
    """The largest difference of a weight from one process's, for everything that goes around or into a model."""
    from orc.runtime import (
        Accelerator,
        AcceleratorState,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )

    rows = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = [rows, torch.arange(LENGTH).repeat(2, 1), rows.roll(-1, 1)]

    def shards(**options):
        policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **policy, **options)}

    def trained(**options):
        AcceleratorState._reset_state()
        config = ParallelismConfig(sp_size=2, sp_backend="torch") if kind == "sp" else ParallelismConfig(cp_size=2)
        accelerator = Accelerator(cpu=True, parallelism_config=config, **options)
        torch.manual_seed(0)
        model = Decoder()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        here = accelerator.process_index
        for _ in range(2):
            pieces = [(one.chunk(2, 1)[here] if kind == "sp" else one).clone() for one in whole]
            with accelerator.maybe_context_parallel(pieces, [1, 1, 1]):
                logits = model(*pieces[:2]).float()
                accelerator.backward(functional.cross_entropy(logits.flatten(0, 1), pieces[2].flatten()))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return max((float((state[name] - value).abs().max()) for name, value in expected.items() if state), default=0.0)

    torch.manual_seed(0)
    plain = Decoder()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        functional.cross_entropy(plain(*whole[:2]).flatten(0, 1), whole[2].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = plain.state_dict()
    return {
        "compiled": trained(dynamo_backend="eager"),
        "compiled shards": trained(dynamo_backend="eager", **shards()),
        "shards that recompute": trained(**shards(activation_checkpointing=True)),
        "shards in host memory": trained(**shards(cpu_offload=True)),
        "compressed gradients": trained(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="power_sgd")]),
        "bf16": trained(mixed_precision="bf16") / 100,
        "fp16": trained(mixed_precision="fp16") / 100,
    }


@pytest.mark.parametrize("kind", ["cp", "sp"])
def test_pieces_go_together_with_compiling_precision_compression_and_shards(run_ranks, kind):
    for differences in run_ranks(2, composed, kind, timeout=200):
        assert {name: difference for name, difference in differences.items() if not difference < 1e-5} == {}
