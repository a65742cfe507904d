"""Megatron-LM's GPT model from a Transformers GPT-2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from orc.runtime.engine.megatron.layers import CoreAttention, LayerNorm
from orc.runtime.engine.megatron.layout import Layout, PaddedVocabulary, Weight, activation_of, joined, split_groups
from orc.runtime.engine.megatron.steps import GPTTrainStep

# Of a layer: the name of Transformers, that of Megatron-LM, and how its values lie.
_OF_LAYER = (
    ("ln_1.weight", "input_layernorm.weight", "same", 1),
    ("ln_1.bias", "input_layernorm.bias", "same", 1),
    ("attn.c_attn.weight", "self_attention.linear_qkv.weight", "heads", 1),
    ("attn.c_attn.bias", "self_attention.linear_qkv.bias", "heads", 1),
    ("attn.c_proj.weight", "self_attention.linear_proj.weight", "transposed", 1),
    ("attn.c_proj.bias", "self_attention.linear_proj.bias", "same", 1),
    ("ln_2.weight", "pre_mlp_layernorm.weight", "same", 1),
    ("ln_2.bias", "pre_mlp_layernorm.bias", "same", 1),
    ("mlp.c_fc.weight", "mlp.linear_fc1.weight", "transposed", 1),
    ("mlp.c_fc.bias", "mlp.linear_fc1.bias", "same", 1),
    ("mlp.c_proj.weight", "mlp.linear_fc2.weight", "transposed", 1),
    ("mlp.c_proj.bias", "mlp.linear_fc2.bias", "same", 1),
)
_POSITIONS = "transformer.wpe.weight"


class Gpt2(Layout):
    """Layout of a GPT-2; ``other_megatron_args`` give it other positions, or one head of keys and values."""

    embedding, head = "transformer.wte.weight", "lm_head.weight"

    @property
    def positions(self) -> str:
        """Kind of positions: ``absolute``, ``rotary`` or ``alibi``."""
        return str(self.plugin.others.get("position_embedding_type", "absolute")).removeprefix("learned_")

    @property
    def groups(self) -> int:
        """Heads of keys and values: as many as of queries, or one."""
        return 1 if self.plugin.others.get("attention_head_type") == "multiquery" else int(self.hf.n_head)

    def adopted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return *state* without learned positions where there are others, and with one head of keys and values.

        That head is the mean of the model's; transposed, the weights are those of Transformers' GPT-BigCode.
        """
        weights = {name: one for name, one in state.items() if self.positions == "absolute" or name != _POSITIONS}
        width, heads = self.hf.n_embd, self.hf.n_head
        if self.groups != heads:
            for name in [one for one in weights if ".c_attn." in one]:
                query, key, value = weights[name].split(width, -1)
                means = [tensor.unflatten(-1, (heads, -1)).mean(-2) for tensor in (key, value)]
                weights[name] = torch.cat([query, *means], -1)
        return weights

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that follow from the model."""
        hf = self.hf
        return {
            "num_layers": hf.n_layer,
            "hidden_size": hf.n_embd,
            "num_attention_heads": hf.n_head,
            "num_query_groups": self.groups,
            "ffn_hidden_size": self.shape.inner,
            "activation_func": activation_of(hf.activation_function),
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "hidden_dropout": hf.resid_pdrop,
            "attention_dropout": hf.attn_pdrop,
        }

    def piece(self, virtual: int | None) -> nn.Module:
        """Return the piece of this process's stage, or of its *virtual* stage in an interleaved schedule."""
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        self.config.orc_alibi = self.positions == "alibi"
        if self.device.type == "cpu" or self.positions == "alibi":
            spec.submodules.self_attention.submodules.core_attention = CoreAttention
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LayerNorm
        count = get_num_layers_to_build(self.config, vp_stage=virtual)
        piece: nn.Module = Gpt(
            self.config,
            TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=LayerNorm),
            self.rows,
            self.hf.n_positions,
            share_embeddings_and_output_weights=self.tied,
            parallel_output=True,
            position_embedding_type={"absolute": "learned_absolute", "rotary": "rope", "alibi": "none"}[self.positions],
            **self.ends(virtual),
        )
        return piece

    def weights(self) -> Iterator[Weight]:
        """Yield every weight of the whole model, in the same order on every process."""
        yield Weight((self.embedding,), "embedding.word_embeddings.weight", "vocabulary")
        if self.positions == "absolute":
            yield Weight((_POSITIONS,), "embedding.position_embeddings.weight")
        yield from self.of_layers("transformer.h.{}.", "decoder", _OF_LAYER)
        for kind in ("weight", "bias"):
            yield Weight((f"transformer.ln_f.{kind}",), f"decoder.final_layernorm.{kind}", **self.at_end())
        if not self.tied:
            yield Weight((self.head,), "output_layer.weight", "vocabulary", **self.at_end())

    def to_ours(self, values: Sequence[Tensor], weight: Weight) -> Tensor:
        """Return whole *values* of Transformers, whose GPT-2 stores [in, out], as Megatron-LM lays *weight* out."""
        if weight.form == "transposed":
            return values[0].t()
        if weight.form == "heads":  # [in, queries, keys, values] there, [groups x (queries, key, value), in] here
            rows = values[0].t() if values[0].ndim == 2 else values[0]
            return joined(rows.split(self._sizes()), self.groups)
        return super().to_ours(values, weight)

    def to_theirs(self, value: Tensor, weight: Weight) -> Sequence[Tensor]:
        """Return a whole *value* of Megatron-LM as Transformers lays *weight* out."""
        if weight.form == "transposed":
            return [value.t()]
        if weight.form == "heads":
            rows = torch.cat(split_groups(value, self.groups, self._sizes()))
            return [rows.t() if rows.ndim == 2 else rows]
        return super().to_theirs(value, weight)

    def _sizes(self) -> list[int]:
        width = int(self.hf.n_embd)
        shared = width // int(self.hf.n_head) * self.groups
        return [width, shared, shared]

    def checked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of *batch* that the train step reads: causal attention needs no mask.

        Raises:
            ValueError: samples are padded on the left, or too long.
        """
        tensors = super().checked(batch)
        mask = tensors.pop("attention_mask", None)
        if mask is not None and mask.ndim == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ValueError(
                "the batch is padded on the left, which Megatron-LM's GPT has no mask for: pad on the right"
            )
        return tensors

    def train_step(self) -> Any:
        """Return the class of the train step, where the plug-in names no other."""
        return GPTTrainStep


class Gpt(PaddedVocabulary, GPTModel):  # type: ignore[misc]
    """Megatron-LM's GPT."""
