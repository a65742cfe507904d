"""Models that compute pieces of sequences: those that cannot are refused, and a forward is checked when it has run.

Models of Transformers get the attention, positions, labels and masks of a piece.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import IGNORED, Piece, hides_padding, refuse_packed

_ATTENTION = "sdpa_in_pieces"


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
    """Register an attention in Transformers that is its SDPA, but requests no mask where a piece is in force."""
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
    return None if Piece.current is None else ((), inputs_of_piece(model, args, kwargs, Piece.current))


def inputs_of_piece(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the inputs of *model*, by name, with the positions and labels of *piece*, and without a mask.

    Raises:
        ContextError: the mask hides more than padding on the right, or sequences are packed.
    """
    parameters = inspect.signature(model.forward).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    if "position_ids" in parameters:
        given["position_ids"] = _positions(given.get("position_ids"), piece)
    if (mask := given.pop("attention_mask", None)) is not None:
        hides_padding(piece.whole_of(mask) if isinstance(mask, Tensor) else mask, piece.kind)
    if "labels" in parameters:
        _shift(model, given, piece)
    return given


def _positions(given: Tensor | None, piece: Piece) -> Tensor:
    """This piece's positions. Raises `ContextError` where those *given* are of several sequences, packed into one."""
    if given is None:
        return piece.positions[None]
    whole = piece.whole_of(given)
    if whole is None:
        return given
    refuse_packed(whole, piece.kind)
    return piece.cut(whole)


def _shift(model: Any, given: dict[str, Any], piece: Piece) -> None:
    """Shift labels of whole sequences by one, as the model would do with its piece, where the next token is missing."""
    loss: Mapping[str, Any] = inspect.signature(model.loss_function).parameters
    if "shift_labels" not in loss:
        return
    if given.get("shift_labels") is not None:
        if given.get("labels") is None:  # without any the model computes no loss
            given["labels"] = given["shift_labels"]
        return
    whole = None if given.get("labels") is None else piece.whole_of(given["labels"])
    if whole is None:
        return
    shifted = nn.functional.pad(whole, (0, 1), value=IGNORED)[..., 1:]
    given["shift_labels"] = piece.cut(shifted)
    if "num_items_in_batch" in loss and given.get("num_items_in_batch") is None:
        # The mean over the pieces of sums over this count is the mean over the sequence, however many labels each has.
        given["num_items_in_batch"] = (shifted != IGNORED).sum().clamp(min=1) / piece.ranks
