"""Context parallelism: the processes along ``cp`` share out the tokens of each sequence, attention goes over all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.models_in_pieces import check_model, watch_model
from orc.runtime.parallel.pieces import Piece
from orc.runtime.parallel.ring import missing, ring

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.parallelism import ParallelismConfig

_KIND = "context parallelism"


class ContextParallel(Parallelizer):
    """Models whose sequences `context_parallel` cuts. Parameters stay; they are averaged like those of replicas."""

    name = "context"
    order = 200
    conflicts: tuple[str, ...] = ("xla",)
    serves: tuple[str, ...] = ("cp",)

    def wanted(self, model: nn.Module, ctx: RunContext, request: Request) -> bool:
        """Return whether there are several processes along ``cp``."""
        return ctx.topology.size("cp") > 1

    def requires(self, ctx: RunContext) -> str | None:
        """Return why torch cannot compute it on this device, or `None`."""
        return missing(ctx.device.type)

    def check(self, model: nn.Module, ctx: RunContext, request: Request) -> None:
        """Refuse attention that cannot be spread."""
        check_model(model, _KIND)

    def apply(self, model: nn.Module, ctx: RunContext, request: Request) -> nn.Module:
        """Return *model*, which checks what it computes inside a block."""
        watch_model(model)
        model.register_forward_hook(_expect_backward)
        return model


def _expect_backward(model: nn.Module, args: Any, output: Any) -> None:
    """Have a backward of *output* that comes after the block raise."""
    piece = Piece.current
    if piece is None:
        return

    def check(gradient: Tensor) -> None:
        if Piece.current is not piece:
            raise ContextError(f"{_KIND}: backward after the block of its forward has ended; put it inside the block")

    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(check)


@contextlib.contextmanager
def context_parallel(
    ctx: RunContext,
    config: ParallelismConfig | None,
    buffers: Sequence[Tensor] | None,
    dims: Sequence[int] | None,
    no_restore: Collection[Tensor] | None,
) -> Iterator[None]:
    """Cut *buffers* along *dims* to this rank's piece, and let attention go over all pieces, inside the block.

    Raises:
        ValueError: the buffers do not fit, the same on every rank.
        ContextError: another block is open, or this torch cannot do it.
    """
    ranks = ctx.topology.size("cp")
    given, along = list(buffers or ()), list(dims or ())
    length = _length(given, along, ranks)
    kept = list(no_restore or ())
    if any(all(tensor is not buffer for buffer in given) for tensor in kept):
        raise ValueError("maybe_context_parallel: no_restore_buffers has a tensor that is not among the buffers")
    handler = None if config is None else config.cp_handler
    strategy = "allgather" if handler is None else str(handler.cp_comm_strategy)
    with ring(ctx.topology.submesh("cp"), length, strategy, ctx.device) as (positions, attend):
        piece = Piece(_KIND, positions, length, ranks, attend)
        piece.begin()
        whole = [tensor.data for tensor in given]
        try:
            for buffer, dim in zip(given, along, strict=True):
                piece.note(buffer, buffer.data)
                buffer.data = piece.cut(buffer.data, dim)
            yield
        finally:
            piece.end()
            for buffer, before in zip(given, whole, strict=True):
                if all(buffer is not tensor for tensor in kept):
                    buffer.data = before
                    torch.autograd.graph.increment_version(buffer)  # a backward that comes too late says so


def _length(buffers: Sequence[Tensor], dims: Sequence[int], ranks: int) -> int:
    """The tokens of the sequences in *buffers*. Raises `ValueError` where they cannot be cut for *ranks*."""
    what = "maybe_context_parallel"
    if not buffers:
        raise ValueError(f"{what}: cp_size is {ranks}, and there are no buffers to cut: give the tensors of the batch")
    if len(buffers) != len(dims):
        raise ValueError(f"{what}: {len(buffers)} buffers, but {len(dims)} buffer_seq_dims; give one for each")
    lengths = []
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if isinstance(buffer, nn.Parameter) or not isinstance(buffer, Tensor) or buffer.grad_fn is not None:
            raise ValueError(f"{what}: buffer {index} is a parameter, a result, or no tensor; give inputs and buffers")
        if any(buffer is other for other in buffers[:index]):
            raise ValueError(f"{what}: buffer {index} is given twice")
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(f"{what}: buffer {index} has shape {list(buffer.shape)}, and no dimension {dim}")
        lengths.append(buffer.shape[dim])
    if len(set(lengths)) > 1:
        raise ValueError(
            f"{what}: the buffers have sequences of {', '.join(map(str, lengths))} tokens, not of one length"
        )
    if lengths[0] % (2 * ranks):
        up = -(-lengths[0] // (2 * ranks)) * 2 * ranks
        raise ValueError(
            f"{what}: sequences of {lengths[0]} tokens cannot be cut for cp_size={ranks}: each process has two equal "
            f"parts, so pad them to a multiple of {2 * ranks} ({up})"
        )
    return lengths[0]


PARALLELIZER = ContextParallel()
