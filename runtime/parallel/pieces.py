"""Pieces of sequences: what holds while each process computes some of the tokens of every sequence.

While a piece is in force, `torch.nn.functional.scaled_dot_product_attention` is attention over the whole sequence: keys
and values of the other pieces take part. It computes attention without a mask and nothing else, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orc.runtime.core.errors import ContextError

Attend = Callable[..., Tensor]
IGNORED = -100  # the label of tokens that no loss is computed for, in torch and in Transformers


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

    current: Piece | None = (
        None  # of this process: torch's function, which it takes the place of, is one for all threads
    )

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
