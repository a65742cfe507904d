"""Layers that are put into Megatron-LM's layer spec, its own extension point, where its own need a GPU or apex."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CoreAttention(nn.Module):
    """Causal attention by torch's scaled dot product, for CPUs: Megatron-LM's own computes in a CUDA buffer.

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
        # Megatron-LM recomputes with the states of CUDA generators.
        self.recomputed = bool(getattr(config, "orc_recompute_attention", False))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **unused: Any) -> Tensor:
        """Return the attention's output [sequence, batch, heads x size] for *query* [sequence, batch, heads, size]."""
        if not (self.training and self.dropout):
            return self._attend(query, key, value)
        with get_cuda_rng_tracker().fork():  # each tensor parallel process has other heads
            return self._attend(query, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.recomputed and torch.is_grad_enabled():  # it repeats the random numbers too
            result: Tensor = checkpoint(self._product, query, key, value, use_reentrant=False)
            return result
        return self._product(query, key, value)

    def _product(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, dropout_p=dropout)
        return found.permute(2, 0, 1, 3).flatten(2)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, also under sequence parallelism, for which Megatron-LM's own needs apex.

    It is made by the layer spec, with Megatron-LM's arguments.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in (self.weight, self.bias):  # its gradient is then summed over the parts of the sequence
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
