"""Layout of a Transformers model as one of Megatron-LM's over the ranks: configuration, pieces, names of weights.

`Layout` is what all kinds of models share; `gpt2`, `bert` and `t5` derive from it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from orc.runtime.engine.megatron.plugin import MegatronLMPlugin
from orc.runtime.engine.megatron.rules import (
    check_others,
    layers_per_stage,
    padded_vocabulary,
    shape_of,
    virtual_stages,
)

_LAYOUTS = {"gpt2": ("gpt2", "Gpt2"), "megatron-bert": ("bert", "Bert"), "t5": ("t5", "T5"), "mt5": ("t5", "T5")}


@dataclass(frozen=True)
class Weight:
    """Weight of the whole model: its names in Transformers and, on its stage, in one of the pieces there.

    Attributes:
        theirs: the name in Transformers; several where Megatron-LM has joined them.
        ours: the name in a piece of Megatron-LM's model.
        form: how its values lie: ``same``, ``vocabulary`` (rows are padded), ``joined``, or one of the kind's own.
        stage: the stage that has it.
        piece: the piece there.
        groups: of ``joined`` weights, how many groups of rows follow each other, each with a share of every part.
    """

    theirs: tuple[str, ...]
    ours: str
    form: str = "same"
    stage: int = 0
    piece: int = 0
    groups: int = 1


class Layout(ABC):
    """Layout of one model over the ranks.

    Args:
        model: of Transformers, checked by `rules.check_model`.
        plugin: says how to split it.
        device: where this process computes.
        dtype: of the weights in training.

    Attributes:
        embedding: name of the embedding of the vocabulary.
        head: name of the output layer's weights, which may be those of the embedding.
        inputs: names that a batch must have, for messages.
        shapes: of each of the model's weights, by name.
        aliases: names of weights that are those of another name.
    """

    embedding = head = ""
    inputs = "input_ids"

    def __init__(self, model: Any, plugin: MegatronLMPlugin, device: torch.device, dtype: torch.dtype) -> None:
        self.plugin, self.hf, self.device, self.dtype = plugin, model.config, device, dtype
        self.shape = shape_of(model.config)
        layers = plugin.num_layers_per_virtual_pipeline_stage
        self.pieces = virtual_stages(self.shape.layers, plugin.pp_degree, layers)
        state = model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.adopted(state).items()}
        self.tied = self.head in state and state[self.head].data_ptr() == state[self.embedding].data_ptr()
        divisor = int(plugin.others.get("make_vocab_size_divisible_by", 128))
        self.rows = plugin.padded_vocab_size = padded_vocabulary(self.hf.vocab_size, plugin.tp_degree, divisor)
        self.config: TransformerConfig = self.configured(self.settings())
        places = {state[name].data_ptr(): name for weight in self.weights() for name in weight.theirs if name in state}
        known = {name for weight in self.weights() for name in weight.theirs}
        self.aliases = {name: places[state[name].data_ptr()] for name in self.shapes if name not in known}

    def adopted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the *state* of the Transformers model as this layout has it: the same, unless a setting changes it."""
        return dict(state)

    # ---- configuration

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that follow from the model."""

    def configured(self, settings: Mapping[str, Any]) -> Any:
        """Return the configuration with *settings* of the model, of the plug-in and of the device."""
        plugin, dtype, on_cpu = self.plugin, self.dtype, self.device.type == "cpu"
        common: dict[str, Any] = {
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
            common |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        config = TransformerConfig(**(common | dict(settings) | check_others(plugin, TransformerConfig)))
        config.orc_recompute_attention = plugin.recompute_activations and on_cpu
        return config

    # ---- pieces

    def build(self) -> list[nn.Module]:
        """Return this process's pieces of the model, one where the schedule is not interleaved."""
        made = []
        for number in range(self.pieces):
            virtual = number if self.pieces > 1 else None
            piece: Any = self.piece(virtual)
            piece.vocabulary = self.hf.vocab_size
            made.append(piece.to(self.device))
        return made

    @abstractmethod
    def piece(self, virtual: int | None) -> nn.Module:
        """Return the piece of this process's stage, or of its *virtual* stage in an interleaved schedule."""

    def ends(self, virtual: int | None) -> dict[str, Any]:
        """Return Megatron-LM's arguments that mark the first and the last piece."""
        ends = {"ignore_virtual": False, "vp_stage": virtual}
        return {
            "pre_process": parallel_state.is_pipeline_first_stage(**ends),
            "post_process": parallel_state.is_pipeline_last_stage(**ends),
            "vp_stage": virtual,
        }

    # ---- weights

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """Yield every weight of the whole model, in the same order on every process."""

    def at_end(self) -> dict[str, Any]:
        """Return the place of the last piece."""
        return {"stage": self.plugin.pp_degree - 1, "piece": self.pieces - 1}

    def copies(self) -> Iterator[Weight]:
        """Yield what the last stage has a copy of: the embedding, where it is the output layer too."""
        if self.tied and self.plugin.pp_degree > 1:
            yield Weight((self.embedding,), "output_layer.weight", "vocabulary", **self.at_end())

    def of_layers(self, prefix: str, block: str, table: Iterable[tuple[Any, ...]]) -> Iterator[Weight]:
        """Yield the weights of all layers.

        Args:
            prefix: of the names in Transformers, with the layer's number as ``{}``.
            block: name of the block in Megatron-LM's model.
            table: names of Transformers (one or several), the name in Megatron-LM's layer, the form, and groups.
        """
        stages = self.plugin.pp_degree
        per_piece = layers_per_stage(self.shape.layers, stages) // self.pieces
        for layer in range(self.shape.layers):
            turn, inside = divmod(layer, per_piece)
            piece, stage = divmod(turn, stages)
            for theirs, ours, form, groups in table:
                names = (theirs,) if isinstance(theirs, str) else theirs
                full = tuple(prefix.format(layer) + name for name in names)
                yield Weight(full, f"{block}.layers.{inside}.{ours}", form, stage, piece, groups)

    def to_ours(self, values: Sequence[Tensor], weight: Weight) -> Tensor:
        """Return whole *values* of Transformers as Megatron-LM lays *weight* out."""
        if weight.form == "joined":
            return joined(values, weight.groups)
        if weight.form == "vocabulary":
            (value,) = values
            return F.pad(value, (0, 0) * (value.ndim - 1) + (0, self.rows - value.shape[0]))
        return values[0]

    def to_theirs(self, value: Tensor, weight: Weight) -> Sequence[Tensor]:
        """Return a whole *value* of Megatron-LM as Transformers lays *weight* out, a tensor for each name."""
        if weight.form == "joined":
            return split_groups(value, weight.groups, [self.shapes[name][0] for name in weight.theirs])
        return [value[: self.hf.vocab_size]] if weight.form == "vocabulary" else [value]

    # ---- batches

    def checked(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of *batch* that the train step reads.

        Raises:
            ValueError: the model cannot compute it.
        """
        length = batch["input_ids"].shape[1]
        longest = self.plugin.seq_length or self.shape.positions
        if longest is not None and length > longest:
            raise ValueError(f"the batch has {length} tokens per sample, the model has {longest} positions")
        return dict(batch)

    @abstractmethod
    def train_step(self) -> Any:
        """Return the class of the train step, where the plug-in names no other."""


def layout_of(model: Any, plugin: MegatronLMPlugin, device: torch.device, dtype: torch.dtype) -> Layout:
    """Return the layout of *model*, which `rules.check_model` has checked."""
    module, name = _LAYOUTS[model.config.model_type]
    kind: type[Layout] = getattr(importlib.import_module(f"orc.runtime.engine.megatron.{module}"), name)
    return kind(model, plugin, device, dtype)


def activation_of(name: str) -> Any:
    """Return the function that Transformers calls *name*."""
    tanh = name in ("gelu_new", "gelu_pytorch_tanh")
    return (
        F.relu
        if name == "relu"
        else F.silu
        if name == "silu"
        else partial(F.gelu, approximate="tanh" if tanh else "none")
    )


def joined(parts: Sequence[Tensor], groups: int) -> Tensor:
    """Return *parts* in one tensor of *groups* of rows, each with a share of every part."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def split_groups(value: Tensor, groups: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return the parts, of so many rows each, that `joined` has put into *value*."""
    shares = value.unflatten(0, (groups, -1)).split([size // groups for size in sizes], 1)
    return [share.flatten(0, 1) for share in shares]


class PaddedVocabulary:
    """Megatron-LM's model whose padding of the vocabulary gets no probability: its loss is that of Transformers'.

    A mixin, before the class of the model.
    """

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
        found: Any = super()
        loss: Tensor = found.compute_language_model_loss(labels, logits)
        return loss
