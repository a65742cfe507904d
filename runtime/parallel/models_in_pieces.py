"""Models that compute pieces of sequences: those that cannot are refused, and a forward is checked when it has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import Piece
from orc.runtime.parallel.pieces_of_transformers import adapt, check_attention, is_transformers_model


def check_model(model: nn.Module, kind: str) -> None:
    """Raise `ContextError` where the configuration of *model* names another attention than torch's SDPA."""
    if is_transformers_model(model):
        check_attention(model, kind)


def watch_model(model: nn.Module) -> None:
    """Let *model* check, after a forward in pieces, that its attention was one that is replaced.

    Models of Transformers also get positions, labels and masks that are right for a piece.
    """
    if is_transformers_model(model):
        adapt(model)
    model.register_forward_pre_hook(_begin_count)
    model.register_forward_hook(_check_count)


def _begin_count(model: nn.Module, args: Sequence[Any]) -> None:
    if Piece.current is not None:
        Piece.current.calls = 0


def _check_count(model: nn.Module, args: Sequence[Any], output: Any) -> None:
    piece = Piece.current
    if piece is not None and piece.calls == 0:
        raise ContextError(
            f"{piece.kind}: {type(model).__name__} did not call torch.nn.functional.scaled_dot_product_attention, so "
            "its tokens attended to those of their own piece only; use it by that name"
        )
