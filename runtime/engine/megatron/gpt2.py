"""Megatron-LM's GPT model from a Transformers GPT-2: its configuration, its pieces and what its weights are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from orc.runtime.engine.megatron.arithmetic import layers_per_stage, padded_vocabulary, virtual_stages
from orc.runtime.engine.megatron.layers import CoreAttention, LayerNorm
from orc.runtime.engine.megatron.plugin import MegatronLMPlugin
from orc.runtime.engine.megatron.rules import check_others

# Of a layer: the name of Transformers, that of Megatron-LM, and how its values lie.
_OF_LAYER = (
    ("ln_1.weight", "input_layernorm.weight", "same"),
    ("ln_1.bias", "input_layernorm.bias", "same"),
    ("attn.c_attn.weight", "self_attention.linear_qkv.weight", "heads"),
    ("attn.c_attn.bias", "self_attention.linear_qkv.bias", "heads"),
    ("attn.c_proj.weight", "self_attention.linear_proj.weight", "transposed"),
    ("attn.c_proj.bias", "self_attention.linear_proj.bias", "same"),
    ("ln_2.weight", "pre_mlp_layernorm.weight", "same"),
    ("ln_2.bias", "pre_mlp_layernorm.bias", "same"),
    ("mlp.c_fc.weight", "mlp.linear_fc1.weight", "transposed"),
    ("mlp.c_fc.bias", "mlp.linear_fc1.bias", "same"),
    ("mlp.c_proj.weight", "mlp.linear_fc2.weight", "transposed"),
    ("mlp.c_proj.bias", "mlp.linear_fc2.bias", "same"),
)
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"


@dataclass(frozen=True)
class Weight:
    """Weight of the whole model: its name in Transformers and, on its stage, in one of the pieces there."""

    theirs: str
    ours: str
    form: str  # same, transposed, heads, vocabulary
    stage: int
    piece: int


class Gpt2:
    """Layout of one GPT-2 over the ranks.

    Args:
        model: of Transformers, checked by `rules.check_model`.
        plugin: says how to split it.
        device: where this process computes.
        dtype: of the weights in training.
    """

    def __init__(self, model: Any, plugin: MegatronLMPlugin, device: torch.device, dtype: torch.dtype) -> None:
        config = model.config
        self.plugin, self.hf, self.device = plugin, config, device
        self.pieces = virtual_stages(config.n_layer, plugin.pp_degree, plugin.num_layers_per_virtual_pipeline_stage)
        self.tied = bool(config.tie_word_embeddings)
        self.shapes = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        divisor = int(plugin.others.get("make_vocab_size_divisible_by", 128))
        self.rows = plugin.padded_vocab_size = padded_vocabulary(config.vocab_size, plugin.tp_degree, divisor)
        self.config = self._config(dtype)

    def _config(self, dtype: torch.dtype) -> TransformerConfig:
        hf, plugin, on_cpu = self.hf, self.plugin, self.device.type == "cpu"
        act = hf.activation_function
        activation = F.relu if act == "relu" else F.gelu if act == "gelu" else partial(F.gelu, approximate="tanh")
        settings: dict[str, Any] = {
            "num_layers": hf.n_layer,
            "hidden_size": hf.n_embd,
            "num_attention_heads": hf.n_head,
            "ffn_hidden_size": hf.n_inner or 4 * hf.n_embd,
            "activation_func": activation,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "hidden_dropout": hf.resid_pdrop,
            "attention_dropout": hf.attn_pdrop,
            "tensor_model_parallel_size": plugin.tp_degree,
            "pipeline_model_parallel_size": plugin.pp_degree,
            "virtual_pipeline_model_parallel_size": self.pieces if self.pieces > 1 else None,
            "sequence_parallel": plugin.sequence_parallelism,
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "use_cpu_initialization": on_cpu,
            # Fused kernels are apex's, Transformer Engine's, or compiled for the GPU.
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "batch_p2p_comm": not on_cpu,
            "batch_p2p_sync": not on_cpu,
            # There is no separate last stage to free the output of, and gloo may still be sending it.
            "deallocate_pipeline_outputs": not on_cpu,
        }
        if plugin.recompute_activations and not on_cpu:
            settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        config = TransformerConfig(**(settings | check_others(plugin, TransformerConfig)))
        config.orc_recompute_attention = plugin.recompute_activations and on_cpu
        return config

    def build(self) -> list[nn.Module]:
        """Return this process's pieces of the model, one where the schedule is not interleaved."""
        virtual = [piece if self.pieces > 1 else None for piece in range(self.pieces)]
        return [self._piece(stage) for stage in virtual]

    def _piece(self, virtual: int | None) -> nn.Module:
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        if self.device.type == "cpu":
            spec.submodules.self_attention.submodules.core_attention = CoreAttention
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LayerNorm
        count = get_num_layers_to_build(self.config, vp_stage=virtual)
        ends = {"ignore_virtual": False, "vp_stage": virtual}
        piece = PaddedGpt(
            self.config,
            TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=LayerNorm),
            self.rows,
            self.hf.n_positions,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=self.tied,
            parallel_output=True,
            vp_stage=virtual,
        )
        piece.vocabulary = self.hf.vocab_size
        placed: nn.Module = piece.to(self.device)
        return placed

    def weights(self) -> Iterator[Weight]:
        """Yield every weight of the whole model, in the same order on every process."""
        stages = self.plugin.pp_degree
        per_piece = layers_per_stage(self.hf.n_layer, stages) // self.pieces
        last = self.pieces - 1
        yield Weight(EMBEDDING, "embedding.word_embeddings.weight", "vocabulary", 0, 0)
        yield Weight("transformer.wpe.weight", "embedding.position_embeddings.weight", "same", 0, 0)
        for layer in range(self.hf.n_layer):
            turn, inside = divmod(layer, per_piece)
            piece, stage = divmod(turn, stages)
            for theirs, ours, form in _OF_LAYER:
                yield Weight(f"transformer.h.{layer}.{theirs}", f"decoder.layers.{inside}.{ours}", form, stage, piece)
        yield Weight("transformer.ln_f.weight", "decoder.final_layernorm.weight", "same", stages - 1, last)
        yield Weight("transformer.ln_f.bias", "decoder.final_layernorm.bias", "same", stages - 1, last)
        if not self.tied:
            yield Weight(HEAD, "output_layer.weight", "vocabulary", stages - 1, last)

    def copies(self) -> Iterator[Weight]:
        """Yield what the last stage has a copy of: the embedding, where it is the output layer too."""
        if self.tied and self.plugin.pp_degree > 1:
            yield Weight(EMBEDDING, "output_layer.weight", "vocabulary", self.plugin.pp_degree - 1, self.pieces - 1)

    def to_ours(self, value: Tensor, form: str) -> Tensor:
        """Return a whole weight of Transformers as Megatron-LM lays it out."""
        if form == "transposed":  # Transformers' GPT-2 stores [in, out]
            return value.t()
        if form == "heads":  # [in, (q k v) x heads x size] there, [heads x (q k v) x size, in] here
            rows = value.t() if value.ndim == 2 else value
            by_head: Tensor = rows.unflatten(0, (3, self.hf.n_head, -1)).transpose(0, 1)
            return by_head.flatten(0, 2)
        if form == "vocabulary":
            return F.pad(value, (0, 0, 0, self.rows - value.shape[0]))
        return value

    def to_theirs(self, value: Tensor, form: str) -> Tensor:
        """Return a whole weight of Megatron-LM as Transformers lays it out."""
        if form == "transposed":
            return value.t()
        if form == "heads":
            by_kind: Tensor = value.unflatten(0, (self.hf.n_head, 3, -1)).transpose(0, 1)
            rows = by_kind.flatten(0, 2)
            return rows.t() if rows.ndim == 2 else rows
        return value[: self.hf.vocab_size] if form == "vocabulary" else value


class PaddedGpt(GPTModel):  # type: ignore[misc]
    """Megatron-LM's GPT whose padding of the vocabulary gets no probability, so that its loss is that of the model."""

    vocabulary = 0

    def _is_in_embd_group(self) -> bool:
        # The two copies of a tied embedding get the same weights from the Transformers model; Megatron-LM would
        # bring them together on a CUDA device.
        return False

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss [batch, sequence] of *logits* [sequence, batch, share of the vocabulary]."""
        width = logits.shape[-1]
        real = self.vocabulary - width * parallel_state.get_tensor_model_parallel_rank()
        if real < width:
            logits = logits.clone()
            logits[..., max(real, 0) :] = torch.finfo(logits.dtype).min
        loss: Tensor = super().compute_language_model_loss(labels, logits)
        return loss
