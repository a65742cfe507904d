"""Rules of Megatron-LM's parallelism: what each process gets of layers, vocabulary and batches, and what cannot be.

A run, its plug-in and its model are checked before anything is allocated, the same on all ranks. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from orc.runtime.core.errors import ContextError
from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

# Models of Transformers that have a counterpart, by kind.
_KINDS = {
    "gpt2": ("GPT2LMHeadModel",),
    "megatron-bert": (
        "MegatronBertForPreTraining",
        "MegatronBertForMaskedLM",
        "MegatronBertForSequenceClassification",
    ),
    "t5": ("T5ForConditionalGeneration",),
    "mt5": ("MT5ForConditionalGeneration",),
}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu")


def data_parallel_size(processes: int, tp_degree: int, pp_degree: int) -> int:
    """Return how many copies of the model *processes* train. Raises `ValueError` when they are no whole number."""
    size, rest = divmod(processes, tp_degree * pp_degree)
    if rest or not size:
        raise ValueError(
            f"tp_degree {tp_degree} x pp_degree {pp_degree} needs a multiple of {tp_degree * pp_degree} processes, and "
            f"there are {processes}: launch more, or lower the degrees"
        )
    return size


def global_batch_size(micro_batch_size: int, num_micro_batches: int, data_parallel: int) -> int:
    """Return the samples of one optimizer step."""
    return micro_batch_size * num_micro_batches * data_parallel


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the optimizer steps of one pass over *samples*, the last incomplete batch included."""
    return -(-samples // batch_size)


def padded_vocabulary(size: int, tp_degree: int, divisible_by: int = 128) -> int:
    """Return the rows of the embedding for *size* tokens: a multiple of *divisible_by* on each of the processes."""
    multiple = divisible_by * tp_degree
    return -(-size // multiple) * multiple


def layers_per_stage(layers: int, pp_degree: int, layers_per_virtual_stage: int | None = None) -> int:
    """Return the layers of one stage.

    Raises:
        ValueError: the layers cannot be shared out evenly, or not into virtual stages of that many layers.
    """
    share, rest = divmod(layers, pp_degree)
    if rest or not share:
        raise ValueError(f"{layers} layers cannot be shared out evenly over pp_degree {pp_degree} stages")
    if layers_per_virtual_stage is not None and share % layers_per_virtual_stage:
        raise ValueError(
            f"a stage has {share} layers, which is no multiple of num_layers_per_virtual_pipeline_stage "
            f"{layers_per_virtual_stage}"
        )
    return share


def virtual_stages(layers: int, pp_degree: int, layers_per_virtual_stage: int | None) -> int:
    """Return how many separate pieces of the model each process has in an interleaved schedule; 1 without one."""
    share = layers_per_stage(layers, pp_degree, layers_per_virtual_stage)
    return 1 if layers_per_virtual_stage is None else share // layers_per_virtual_stage


def check_run(plugin: MegatronLMPlugin, processes: int, mixed_precision: str) -> None:
    """Check *plugin* against the run, and note how many copies of the model there are.

    Raises:
        ContextError: the processes or the precision do not go with it.
    """
    try:
        plugin.data_parallel_size = data_parallel_size(processes, plugin.tp_degree, plugin.pp_degree)
    except ValueError as error:
        raise ContextError(f"megatron_lm_plugin: {error}") from None
    if mixed_precision == "fp8":
        raise ContextError("mixed_precision='fp8' is not possible with Megatron-LM here: it trains in no, fp16 or bf16")


def check_accumulation(steps: int) -> None:
    """Raise `ContextError` when batches are to be accumulated: micro batches play that role."""
    if steps != 1:
        raise ContextError(
            f"gradient_accumulation_steps={steps}: it must be 1 with Megatron-LM, whose micro batches are what is "
            "accumulated; set MegatronLMPlugin(num_micro_batches=...)"
        )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Numbers of a model that decide how it can be split; no *positions* where they are not learned."""

    layers: int
    heads: int
    inner: int
    positions: int | None


def shape_of(config: Any) -> Shape:
    """Return the numbers of a model of one of the kinds, from its Transformers *config*."""
    if config.model_type == "gpt2":
        return Shape(
            int(config.n_layer), int(config.n_head), int(config.n_inner or 4 * config.n_embd), int(config.n_positions)
        )
    if config.model_type == "megatron-bert":
        return Shape(
            int(config.num_hidden_layers),
            int(config.num_attention_heads),
            int(config.intermediate_size),
            int(config.max_position_embeddings),
        )
    return Shape(int(config.num_layers), int(config.num_heads), int(config.d_ff), None)


def check_model(plugin: MegatronLMPlugin, model: Any) -> None:
    """Check that Megatron-LM's model of the same kind as *model* can be made and split as *plugin* sets.

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
    if name not in _KINDS[kind]:
        raise ValueError(f"{name}: of kind {kind} Megatron-LM trains {', '.join(_KINDS[kind])}")
    if kind == "gpt2":
        _check_gpt2(config)
    else:
        _check_encoder(plugin, kind, config)
    shape, tp = shape_of(config), plugin.tp_degree
    if shape.heads % tp:
        raise ValueError(
            f"the model's {shape.heads} attention heads cannot be shared out over tp_degree {tp} processes"
        )
    if shape.inner % tp:
        raise ValueError(f"the model's inner width {shape.inner} cannot be shared out over tp_degree {tp} processes")
    virtual_stages(shape.layers, plugin.pp_degree, plugin.num_layers_per_virtual_pipeline_stage)
    if plugin.seq_length is not None and shape.positions is not None and plugin.seq_length > shape.positions:
        raise ValueError(f"seq_length={plugin.seq_length}: the model has {shape.positions} positions")


def _check_encoder(plugin: MegatronLMPlugin, kind: str, config: Any) -> None:
    """Raise `ValueError` for what megatron-core's models with an encoder do not have."""
    for name in ("position_embedding_type", "attention_head_type"):
        if name in plugin.others:
            raise ValueError(f"other_megatron_args: {name} is for gpt2; the model is of kind {kind}")
    if plugin.return_logits:
        raise ValueError(f"return_logits: models of kind {kind} return the loss alone; gpt2 returns logits too")
    if plugin.sequence_parallelism:
        raise ValueError(
            f"sequence_parallelism: models of kind {kind} have norms that megatron-core does not share out "
            "(WrappedTorchNorm), or sequences of two lengths; set it to false"
        )
    act = config.hidden_act if kind == "megatron-bert" else config.dense_act_fn
    if act not in (*_ACTIVATIONS, "silu"):
        raise ValueError(f"activation function {act!r} has no counterpart in Megatron-LM's model")
    if kind == "megatron-bert":
        if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
            raise ValueError("a megatron-bert that decodes has no counterpart in Megatron-LM")
    elif plugin.pp_degree > 1:
        raise ValueError(
            f"pp_degree={plugin.pp_degree}: megatron-core computes encoder and decoder of kind {kind} in one stage; "
            "set pp_degree to 1 and use tp_degree"
        )


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
    # A vocabulary and its merges are what Megatron-LM's own server of generated texts needs; here tokens are numbers.
    own = ("make_vocab_size_divisible_by", "position_embedding_type", "attention_head_type", "vocab_file", "merge_file")
    fields = {field.name for field in dataclasses.fields(known)}
    taken = ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size", "sequence_parallel",
             "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "ffn_hidden_size")  # fmt: skip
    others = {}
    for name, value in plugin.others.items():
        if name in own:
            continue
        if name in taken:
            raise ValueError(f"other_megatron_args: {name} follows from the model and the plug-in's own settings")
        if name not in fields:
            from orc.runtime.core.parsing import nearest

            raise ValueError(f"other_megatron_args: nothing takes {name!r}{nearest(name, [*own, *fields])}")
        others[name] = value
    return others
