"""Models of Transformers that compute pieces of sequences: their attention, positions, labels and masks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import Piece

_ATTENTION = "sdpa_in_pieces"
_IGNORED = -100  # the label of tokens that no loss is computed for, in torch and in Transformers


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether *model* is one of Transformers; it is not where that is not loaded."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def check_attention(model: Any, kind: str) -> None:
    """Raise `ContextError` unless the attention of *model* is torch's SDPA."""
    name = model.config._attn_implementation
    if name not in ("sdpa", _ATTENTION):
        raise ContextError(
            f"{kind}: {type(model).__name__} has attn_implementation={name!r}, and only 'sdpa' can be spread over "
            "processes: load the model with attn_implementation='sdpa'"
        )


def adapt(model: Any) -> None:
    """Let *model* compute pieces of sequences wherever one is in force; elsewhere it stays as it is."""
    _register()
    model.set_attn_implementation(_ATTENTION)
    model.register_forward_pre_hook(_whole_inputs, with_kwargs=True)


def _register() -> None:
    """Let Transformers know an attention that is its SDPA, but asks for no mask where a piece is in force."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        piece = Piece.current
        window = kwargs.get("sliding_window")
        if piece is not None and window is not None and window < piece.length:
            raise ContextError(
                f"{piece.kind}: {type(module).__name__} attends to a window of {window} tokens; sequences in pieces "
                f"have attention over all {piece.length}"
            )
        return sdpa_attention_forward(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Positions of a piece are not consecutive, which Transformers takes for several sequences in one.
        return None if Piece.current is not None else sdpa_mask(*args, **kwargs)

    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, mask)


def _whole_inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Give *model* the positions and labels of its piece; refuse masks that would be ignored."""
    piece = Piece.current
    if piece is None:
        return None
    parameters = inspect.signature(model.forward).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    if "position_ids" in parameters:
        given["position_ids"] = _positions(given.get("position_ids"), piece)
    _refuse_mask(given.get("attention_mask"), piece)
    given.pop("attention_mask", None)
    if given.get("labels") is not None:
        _shift(model, given, piece)
    return (), given


def _positions(given: Tensor | None, piece: Piece) -> Tensor:
    """This piece's positions. Raises `ContextError` where those *given* are of several sequences, packed into one."""
    if given is None:
        return piece.positions[None]
    whole = piece.whole_of(given)
    if whole is None:
        return given
    if not bool((whole == torch.arange(piece.length, device=whole.device)).all()):
        raise ContextError(
            f"{piece.kind}: position_ids that do not count from 0 to {piece.length - 1}: packed sequences would attend "
            "to each other; give one sequence per row"
        )
    return piece.cut(whole)


def _refuse_mask(mask: Any, piece: Piece) -> None:
    """Raise `ContextError` unless *mask* hides nothing, or padding on the right, which nobody attends to."""
    if mask is None:
        return
    whole = piece.whole_of(mask) if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if whole is None or not bool((whole[:, 1:] <= whole[:, :-1]).all()):
        raise ContextError(
            f"{piece.kind}: an attention_mask that hides more than padding on the right; sequences in pieces have "
            "causal attention: pad on the right, and leave the mask out or name it among the buffers of the block"
        )


def _shift(model: Any, given: dict[str, Any], piece: Piece) -> None:
    """Shift labels of whole sequences by one, as the model would do with its piece, where the next token is missing."""
    loss: Mapping[str, Any] = inspect.signature(model.loss_function).parameters
    whole = piece.whole_of(given["labels"])
    if "shift_labels" not in loss or given.get("shift_labels") is not None or whole is None:
        return
    shifted = nn.functional.pad(whole, (0, 1), value=_IGNORED)[..., 1:]
    given["shift_labels"] = piece.cut(shifted)
    if "num_items_in_batch" in loss and given.get("num_items_in_batch") is None:
        # The mean over the pieces of sums over this count is the mean over the sequence, however many labels each has.
        given["num_items_in_batch"] = (shifted != _IGNORED).sum().clamp(min=1) / piece.ranks
