"""Context parallelism: sequences in pieces over real ranks learn what one process learns of whole ones."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

RANKS_IMPORT = ("transformers.models.llama.modeling_llama",)
VOCABULARY, LENGTH = 32, 16


class Decoder(nn.Module):
    """One layer of causal attention over tokens and their positions, computed again in backward."""

    def __init__(self, heads=4, size=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, size), nn.Embedding(LENGTH, size)
        self.mixed, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, VOCABULARY)
        self.heads = heads

    def forward(self, tokens, positions):
        hidden = self.tokens(tokens) + self.places(positions)
        return torch.utils.checkpoint.checkpoint(self.attend, hidden, use_reentrant=False)

    def attend(self, hidden):
        parts = self.mixed(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = parts.unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(hidden + mixed.transpose(1, 2).flatten(2))


def llama(layers=2, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **options,
    )
    return LlamaForCausalLM(config)


def tokens_of(samples):
    return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def trained(sizes, shard, whose, folder, steps=2):
    """Train over cut sequences, save, load into a second model; what one process learns of whole ones is the same."""
    from orc.runtime import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if shard else None
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    shares = accelerator.ctx.topology.data_size
    rows = tokens_of(4 * steps * shares)
    labels = rows.clone()
    labels[:, :5] = -100  # a prompt: pieces have different numbers of labels

    def one():
        torch.manual_seed(0)
        return llama() if whose == "transformers" else Decoder()

    def buffers_of(tokens, marked):
        if whose == "transformers":
            return [tokens, marked], [1, 1]
        return [tokens, torch.arange(LENGTH), functional.pad(marked, (0, 1), value=-100)[:, 1:]], [1, 0, 1]

    def backward(model, tokens, rest, count):
        if whose == "transformers":
            accelerator.backward(model(input_ids=tokens, labels=rest[0]).loss)
            return
        logits = model(tokens, rest[0]).flatten(0, 1)
        accelerator.backward(functional.cross_entropy(logits, rest[1].flatten(), reduction="sum") / (count / 2))

    model = one()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(list(zip(rows, labels, strict=True)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms, lengths = [], []
    for tokens, marked in loader:
        with accelerator.accumulate(model):
            buffers, dims = buffers_of(tokens, marked)
            with accelerator.maybe_context_parallel(buffers, dims, {buffers[-1]}):
                lengths.append([one.shape[-1] for one in buffers])
                backward(model, *buffers[:1], buffers[1:], (marked[:, 1:] != -100).sum())
            lengths.append([one.shape[-1] for one in buffers])
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    again = accelerator.get_state_dict(model)
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    plain = one()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    expected = []
    for step in range(steps):
        for batch in range(2 * shares):
            at = slice(2 * (2 * step * shares + batch), 2 * (2 * step * shares + batch) + 2)
            if whose == "transformers":
                loss = plain(input_ids=rows[at], labels=labels[at]).loss
            else:
                following = functional.pad(labels[at], (0, 1), value=-100)[:, 1:]
                logits = plain(rows[at], torch.arange(LENGTH))
                loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            (loss / (2 * shares)).backward()
        expected.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    if state:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=2e-4, atol=5e-5)
    return lengths[:2], norms, expected


@pytest.mark.parametrize(
    ("sizes", "shard", "whose"),
    [
        ({"cp_size": 2}, False, "torch"),
        ({"cp_size": 2}, True, "transformers"),
        ({"cp_size": 2, "dp_shard_size": 2}, True, "transformers"),
        ({"cp_size": 2, "tp_size": 2}, False, "transformers"),
        ({"cp_size": 2, "tp_size": 2}, True, "transformers"),
        ({"cp_size": 2, "dp_replicate_size": 2}, False, "transformers"),
    ],
)
def test_sequences_in_pieces_teach_what_whole_ones_teach(run_ranks, tmp_path, sizes, shard, whose):
    ranks = math.prod(sizes.values())
    for lengths, norms, expected in run_ranks(
        ranks, trained, sizes, shard, whose, str(tmp_path / "saved"), timeout=200
    ):
        assert lengths == ([[8, 8], [16, 8]] if whose == "transformers" else [[8, 8, 8], [16, 16, 8]])
        assert norms == pytest.approx(expected, rel=1e-4)


def whole_refusals():
    """What is refused in or around a block, on this rank; each leaves attention and tensors as they were."""
    from orc.runtime import Accelerator, ContextError, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    block, attention = accelerator.maybe_context_parallel, functional.scaled_dot_product_attention
    tokens, heads = tokens_of(2), torch.ones(2, 4, 8, 4)

    class Closed(nn.Linear):
        def forward(self, x):
            return attention(x, x, x, is_causal=True)  # by a name that was taken before

    model = accelerator.prepare(Decoder())
    closed = accelerator.prepare(Closed(4, 4))

    def attend(query=heads, **options):
        with block([tokens], [1]):
            functional.scaled_dot_product_attention(query, query, query, **options)

    def nested():
        with block([tokens], [1]), block([torch.arange(8)], [0]):
            pass

    def late():
        places = torch.arange(LENGTH)
        with block([tokens, places], [1, 0]):
            loss = model(tokens, places).sum()
        accelerator.backward(loss)

    def without_positions():
        with block([tokens], [1]):
            model(tokens, torch.arange(LENGTH))

    def escaped():
        with block([tokens], [1]):
            closed(heads)

    def cut(*arguments):
        with block(*arguments):
            pass

    wrong = [
        (ValueError, "no buffers to cut", cut),
        (ValueError, "1 buffers, but 2 buffer_seq_dims", lambda: cut([tokens], [1, 1])),
        (ValueError, "shape .2, 16., and no dimension 2", lambda: cut([tokens], [2])),
        (ValueError, "tokens, not of one length", lambda: cut([tokens, torch.ones(2, 12)], [1, 1])),
        (ValueError, "6 tokens cannot be cut for cp_size=2.*multiple of 4 .8.", lambda: cut([tokens[:, :6]], [1])),
        (ValueError, "buffer 0 is a parameter", lambda: cut([nn.Parameter(torch.ones(4))], [0])),
        (ValueError, "buffer 1 is given twice", lambda: cut([tokens, tokens], [1, 1])),
        (ValueError, "not among the buffers", lambda: cut([tokens], [1], {torch.ones(1)})),
        (ContextError, "attention with a mask", lambda: attend(attn_mask=torch.ones(8, 8).bool())),
        (ContextError, "not causal", attend),
        (ContextError, "no dropout", lambda: attend(is_causal=True, dropout_p=0.1)),
        (ContextError, "no pieces of 8 tokens", lambda: attend(torch.ones(2, 4, 16, 4), is_causal=True)),
        (ContextError, "open already", nested),
        (ContextError, "did not call torch.nn.functional.scaled_dot_product_attention", escaped),
        (RuntimeError, "size of tensor", without_positions),
        (ContextError, "backward after the block of its forward has ended", late),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
        assert functional.scaled_dot_product_attention is attention
        assert tokens.shape == (2, LENGTH)
    return len(wrong)


def test_what_cannot_be_cut_is_refused_on_every_rank(run_ranks):
    assert run_ranks(2, whole_refusals) == [16] * 2


def refusals_of_transformers():
    from orc.runtime import Accelerator, ContextError, FullyShardedDataParallelPlugin, ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    tokens, places = tokens_of(2), torch.arange(LENGTH).expand(2, LENGTH).clone()
    alone = llama(1)
    with torch.no_grad():
        expected = alone(input_ids=tokens).logits
        hidden = torch.ones(2, LENGTH, dtype=torch.long)
        hidden[0, 10:] = 0
        padded = alone(input_ids=tokens, attention_mask=hidden).logits
    model = accelerator.prepare_model(alone)
    rank = accelerator.process_index
    mine = torch.arange(LENGTH).chunk(4)
    mine = torch.cat([mine[rank], mine[3 - rank]])

    def piece(**inputs):
        given = {"input_ids": tokens, **inputs}
        with accelerator.maybe_context_parallel(list(given.values()), [1] * len(given)), torch.no_grad():
            return model(**given).logits

    torch.testing.assert_close(piece(position_ids=places), expected[:, mine])
    right = piece(attention_mask=hidden)
    kept = hidden[:, mine].bool()
    torch.testing.assert_close(right[kept], padded[:, mine][kept])
    with torch.no_grad():  # outside of a block it is the model that it was
        torch.testing.assert_close(model(input_ids=tokens, attention_mask=hidden).logits, padded)
    with pytest.raises(ContextError, match="hides more than padding on the right"):
        piece(attention_mask=hidden.flip(1))
    with pytest.raises(ContextError, match="packed sequences would attend to each other"):
        piece(position_ids=places % 8)
    with pytest.raises(ContextError, match="attn_implementation='eager', and only 'sdpa'"):
        accelerator.prepare(llama(1, attn_implementation="eager"))
    Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2), fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(ContextError, match="context and fsdp1 cannot be used together"):
        accelerator.prepare(llama(1))


def test_models_of_transformers_get_their_positions_and_refuse_masks(run_ranks):
    run_ranks(2, refusals_of_transformers)
