"""Ring attention: causal attention of pieces of sequences to the pieces of all ranks, by torch's context parallelism.

torch has it for the attention kernels of GPUs, in ``torch.distributed.tensor.experimental.context_parallel``. On the
CPU the same rounds of the ring run here with the kernel of the CPU, which torch does not name among them.

Sources: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, section 3; which two chunks each rank
has, so that all compute as much: The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from orc.runtime.core.errors import ContextError
from orc.runtime.parallel.pieces import Attend, repeated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HOME = "torch.distributed.tensor.experimental"


def missing(device_type: str) -> str | None:
    """Return what this torch lacks to compute context parallelism on devices of *device_type*; `None` if nothing."""
    try:
        if device_type == "cpu":
            _rounds()
        else:
            importlib.import_module(_HOME).context_parallel  # noqa: B018 - asks whether it is there
    except (ImportError, AttributeError):
        needed = "2.10" if device_type == "cpu" else "2.7"
        return f"context parallelism on this device needs torch {needed} or later, and this is {torch.__version__}"
    return None


def _rounds() -> Any:
    """The module that has torch's rounds of the ring, for any kernel."""
    module = importlib.import_module(f"{_HOME}._context_parallel._attention")
    _ = module._templated_ring_attention, module._templated_ring_attention_backward
    return module


@contextlib.contextmanager
def ring(mesh: DeviceMesh, length: int, strategy: str, device: torch.device) -> Iterator[tuple[Tensor, Attend]]:
    """Block in which this rank's positions in a sequence of *length* tokens, and the attention of its piece, hold.

    Each rank has a part of the beginning and one of the end, so that all have as much to compute.
    """
    with _rotating(strategy):
        yield from _pieces(mesh, length, device)


def _pieces(mesh: DeviceMesh, length: int, device: torch.device) -> Iterator[tuple[Tensor, Attend]]:
    if device.type == "cpu":
        parts = torch.arange(length, device=device).chunk(2 * mesh.size())
        place = mesh.get_local_rank()
        yield torch.cat([parts[place], parts[-1 - place]]), _on_cpu(mesh)
        return
    positions = torch.arange(length, device=device)
    block = importlib.import_module(_HOME).context_parallel
    with block(mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}):
        yield positions, _by_torch()


@contextlib.contextmanager
def _rotating(strategy: str) -> Iterator[None]:
    """Block in which keys and values travel by *strategy*, which is a setting of the whole process."""
    module = importlib.import_module(f"{_HOME}._attention")
    before = module._cp_options.rotate_method
    with torch.no_grad():
        module.set_rotate_method(strategy)
    try:
        yield
    finally:
        module._cp_options.rotate_method = before


def _by_torch() -> Attend:
    attention = functional.scaled_dot_product_attention  # what torch's block has put there

    def attend(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool, **options: Any) -> Tensor:
        key, value = repeated(query, key, value, enable_gqa)
        return attention(query, key, value, **options)

    return attend


def _on_cpu(mesh: DeviceMesh) -> Attend:
    group = mesh.get_group()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float | None,
        dropout_p: float,
        enable_gqa: bool,
    ) -> Tensor:
        if dropout_p:
            raise ContextError(
                f"context parallelism: the attention of the CPU has no dropout, and dropout_p={dropout_p}"
            )
        key, value = repeated(query, key, value, enable_gqa)
        out: Tensor = _RingAttention.apply(query, key, value, group, scale)  # type: ignore[no-untyped-call]
        return out

    return attend


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
