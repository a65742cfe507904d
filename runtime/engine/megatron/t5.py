"""Megatron-LM's T5 model from a Transformers T5 or MT5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from orc.runtime.engine.megatron.layers import CoreAttention, RMSNorm, with_layers
from orc.runtime.engine.megatron.layout import Layout, PaddedVocabulary, Weight, activation_of
from orc.runtime.engine.megatron.steps import T5TrainStep

_RELATIVE = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"


class T5(Layout):
    """Layout of a T5: one stage, with the encoder and the decoder; their positions are relative, as in Transformers."""

    embedding, head = "shared.weight", "lm_head.weight"

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that follow from the model, for the decoder."""
        hf = self.hf
        return {
            "num_layers": hf.num_decoder_layers,
            "hidden_size": hf.d_model,
            "num_attention_heads": hf.num_heads,
            "kv_channels": hf.d_kv,
            "ffn_hidden_size": hf.d_ff,
            "gated_linear_unit": hf.is_gated_act,
            "activation_func": activation_of(hf.dense_act_fn),
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "softmax_scale": 1.0,  # T5 does not divide by the root of a head's size
            "hidden_dropout": hf.dropout_rate,
            "attention_dropout": hf.dropout_rate,
        }

    def piece(self, virtual: int | None) -> nn.Module:
        """Return this process's part of the model, which has one stage."""
        hf = self.hf
        encoder = with_layers(encoder_model_with_local_spec(), CoreAttention, RMSNorm)
        decoder = with_layers(decoder_model_with_local_spec(), CoreAttention, RMSNorm)
        made = EncoderDecoder(
            self.config,
            self.configured(self.settings() | {"num_layers": hf.num_layers}),
            TransformerBlockSubmodules([encoder] * hf.num_layers, layer_norm=RMSNorm),
            TransformerBlockSubmodules([decoder] * hf.num_decoder_layers, layer_norm=RMSNorm),
            self.rows,
            max_sequence_length=0,  # it has no learned positions
            share_embeddings_and_output_weights=self.tied,
            parallel_output=True,
            position_embedding_type="relative",
            relative_attention_num_buckets=hf.relative_attention_num_buckets,
            relative_attention_max_distance=hf.relative_attention_max_distance,
        )
        made.output_layer.register_parameter("bias", None)  # that of Transformers has none
        # Its output is scaled down where the embedding is the output layer; MT5's never is.
        scaled = getattr(hf, "scale_decoder_outputs", hf.model_type == "t5" and self.tied)
        made.lm_head.register_forward_pre_hook(_Scaling(hf.d_model**-0.5 if scaled else 1.0), with_kwargs=False)
        return made

    def weights(self) -> Iterator[Weight]:
        """Yield every weight of the whole model, in the same order on every process."""
        hf = self.hf
        yield Weight((self.embedding,), "embedding.word_embeddings.weight", "vocabulary")
        for block, count in (("encoder", hf.num_layers), ("decoder", hf.num_decoder_layers)):
            yield Weight((f"{block}.{_RELATIVE}",), f"{block}_relative_pos_emb.relative_attention_bias.weight")
            for layer in range(count):
                theirs, ours = f"{block}.block.{layer}.layer", f"{block}.layers.{layer}"
                yield from self._attention(f"{theirs}.0.SelfAttention", f"{ours}.self_attention", ("qkv", "qkv"))
                yield Weight((f"{theirs}.0.layer_norm.weight",), f"{ours}.input_layernorm.weight")
                last = 1
                if block == "decoder":
                    last = 2
                    inside = f"{theirs}.1.EncDecAttention", f"{ours}.cross_attention"
                    yield from self._attention(*inside, ("q", "q"), ("kv", "kv"))
                    yield Weight((f"{theirs}.1.layer_norm.weight",), f"{ours}.pre_cross_attn_layernorm.weight")
                yield from self._dense(f"{theirs}.{last}.DenseReluDense", f"{ours}.mlp")
                yield Weight((f"{theirs}.{last}.layer_norm.weight",), f"{ours}.pre_mlp_layernorm.weight")
            yield Weight((f"{block}.final_layer_norm.weight",), f"{block}.final_layernorm.weight")
        if not self.tied:
            yield Weight((self.head,), "output_layer.weight", "vocabulary")

    def _attention(self, theirs: str, ours: str, *parts: tuple[str, str]) -> Iterator[Weight]:
        heads = int(self.hf.num_heads)
        for letters, name in parts:
            names = tuple(f"{theirs}.{letter}.weight" for letter in letters)
            yield Weight(names, f"{ours}.linear_{name}.weight", "joined", groups=heads)
        yield Weight((f"{theirs}.o.weight",), f"{ours}.linear_proj.weight")

    def _dense(self, theirs: str, ours: str) -> Iterator[Weight]:
        gated = self.hf.is_gated_act  # each tensor parallel process has a share of the gate, then one of the values
        names = tuple(f"{theirs}.{name}.weight" for name in (("wi_0", "wi_1") if gated else ("wi",)))
        yield Weight(names, f"{ours}.linear_fc1.weight", "joined", groups=self.plugin.tp_degree if gated else 1)
        yield Weight((f"{theirs}.wo.weight",), f"{ours}.linear_fc2.weight")

    def checked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of *batch* that the train step reads.

        Raises:
            ValueError: there are no labels, or sequences longer than the plug-in allows.
        """
        if "labels" not in batch:
            raise ValueError(f"Megatron-LM's T5 needs labels; the batch has {', '.join(batch)}")
        plugin = self.plugin
        for name, longest in (("input_ids", plugin.encoder_seq_length), ("labels", plugin.decoder_seq_length)):
            if longest is not None and batch[name].shape[1] > longest:
                raise ValueError(
                    f"the batch has {batch[name].shape[1]} {name} per sample, the plug-in allows {longest}"
                )
        return super().checked(batch)

    def train_step(self) -> Any:
        """Return the class of the train step, where the plug-in names no other."""
        return T5TrainStep


class EncoderDecoder(PaddedVocabulary, T5Model):  # type: ignore[misc]
    """Megatron-LM's T5."""


class _Scaling:
    """Hook that multiplies the input of a layer by *factor*."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * self.factor, *inputs[1:])
