"""Cost of a step with Megatron-LM over the same model, schedule and optimizer of megatron-core by hand.

    python tests/benchmarks/bench_megatron.py [turns]

Two gloo ranks share the matrices (tp 2) or have a copy each. Both models live in the same ranks and take turns, one
step at a time; each figure is the median over turns of the slower rank's time. Budget: 1.02 x the step by hand, which
allocates on the CPU with the same view of torch as orc's (`runtime/engine/megatron/on_cpu.py`).
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, report

from orc.runtime import Accelerator, MegatronLMPlugin
from orc.runtime.testing import run_ranks

TURNS, BUDGET = 60, 1.02
WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, ROWS = 256, 8, 4, 128, 1024, 4
Step = Callable[[], None]


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def ours(tp: int) -> Step:
    """Step of a script with an Accelerator."""
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=tp))
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    given = GPT2LMHeadModel(GPT2Config(**shape, **rates))
    model, optimizer = accelerator.prepare(given, torch.optim.AdamW(given.parameters(), lr=1e-4))
    data = batch()

    def step() -> None:
        loss = model(**data).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand(tp: int) -> Step:
    """Step of megatron-core alone, in the process groups that are open."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from orc.runtime.engine.megatron.layers import CoreAttention, LayerNorm

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=4 * WIDTH,
        activation_func=partial(F.gelu, approximate="tanh"), hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=tp, use_cpu_initialization=True, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LayerNorm
    block = TransformerBlockSubmodules(layer_specs=[spec] * LAYERS, layer_norm=LayerNorm)
    bare = GPTModel(config, block, VOCABULARY, LENGTH, share_embeddings_and_output_weights=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), bare)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = None
    data = batch()
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)

    def forward_step(iterator: Iterator[Any], piece: Any) -> tuple[Any, Any]:
        part = next(iterator)
        labels = F.pad(part["labels"][:, 1:], (0, 1))
        output = piece(part["input_ids"], places, None, labels=labels)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses[:, :-1].float().mean()
            found = loss.detach().clone()
            torch.distributed.all_reduce(found, group=copies)
            return loss, {"loss": found}

        return output, loss_of

    from megatron.core import parallel_state

    copies = parallel_state.get_data_parallel_group()

    def step() -> None:
        model.zero_grad_buffer()
        found = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([data]), model=model, num_microbatches=1,
            seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )  # fmt: skip
        float(found[0]["loss"])
        optimizer.step()

    return step


def measured(tp: int, turns: int) -> tuple[list[float], list[float]]:
    """Times of both on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = [ours(tp), by_hand(tp)]
    times: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for which in (0, 1) if turn % 2 else (1, 0):
            torch.distributed.barrier()
            began = time.perf_counter()
            steps[which]()
            if turn >= 3:
                times[which].append(time.perf_counter() - began)
    return times[0], times[1]


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    rows = []
    for tp, kind in ((2, "tensor parallelism, tp 2"), (1, "two copies")):
        ranks = run_ranks(2, measured, tp, turns, timeout_s=400)
        mine, theirs = ([max(pair) for pair in zip(*(rank[i] for rank in ranks), strict=True)] for i in (0, 1))
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        slow, fast = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
        rows.append(Row(f"step with Megatron-LM, {kind}", "megatron-core by hand", slow, fast, "ms", ratio, BUDGET))
    report(rows)


if __name__ == "__main__":
    main()
