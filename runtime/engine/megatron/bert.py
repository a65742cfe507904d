"""Megatron-LM's BERT model from a Transformers Megatron-BERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.utils import get_linear_layer
from torch import Tensor, nn

from orc.runtime.engine.megatron.layers import CoreAttention, LayerNorm, with_layers
from orc.runtime.engine.megatron.layout import Layout, PaddedVocabulary, Weight, activation_of
from orc.runtime.engine.megatron.steps import BertTrainStep

_ATTENTION = tuple(f"attention.self.{name}." for name in ("query", "key", "value"))
# Of a layer: the name of Transformers, that of Megatron-LM; each has a weight and a bias.
_OF_LAYER = (
    ("attention.ln.", "input_layernorm."),
    ("attention.output.dense.", "self_attention.linear_proj."),
    ("ln.", "pre_mlp_layernorm."),
    ("intermediate.dense.", "mlp.linear_fc1."),
    ("output.dense.", "mlp.linear_fc2."),
)
_KINDS = ("weight", "bias")


class Bert(Layout):
    """Layout of a Megatron-BERT: for pre-training, for masked words alone, or for the classes of sequences."""

    embedding, head = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"

    @property
    def classes(self) -> int | None:
        """Classes of sequences, where the model predicts them; `None` where it predicts masked words."""
        rows = self.shapes.get("classifier.weight")
        return None if rows is None else rows[0]

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that follow from the model."""
        hf = self.hf
        return {
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "num_attention_heads": hf.num_attention_heads,
            "ffn_hidden_size": hf.intermediate_size,
            "activation_func": activation_of(hf.hidden_act),
            "layernorm_epsilon": hf.layer_norm_eps,
            "hidden_dropout": hf.hidden_dropout_prob,
            "attention_dropout": hf.attention_probs_dropout_prob,
        }

    def piece(self, virtual: int | None) -> nn.Module:
        """Return the piece of this process's stage, or of its *virtual* stage in an interleaved schedule."""
        spec = with_layers(bert_layer_local_spec, CoreAttention, LayerNorm)
        kind = Words if self.classes is None else Classes
        piece: nn.Module = kind(
            self.config,
            self.hf.type_vocab_size,
            spec,
            self.rows,
            self.hf.max_position_embeddings,
            share_embeddings_and_output_weights=self.tied,
            parallel_output=True,
            add_binary_head=self.classes is not None or "cls.seq_relationship.weight" in self.shapes,
            **self.ends(virtual),
        )
        if isinstance(piece, Classes):
            piece.tell(self.classes or 0)
        return piece

    def weights(self) -> Iterator[Weight]:
        """Yield every weight of the whole model, in the same order on every process."""
        yield Weight((self.embedding,), "embedding.word_embeddings.weight", "vocabulary")
        for theirs, ours in (("position_embeddings", "position_embeddings"),
                             ("token_type_embeddings", "tokentype_embeddings")):  # fmt: skip
            yield Weight((f"bert.embeddings.{theirs}.weight",), f"embedding.{ours}.weight")
        heads = int(self.hf.num_attention_heads)
        table: list[tuple[Any, ...]] = [
            (tuple(name + kind for name in _ATTENTION), f"self_attention.linear_qkv.{kind}", "joined", heads)
            for kind in _KINDS
        ]
        table += [(theirs + kind, ours + kind, "same", 1) for theirs, ours in _OF_LAYER for kind in _KINDS]
        yield from self.of_layers("bert.encoder.layer.{}.", "encoder", table)
        for theirs, ours in self._ends():
            for kind in _KINDS:
                yield Weight((theirs + kind,), ours + kind, **self.at_end())
        if self.classes is None:
            yield Weight(("cls.predictions.bias",), "output_layer.bias", "vocabulary", **self.at_end())
            if not self.tied:
                yield Weight((self.head,), "output_layer.weight", "vocabulary", **self.at_end())

    def _ends(self) -> Iterator[tuple[str, str]]:
        yield "bert.encoder.ln.", "encoder.final_layernorm."
        if "bert.pooler.dense.weight" in self.shapes:
            yield "bert.pooler.dense.", "pooler.dense."
        if self.classes is not None:
            yield "classifier.", "binary_head.1."
            return
        yield "cls.predictions.transform.dense.", "lm_head.dense."
        yield "cls.predictions.transform.LayerNorm.", "lm_head.layer_norm."
        if "cls.seq_relationship.weight" in self.shapes:
            yield "cls.seq_relationship.", "binary_head."

    def train_step(self) -> Any:
        """Return the class of the train step, where the plug-in names no other."""
        return BertTrainStep


class Words(PaddedVocabulary, BertModel):  # type: ignore[misc]
    """Megatron-LM's BERT whose mask hides keys, as that of Transformers does."""

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        return "b11s"


class Classes(Words):
    """Megatron-LM's BERT that classifies sequences, and predicts no words."""

    def tell(self, classes: int) -> None:
        """Make the head for so many *classes*, where this is the last piece."""
        if self.post_process:
            config: Any = self.config
            self.lm_head, self.output_layer = _Through(), _Pair()
            self.binary_head = nn.Sequential(
                nn.Dropout(config.hidden_dropout),
                get_linear_layer(config.hidden_size, classes, config.init_method, config.perform_initialization),
            )


class _Through(nn.Module):
    """Head of words of a model without one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _Pair(nn.Module):
    """Output layer of a model without one: its output, and no bias."""

    def forward(self, hidden_states: Tensor, weight: Any = None) -> tuple[Tensor, None]:
        return hidden_states, None
