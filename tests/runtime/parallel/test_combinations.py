"""Every cell of the table "What works together" in docs/reference/compatibility.md, on real ranks.

One small decoder is trained for three steps in every pair of ways. Where the table says that a pair works, it learns
what one process learns; where it says that a pair is refused, every rank raises before the first step and says why.
"""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

RANKS_IMPORT = (
    "deepspeed",
    "torchao.float8",
    "torch._functorch.partitioners",
    "torch._dynamo.backends.debugging",
    "torch._inductor.lowering",
    "networkx",
)
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
WORDS, LENGTH, WIDTH, HEADS, ROWS, STEPS = 32, 8, 32, 4, 8, 3
TORCHAO_ALONE = ("bf16", "accumulation", "activation checkpointing")
WAYS = ("DDP", "FSDP1", "FSDP2", "DeepSpeed", "tp", "cp", "sp", "pp")
# Losses differ by as much as numbers of so many bits do.
TOLERANCE = {"bf16": 0.02, "fp16": 0.002, "fp8": 0.05, "gradient compression": 0.001}
TENSOR_PLAN = {
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("mixed", "down")},
}


class Block(nn.Module):
    """Causal attention and two linear layers; with *recompute* activations are made again in backward."""

    def __init__(self, recompute):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for name in ("query", "key", "value", "mixed"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, hidden):
        if self.recompute and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.compute, hidden, use_reentrant=False)
        return self.compute(hidden)

    def compute(self, hidden):
        normed = self.before(hidden)
        parts = [
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.mixed(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.between(hidden))))


class Decoder(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, positions):
        hidden = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step):
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous(), tokens.roll(-1, 1)


