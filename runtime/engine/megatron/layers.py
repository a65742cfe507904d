"""Layers that are put into Megatron-LM's layer spec, its own extension point, where its own need a GPU or apex."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def with_layers(spec: Any, attention: type[nn.Module], norm: type[nn.Module]) -> Any:
    """Return a copy of the layer *spec* whose attention and norms are these."""
    made = copy.deepcopy(spec)
    parts = made.submodules
    for name in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
        if name != "pre_cross_attn_layernorm" or getattr(parts.cross_attention, "submodules", None) is not None:
            setattr(parts, name, norm)
    for part in (parts.self_attention, parts.cross_attention):
        if getattr(part, "submodules", None) is not None:
            part.submodules.core_attention = attention
    return made


class CoreAttention(nn.Module):
    """Attention by torch's scaled dot product: Megatron-LM's own computes in a CUDA buffer, and takes no bias.

    It is made by the layer spec, with Megatron-LM's arguments.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.causal = attn_mask_type.name == "causal"
        self.slopes = slopes(config.num_attention_heads) if getattr(config, "orc_alibi", False) else None
        # Megatron-LM recomputes with the states of CUDA generators.
        self.recomputed = bool(getattr(config, "orc_recompute_attention", False))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return the attention's output [sequence, batch, heads x size] for *query* [sequence, batch, heads, size].

        *attention_mask* is true where a key is hidden; *attention_bias* is added to the scores.
        """
        added = self._added(query, key, attention_mask, attention_bias)
        if not (self.training and self.dropout):
            return self._attend(query, key, value, added)
        with get_cuda_rng_tracker().fork():  # each tensor parallel process has other heads
            return self._attend(query, key, value, added)

    def _added(self, query: Tensor, key: Tensor, hidden: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """Return what is added to the scores; `None` where nothing is, but for the causal mask."""
        length, keys = query.shape[0], key.shape[0]
        if self.slopes is not None:
            heads = query.shape[2]
            own = self.slopes.to(query).narrow(0, heads * parallel_state.get_tensor_model_parallel_rank(), heads)
            bias = own.view(1, heads, 1, 1) * torch.arange(keys, device=query.device, dtype=query.dtype)
        if self.causal:
            if bias is None and hidden is None:
                return None
            later = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(1)
            hidden = later if hidden is None else hidden | later
        if hidden is None:
            return bias
        lowest = torch.finfo(query.dtype).min
        if bias is None:
            return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, lowest)
        return bias.masked_fill(hidden, lowest)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> Tensor:
        if self.recomputed and torch.is_grad_enabled():  # it repeats the random numbers too
            result: Tensor = checkpoint(self._product, query, key, value, added, use_reentrant=False)
            return result
        return self._product(query, key, value, added)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None) -> Tensor:
        if key.shape[2] != query.shape[2]:  # several heads share one of keys and values
            key, value = (tensor.repeat_interleave(query.shape[2] // tensor.shape[2], dim=2) for tensor in (key, value))
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        causal = self.causal and added is None
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, is_causal=causal, scale=self.scale, dropout_p=dropout
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each of so many *heads*: a geometric series, for a power of two from 2**(-8 / heads) on.

    Other numbers take every other slope of the next power of two for what is missing.
    """
    base = 2 ** (heads.bit_length() - 1)
    powers = [2 ** (-8 * (index + 1) / base) for index in range(base)]
    powers += [2 ** (-4 * (2 * index + 1) / base) for index in range(heads - base)]
    return torch.tensor(powers)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, also under sequence parallelism, for which Megatron-LM's own needs apex.

    It is made by the layer spec, with Megatron-LM's arguments.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in (self.weight, self.bias):  # its gradient is then summed over the parts of the sequence
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """torch's root mean square norm, made by the layer spec with Megatron-LM's arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
