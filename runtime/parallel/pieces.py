"""Pieces of sequences: what holds while each process computes some of the tokens of every sequence.

While a piece is in force, `torch.nn.functional.scaled_dot_product_attention` is attention over the whole sequence: keys
and values of the other pieces take part. It computes attention without a mask and nothing else, and says so. Models
that cannot be spread so are refused, and a forward is checked when it has run; models of Transformers get the
attention, positions, labels and masks of a piece.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orc.runtime.core.errors import ContextError

Attend = Callable[..., Tensor]
IGNORED = -100  # the label of tokens that no loss is computed for, in torch and in Transformers
_ATTENTION = "sdpa_in_pieces"  # the name by which Transformers knows the attention of pieces


class Piece:
    """The tokens of every sequence that this process computes, and how they attend to the others.

    Args:
        kind: what cuts sequences, for messages: ``context parallelism``.
        positions: places of the tokens here in the whole sequence, in the order in which they are here.
        length: tokens of a whole sequence.
        ranks: pieces of a sequence.
        attend: attention of this piece's queries, given queries, keys, values, and ``is_causal``, ``scale``,
            ``dropout_p`` and ``enable_gqa`` as for torch's.
        causal: attention is causal only.
    """

    current: Piece | None = None  # of this process: torch's function, whose place it takes, is one for all threads

    def __init__(
        self, kind: str, positions: Tensor, length: int, ranks: int, attend: Attend, *, causal: bool = True
    ) -> None:
        self.kind, self.positions, self.length, self.ranks = kind, positions, length, ranks
        self._attend, self._causal = attend, causal
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._torch: Any = None
        self._in_backward = False
        self.calls = 0

    def cut(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return this piece of *tensor*, which has whole sequences along *dim*."""
        return tensor.index_select(dim, self.positions.to(tensor.device))

    def note(self, cut: Tensor, whole: Tensor) -> None:
        """Remember of which *whole* tensor *cut* is a piece."""
        self._whole.append((cut, whole))

    def whole_of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor with whole sequences that *tensor* is or was; `None` where it came as a piece."""
        for cut, whole in self._whole:
            if cut is tensor:
                return whole
        return tensor if tensor.shape[-1] == self.length else None

    def begin(self, *, backward: bool = False) -> None:
        """Let attention be that of this piece, for a *backward* or for a block.

        Raises:
            ContextError: another one is in force.
        """
        if Piece.current is not None and Piece.current.is_left_over:
            Piece.current.end()
        if Piece.current is not None:
            raise ContextError(f"{self.kind}: a block of {Piece.current.kind} is open already; end it first")
        self._torch, self._in_backward = functional.scaled_dot_product_attention, backward
        Piece.current = self
        functional.scaled_dot_product_attention = self.attention

    @property
    def is_left_over(self) -> bool:
        """`True` after a backward that broke off and was not ended."""
        return self._in_backward and torch._C._current_graph_task_id() == -1

    def end(self) -> None:
        """Let attention be torch's again."""
        functional.scaled_dot_product_attention = self._torch
        Piece.current, self._torch, self._whole = None, None, []

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of this piece's queries to the whole sequence, with the arguments of torch's function.

        Raises:
            ContextError: with a mask, not causal, or of something else than pieces of the sequence.
        """
        if self.is_left_over:
            self.end()
            given = (query, key, value, attn_mask, dropout_p, is_causal)
            plain: Tensor = functional.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
            return plain
        if attn_mask is not None:
            raise ContextError(
                f"{self.kind}: attention with a mask (attn_mask); sequences in pieces have attention without a mask "
                "only: give sequences of one length, or padded on the right, without attention_mask"
            )
        if self._causal and not is_causal:
            raise ContextError(
                f"{self.kind}: attention that is not causal; sequences in pieces, or with padding, need "
                "is_causal=True, as decoders have"
            )
        lengths = [tensor.shape[-2] for tensor in (query, key)]
        if query.ndim != 4 or lengths != [len(self.positions)] * 2:
            raise ContextError(
                f"{self.kind}: queries of shape {list(query.shape)} and keys of {list(key.shape)} are no pieces of "
                f"{len(self.positions)} tokens (batch, heads, tokens, size): name every tensor with a sequence among "
                "the buffers of the block"
            )
        self.calls += 1
        options = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p, "enable_gqa": enable_gqa}
        return self._attend(query, key, value, **options)


def repeated(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """Return *key* and *value* with as many heads as *query*, where *enable_gqa* lets them have fewer."""
    if not enable_gqa or key.shape[1] == query.shape[1]:
        return key, value
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def hides_padding(mask: Any, kind: str) -> bool:
    """Return whether *mask*, of whole sequences, hides padding on the right, which only causal attention leaves out.

    Raises:
        ContextError: it hides anything else.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        raise ContextError(
            f"{kind}: an attention_mask that hides more than padding on the right; pad there, where nobody attends to "
            "it, and leave the mask out or give that of whole sequences"
        )
    return not bool(mask.all())


def refuse_packed(positions: Tensor, kind: str) -> None:
    """Raise `ContextError` where *positions*, of whole sequences, are of several, packed into one."""
    counted = torch.arange(positions.shape[-1], device=positions.device)
    if not bool((positions == counted).all()):
        raise ContextError(
            f"{kind}: position_ids that do not count from 0: packed sequences would attend to each other; give one "
            "sequence per row"
        )


# ---- models


def watch_model(model: Any) -> None:
    """Let *model* check, after a forward in pieces, that its attention was one that is replaced.

    Models of Transformers also get positions, labels and masks that are right for a piece.
    """
    if is_transformers_model(model):
        _register()
        model.set_attn_implementation(_ATTENTION)
        model.register_forward_pre_hook(_inputs, with_kwargs=True)
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


def check_model(model: Any, kind: str) -> None:
    """Raise `ContextError` where the configuration of *model* names another attention than torch's SDPA."""
    name = model.config._attn_implementation if is_transformers_model(model) else "sdpa"
    if name not in ("sdpa", _ATTENTION):
        raise ContextError(
            f"{kind}: {type(model).__name__} has attn_implementation={name!r}, and only 'sdpa' can be spread over "
            "processes: load the model with attn_implementation='sdpa'"
        )


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


def _inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    return None if Piece.current is None else ((), inputs_of_piece(model, args, kwargs, Piece.current))


def inputs_of_piece(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """Return the inputs of *model*, by name, with the positions and labels of *piece*, and without a mask.

    Raises:
        ContextError: the mask hides more than padding on the right, or sequences are packed.
    """
    parameters = inspect.signature(model.forward).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    if "position_ids" in parameters:
        positions = given.get("position_ids")
        if positions is None:
            given["position_ids"] = piece.positions[None]
        elif (whole := piece.whole_of(positions)) is not None:
            refuse_packed(whole, piece.kind)
            given["position_ids"] = piece.cut(whole)
    if (mask := given.pop("attention_mask", None)) is not None:
        hides_padding(piece.whole_of(mask) if isinstance(mask, Tensor) else mask, piece.kind)
    if "labels" in parameters:
        _shift(model, given, piece)
    return given


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
