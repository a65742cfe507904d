"""Local SGD: every process steps on its own gradients, and the parameters are averaged every few steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from torch import Tensor, nn

    from orc.runtime.accelerator import Accelerator

_PART_BYTES = 64 << 20
_SUPPORTED_PREFIX = "MULTI_"


class LocalSGD:
    """A block in which gradients are not synchronised; parameters are, every *local_sgd_steps* calls of `step`.

    They are averaged once more when the block ends, so afterwards all processes have the same model. Gradient
    accumulation works inside as outside. With one process nothing differs from training without it.

    Args:
        accelerator: what the model was prepared with.
        model: the prepared model.
        local_sgd_steps: calls of `step` between two averages.
        enabled: `False`: gradients are synchronised as usual, and `step` does nothing.

    Raises:
        ValueError: *local_sgd_steps* is less than 1, or *model* is not the prepared one.
        NotImplementedError: the model is not trained as plain replicas (DeepSpeed, FSDP, tensor parallelism, ...).
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int = 8, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ValueError(f"LocalSGD: local_sgd_steps must be at least 1, not {local_sgd_steps}")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._no_sync: AbstractContextManager[Any] | None = None
        if self.enabled:
            _check(accelerator, model)

    def __enter__(self) -> Self:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: Any) -> None:
        if self._no_sync is None:
            return
        self._no_sync.__exit__(kind, *exc)
        self._no_sync = None
        if kind is None:  # after an error the other processes may never come here
            self._average()

    def step(self) -> None:
        """Count one step; average the parameters when it is time. Call it after the optimizer's, on all processes."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Give all processes the mean of the parameters and, as DDP would, the buffers of rank 0."""
        import torch

        from orc.runtime.collectives.collectives import broadcast, reduce

        ctx = self.accelerator.ctx
        with torch.no_grad():
            for part in _parts([p.data for p in self.model.parameters() if p.requires_grad]):
                torch._foreach_copy_(part, reduce(part, "mean", ctx=ctx))
            if getattr(self.model, "broadcast_buffers", True):
                broadcast([buffer.data for buffer in self.model.buffers()], ctx=ctx)


def _parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    # The mean is a copy: in parts, so that there is never a second model in memory.
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        part.append(tensor)
        size += tensor.nbytes
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _check(accelerator: Accelerator, model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    kind = accelerator.distributed_type
    if not kind.startswith(_SUPPORTED_PREFIX):
        raise NotImplementedError(f"LocalSGD works with plain replicas on CPUs or GPUs, not with {kind}")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError("LocalSGD works with plain replicas, not with sharded parameters")
    inner = [accelerator.unwrap_model(other) for other in accelerator._models if other is not model]
    if any(model is other for other in inner):
        raise ValueError("LocalSGD needs the model that prepare() returned, not the one inside it")
