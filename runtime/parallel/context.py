"""Context parallelism: the processes along ``cp`` share out the tokens of each sequence, attention goes over all.

It is causal ring attention: each piece of a sequence attends to the pieces of all ranks. torch has it for GPUs, in
``torch.distributed.tensor.experimental.context_parallel``. On the CPU the same rounds of the ring run here with the
kernel of the CPU, which torch does not name among them.

Sources: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3; which two chunks each rank
has, so that all compute as much: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.base import Parallelizer, Request
from orc.runtime.parallel.pieces import Attend, Piece, check_model, repeated, watch_model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.parallelism import ParallelismConfig

_KIND = "context parallelism"
_HOME = "torch.distributed.tensor.experimental"


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
        on_cpu = ctx.device.type == "cpu"
        try:
            _ = _rounds() if on_cpu else importlib.import_module(_HOME).context_parallel
        except (ImportError, AttributeError):
            needed = "2.10" if on_cpu else "2.7"
            return f"{_KIND} on this device needs torch {needed} or later, and this is {torch.__version__}"
        return None

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


# ---- the ring


@contextlib.contextmanager
def ring(mesh: DeviceMesh, length: int, strategy: str, device: torch.device) -> Iterator[tuple[Tensor, Attend]]:
    """Block in which this rank's positions in a sequence of *length* tokens, and the attention of its piece, hold.

    Each rank has a part of the beginning and one of the end, so that all have as much to compute. Keys and values
    travel by *strategy*, which is a setting of the whole process.
    """
    module = importlib.import_module(f"{_HOME}._attention")
    positions = torch.arange(length, device=device)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, module._cp_options, "rotate_method", module._cp_options.rotate_method)
        with torch.no_grad():
            module.set_rotate_method(strategy)
        if device.type == "cpu":
            parts, place = positions.chunk(2 * mesh.size()), mesh.get_local_rank()
            yield torch.cat([parts[place], parts[-1 - place]]), _on_cpu(mesh.get_group())
            return
        block = importlib.import_module(_HOME).context_parallel
        stack.enter_context(block(mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}))
        yield positions, _by_torch(functional.scaled_dot_product_attention)


def _by_torch(attention: Any) -> Attend:
    """Return the attention of a piece by *attention*, which torch's block has put in the place of its function."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        key, value = repeated(query, key, value, enable_gqa)
        out: Tensor = attention(query, key, value, **options)
        return out

    return attend


def _on_cpu(group: ProcessGroup) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        if dropout := options["dropout_p"]:
            raise ContextError(f"{_KIND}: the attention of the CPU has no dropout, and dropout_p={dropout}")
        key, value = repeated(query, key, value, enable_gqa)
        out: Tensor = _RingAttention.apply(query, key, value, group, options["scale"])  # type: ignore[no-untyped-call]
        return out

    return attend


def _rounds() -> Any:
    """The module that has torch's rounds of the ring, for any kernel."""
    module = importlib.import_module(f"{_HOME}._context_parallel._attention")
    _ = module._templated_ring_attention, module._templated_ring_attention_backward
    return module


class _RingAttention(torch.autograd.Function):
    """Rounds of the ring with the flash attention of the CPU; keys and values travel again in backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = _rounds()._templated_ring_attention(
            group, 2, kernel, query, key, value, is_causal=True, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.scale = group, scale
        return cast("Tensor", out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = _rounds()._templated_ring_attention_backward(
            ctx.group,
            2,
            kernel,
            grad_out=gradient.contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=True,
            dropout_p=0.0,
            scale=ctx.scale,
        )
        return (*gradients, None, None)


PARALLELIZER = ContextParallel()
