"""Batches of whole sequences, cut to the piece of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import IGNORED, hides_padding, refuse_packed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        if (mask := whole.pop("attention_mask", None)) is not None and hides_padding(mask, what):
            self._note_padding()
        if (given := whole.get("position_ids")) is not None:
            refuse_packed(given, what)
        whole["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.shape[:2])
        if isinstance(labels := whole.pop("labels", None), Tensor):
            whole["shift_labels"] = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return {name: self._piece(value, length) for name, value in whole.items()}

    def _piece(self, value: Any, length: int) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        return value.chunk(self.ranks, 1)[self.place].contiguous()


class WholeSequences:
    """Check that the first batch of training, and the first of evaluation, came as pieces to the ranks of *group*."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._seen: set[bool] = set()

    @torch.no_grad()
    def refuse(self, tokens: Tensor, training: bool) -> None:
        """Raise `ContextError` where all ranks have the same *tokens*; collective. Such as are all alike pass."""
        if training in self._seen or torch.compiler.is_compiling():
            return
        self._seen.add(training)
        flat = tokens.detach().flatten().double()
        ramp = torch.arange(len(flat), device=flat.device, dtype=flat.dtype)
        alike = (flat == flat[:1]).all().double()
        said = torch.stack([flat.sum(), flat @ ramp, torch.full_like(alike, len(flat)), alike])
        most = torch.cat([said, -said])
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        if bool((most[:4] == -most[4:]).all()) and not bool(alike):
            raise ContextError(
                "sequence parallelism: the processes along sp were given the same tokens, so nobody has cut these "
                "sequences: take batches from a prepared loader, or cut them along dimension 1: "
                "tokens.chunk(sp_size, 1)[accelerator.torch_device_mesh.get_local_rank('sp')]"
            )