def learned_alone(window, model):
    """Losses of one process that has all samples, and what it has learned then."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS * window):
        tokens, positions, target = batch(step)
        loss = loss_of(model(tokens, positions), target)
        (loss / window).backward()
        losses.append(loss.item())
        if (step + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def sizes_for(chosen):
    """Ranks along each dimension; a way that is tried with settings alone has all of them."""
    dims = {"DDP": "dp_replicate", "FSDP1": "dp_shard", "FSDP2": "dp_shard", "DeepSpeed": "dp_replicate"}
    return {dims.get(name, name): 2 for name in chosen if name in WAYS}


def accelerator_for(chosen):
    """The Accelerator that a script makes which asks for everything in *chosen*."""
    from orc.runtime import (
        Accelerator,
        AcceleratorState,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PipelineParallelConfig,
        TorchDynamoPlugin,
        TorchTensorParallelConfig,
    )

    AcceleratorState._reset_state()
    options, sharding = {}, {}
    if "activation checkpointing" in chosen and {"FSDP1", "FSDP2"} & chosen:
        sharding["activation_checkpointing"] = True
    if "CPU offload" in chosen and {"FSDP1", "FSDP2"} & chosen:
        sharding["cpu_offload"] = True
    for version in (1, 2):
        if f"FSDP{version}" in chosen:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=version,
                auto_wrap_policy="no_wrap" if "pp" in chosen else "transformer_based_wrap",
                transformer_cls_names_to_wrap="Block",
                **({"use_orig_params": True} if version == 1 else {}),
                **sharding,
            )
            options["fsdp_plugin"] = plugin
    if "DeepSpeed" in chosen:
        offload = {"offload_optimizer_device": "cpu"} if "CPU offload" in chosen else {}
        stage = 3 if "ZeRO 3" in chosen else 2
        options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0, **offload)
    precision = [name for name in chosen if name in ("bf16", "fp16", "fp8")]
    handlers = []
    if "gradient compression" in chosen:
        handlers.append(DistributedDataParallelKwargs(comm_hook="bf16"))
    if "torch.compile" in chosen:
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager")
    sizes = {f"{name}_size": size for name, size in sizes_for(chosen).items()}
    if len(chosen & set(WAYS)) > 1 or chosen & {"tp", "cp", "sp", "pp"}:
        if "pp" in chosen:
            tokens, positions, _ = batch(0)
            sizes["pp_handler"] = PipelineParallelConfig(
                loss_fn=loss_of, example_args=(tokens, positions), num_microbatches=2
            )
        if "sp" in chosen:
            sizes["sp_backend"] = "deepspeed" if "DeepSpeed" in chosen else "torch"
        if "tp" in chosen:
            inside = "base_model.model." if "adapters" in chosen else ""
            plan = {f"{inside}{name}": way for name, way in TENSOR_PLAN.items()}
            sizes["tp_handler"] = TorchTensorParallelConfig(plan=plan)
        options["parallelism_config"] = ParallelismConfig(**sizes)
    return Accelerator(
        cpu=True,
        mixed_precision=precision[0] if precision else None,
        gradient_accumulation_steps=2 if "accumulation" in chosen else 1,
        kwargs_handlers=handlers,
        **options,
    )


def learned(chosen, make):
    """Losses of a training of what *make* makes with everything in *chosen*, averaged over the ranks."""
    accelerator = accelerator_for(chosen)
    model = make(recompute="activation checkpointing" in chosen and not {"FSDP1", "FSDP2"} & chosen)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    topology = accelerator.ctx.topology
    if "DeepSpeed" in chosen:  # it wants to know the size of a batch
        loader = torch.utils.data.DataLoader(torch.zeros(ROWS, 1), batch_size=ROWS // topology.data_size)
        model, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    rows = ROWS // topology.data_size
    losses = []
    for step in range(STEPS * accelerator.gradient_accumulation_steps):
        mine = [whole[topology.data_rank * rows :][:rows] for whole in batch(step)]
        if "sp" in chosen:  # as a prepared loader would do with batches that are mappings
            mine = [whole.chunk(2, dim=1)[topology.place("sp")] for whole in mine]
        with accelerator.accumulate(model), accelerator.maybe_context_parallel(mine, [1, 1, 1], set(mine)):
            tokens, positions, target = mine
            if "pp" in chosen:
                loss = model(tokens, positions, target=target)
            else:
                loss = loss_of(model(tokens, positions), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


@contextlib.contextmanager
def without_fp16(chosen):
    """A block in which DeepSpeed is on a CPU without fp16, as most are."""
    with pytest.MonkeyPatch.context() as patch:
        if "DeepSpeed" in chosen:
            from deepspeed.accelerator import get_accelerator

            patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
        yield


def try_all(pairs, make=Decoder):
    """Largest difference from one process for each pair of *pairs*, or the error."""
    found = {}
    for pair in pairs:
        chosen = set(pair)
        try:
            with without_fp16(chosen):
                losses = learned(chosen, make)
        except Exception as error:
            found[pair] = f"{type(error).__name__}: {error}"
        else:
            expected = learned_alone(2 if "accumulation" in chosen else 1, make())
            found[pair] = max(abs(mine - theirs) for mine, theirs in zip(losses, expected, strict=True))
    return found


def said(title="## What works together"):
    """The table of the page as way -> {what it is combined with -> cell}, and the notes by their numbers."""
    section = re.split("^##", PAGE.read_text().split(title, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    head, _, *rows = lines
    notes = {number: text.split("`")[1] for number, text in re.findall(r"^(\d+)\. (.*)", section, re.MULTILINE)}
    table = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    table.pop("Megatron-LM", None)  # tried beside its own tests: it trains models of its own
    return table, notes


@pytest.mark.parametrize("way", WAYS)
def test_what_the_table_says_is_so(run_ranks, way):
    table, notes = said()
    assert set(table) == set(WAYS)
    cells = {(way, other): cell for other, cell in table[way].items() if cell != "–"}
    for other in WAYS:  # said once for each pair
        if other in table[way] and way in table[other] and WAYS.index(other) < WAYS.index(way):
            assert cells.pop((way, other), "–") == table[other][way]
    for size, pairs in ((2, [pair for pair in cells if pair[1] not in WAYS]), (4, [p for p in cells if p[1] in WAYS])):
        for found in run_ranks(size, try_all, pairs, timeout=170):
            for pair, outcome in found.items():
                check(cells[pair], pair, outcome, notes)


def check(cell, pair, outcome, notes):
    """Compare what *pair* did, a difference of losses or an error, with what the table says."""
    if cell == "yes":
        assert isinstance(outcome, float), f"{pair}: {outcome}"
        assert outcome <= TOLERANCE.get(pair[1], 1e-5), f"{pair} learns something else: {outcome}"
    else:
        (number,) = re.fullmatch(r"no \[(\d+)\]", cell).groups()
        assert notes[number] in str(outcome), f"{pair}: {outcome}"


def adapted(kind, recompute=False):
    """The decoder with quantized weights and adapters that learn."""
    import logging

    from peft import LoraConfig, get_peft_model

    from orc.runtime import BnbQuantizationConfig, TorchAoQuantizationConfig, load_and_quantize_model

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    config = {
        "bitsandbytes, 8 bits": lambda: BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32"),
        "bitsandbytes, 4 bits": lambda: BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32"),
        "torchao, int8": lambda: TorchAoQuantizationConfig(weights="int8", torch_dtype="fp32"),
        "torchao, int4": lambda: TorchAoQuantizationConfig(weights="int4", group_size=32),
    }[kind]()
    model = load_and_quantize_model(Decoder(recompute), config)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["query", "up"], init_lora_weights=False)).train()


def try_adapters(cells):
    """Like `try_all` for cells of the table of quantized weights."""
    found = {}
    for kind, other in cells:
        ways = {"one process": (), "ZeRO 3": ("DeepSpeed", "ZeRO 3"), "CPU offload": ("FSDP2", "CPU offload")}
        pair = ("adapters", *ways.get(other, (other,)))
        found[kind, other] = try_all([pair], functools.partial(adapted, kind))[pair]
    return found


def test_adapters_learn_on_quantized_weights_where_the_table_says_so(run_ranks):
    table, notes = said("### Quantized weights")
    cells = {(kind, other): cell for kind, row in table.items() for other, cell in row.items() if cell != "–"}
    alone = {(kind, other) for kind, other in cells if kind == "torchao, int8" and other in TORCHAO_ALONE}
    alone |= {pair for pair in cells if pair[1] == "one process"}
    for size, pairs in ((1, sorted(alone)), (2, [pair for pair in cells if pair not in alone])):
        for found in run_ranks(size, try_adapters, pairs, timeout=170):
            for pair, outcome in found.items():
                check(cells[pair], pair, outcome, notes)
