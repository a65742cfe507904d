"""Checks that a run, its plug-in and its model fit together, before anything is allocated; the same on all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from orc.runtime.core.errors import ContextError
from orc.runtime.engine.megatron.arithmetic import data_parallel_size, virtual_stages
from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

_KINDS = ("gpt2", "megatron-bert", "t5", "mt5")
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu")


def check_run(plugin: MegatronLMPlugin, processes: int, device: str, mixed_precision: str) -> None:
    """Check *plugin* against the run, and note how many copies of the model there are.

    Raises:
        ContextError: the processes, the device or the precision do not go with it.
    """
    try:
        plugin.data_parallel_size = data_parallel_size(processes, plugin.tp_degree, plugin.pp_degree)
    except ValueError as error:
        raise ContextError(f"megatron_lm_plugin: {error}") from None
    if mixed_precision == "fp8" or (device == "cpu" and mixed_precision != "no"):
        where = "on CPUs it" if device == "cpu" else "this engine"
        raise ContextError(
            f"mixed_precision={mixed_precision!r} is not possible with Megatron-LM here: {where} trains in "
            f"{'float32 only' if device == 'cpu' else 'no, fp16 or bf16'}"
        )
    if plugin.use_distributed_optimizer and plugin.data_parallel_size > 1 and device == "cpu":
        raise ContextError(
            f"use_distributed_optimizer shards state over the {plugin.data_parallel_size} data parallel processes, and "
            "Megatron-LM's needs CUDA tensors: on CPUs set it to false"
        )


def check_accumulation(steps: int) -> None:
    """Raise `ContextError` when batches are to be accumulated: micro batches play that role."""
    if steps != 1:
        raise ContextError(
            f"gradient_accumulation_steps={steps}: it must be 1 with Megatron-LM, whose micro batches are what is "
            "accumulated; set MegatronLMPlugin(num_micro_batches=...)"
        )


def check_model(plugin: MegatronLMPlugin, model: Any) -> None:
    """Check that Megatron-LM's model of the same kind as *model* can be made and split as *plugin* says.

    Raises:
        ValueError: it cannot; the text names the numbers.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    name = type(model).__name__
    if kind not in _KINDS:
        raise ValueError(
            f"Megatron-LM trains its own models, made from Transformers models of the kinds gpt2, megatron-bert and "
            f"t5; {name} is {'of kind ' + repr(kind) if kind else 'none of Transformers'}"
        )
    if kind != "gpt2":
        raise ValueError(
            f"{name}: models of kind {kind!r} are not made into Megatron-LM models by this version, which has gpt2 "
            "alone; train it with FSDP, DeepSpeed or a ParallelismConfig"
        )
    if name != "GPT2LMHeadModel":
        raise ValueError(f"{name}: of kind gpt2 Megatron-LM trains the language model, GPT2LMHeadModel")
    _check_gpt2(config)
    heads, tp = int(config.n_head), plugin.tp_degree
    if heads % tp:
        raise ValueError(f"the model's {heads} attention heads cannot be shared out over tp_degree {tp} processes")
    width = int(config.n_inner or 4 * config.n_embd)
    if width % tp:
        raise ValueError(f"the model's inner width {width} cannot be shared out over tp_degree {tp} processes")
    virtual_stages(int(config.n_layer), plugin.pp_degree, plugin.num_layers_per_virtual_pipeline_stage)
    if plugin.seq_length is not None and plugin.seq_length > config.n_positions:
        raise ValueError(f"seq_length={plugin.seq_length}: the model has {config.n_positions} positions")


def _check_gpt2(config: Any) -> None:
    """Raise `ValueError` for what a GPT-2 of Transformers can be and Megatron-LM's cannot."""
    if config.activation_function not in _ACTIVATIONS:
        raise ValueError(
            f"activation_function={config.activation_function!r} has no counterpart; Megatron-LM's model has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    odd = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
           "add_cross_attention": False}  # fmt: skip
    for name, served in odd.items():
        if getattr(config, name, served) != served:
            raise ValueError(f"{name}={getattr(config, name)} of the model has no counterpart in Megatron-LM's")
    if config.embd_pdrop != config.resid_pdrop:
        raise ValueError(
            f"embd_pdrop={config.embd_pdrop} and resid_pdrop={config.resid_pdrop}: Megatron-LM's model has one dropout "
            "for both; set them to the same value"
        )


def check_others(plugin: MegatronLMPlugin, known: type) -> dict[str, Any]:
    """Return those of ``other_megatron_args`` that are fields of *known*, ``TransformerConfig``.

    Raises:
        ValueError: a name that nothing here takes, or one that another setting or the model decides.
    """
    own = ("make_vocab_size_divisible_by", "position_embedding_type", "attention_head_type")
    fields = {one.name for one in dataclasses.fields(known)}
    taken = ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size", "sequence_parallel",
             "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "ffn_hidden_size")  # fmt: skip
    found = {}
    for name, value in plugin.others.items():
        if name in own:
            continue
        if name in ("vocab_file", "merge_file"):
            raise ValueError(
                f"other_megatron_args: {name} is for megatron_generate, which is not supported: save the weights with "
                "save_model and generate with Transformers"
            )
        if name in taken:
            raise ValueError(f"other_megatron_args: {name} follows from the model and the plug-in's own settings")
        if name not in fields:
            from orc.runtime.core.parsing import nearest

            raise ValueError(f"other_megatron_args: nothing takes {name!r}{nearest(name, [*own, *fields])}")
        found[name] = value
    return found
