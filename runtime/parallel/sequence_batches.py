"""Batches of whole sequences, cut to the piece of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from orc.runtime.core.errors import ContextError

_IGNORED = -100  # the label of tokens that no loss is computed for


class SequenceCut:
    """Cut of every batch to the *place*-th of *ranks* pieces of its sequences; *length*: tokens that they must have.

    Batches are mappings with ``input_ids``: tensors that are as long along dimension 1 are cut. ``labels`` come as
    ``shift_labels``, of which each belongs to the token before it; ``position_ids`` are added. A mask is left out, and
    *note_padding* called where it hides something.
    """

    def __init__(
        self, place: int, ranks: int, length: int | None = None, note_padding: Callable[[], None] = lambda: None
    ) -> None:
        self.place, self.ranks, self.length, self._note_padding = place, ranks, length, note_padding

    def __call__(self, batch: Any) -> Any:
        """Return the piece of *batch*.

        Raises:
            ContextError: it has no ``input_ids``, a length that cannot be cut, a mask, or packed sequences.
        """
        what = "sequence parallelism"
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ContextError(
                f"{what} cuts batches that are mappings with input_ids of shape (batch, tokens), not a "
                f"{type(batch).__name__}: let the collate_fn make such"
            )
        length = tokens.shape[1]
        if self.length is not None and length != self.length:
            raise ContextError(f"{what}: a batch with sequences of {length} tokens, and sp_seq_length={self.length}")
        if length % self.ranks:
            raise ContextError(
                f"{what}: sequences of {length} tokens cannot be cut into sp_size={self.ranks} equal pieces; pad them "
                f"to a multiple of {self.ranks} ({-(-length // self.ranks) * self.ranks})"
            )
        whole = dict(batch)
        if _pads(whole.pop("attention_mask", None)):
            self._note_padding()
        whole["position_ids"] = _positions(whole.get("position_ids"), tokens)
        if isinstance(labels := whole.pop("labels", None), Tensor):
            whole["shift_labels"] = functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        return {name: self._piece(value, length) for name, value in whole.items()}

    def _piece(self, value: Any, length: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        return value.chunk(self.ranks, 1)[self.place].contiguous()


def _positions(given: Tensor | None, tokens: Tensor) -> Tensor:
    counted = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    if given is not None and not bool((given == counted).all()):
        raise ContextError(
            "sequence parallelism: position_ids that do not count from 0: packed sequences would attend to each other; "
            "give one sequence per row"
        )
    return counted


def _pads(mask: Any) -> bool:
    """Return whether *mask* hides padding. Raises `ContextError` where it hides anything else."""
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask[:, 1:] <= mask[:, :-1]).all()):
        raise ContextError(
            "sequence parallelism: an attention_mask that hides more than padding on the right; pad there, where "
            "nobody attends to it"
        )
    return not bool(mask.all())
