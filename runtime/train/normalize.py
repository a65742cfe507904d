"""Losses that are sums, divided by how many items a whole accumulation window of all processes had.

With batches of varying length the mean of means is not the mean: a short batch weighs as much as a long one. The right
divisor, the number of tokens in all batches of all processes that make up one optimizer step, is known only with the
last batch of the window. Until then gradients are kept in a *unit* of this process (a guess of the divisor, so that
they stay in the range of half precision); with the last batch one all-reduce of the count tells the divisor, what has
accumulated is brought to it, and then the gradients are synchronised as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from orc.runtime.parallel.shards import local_part

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext

Count = int | float | Tensor


class LossNormalizer:
    """The counts of the current window; ``open`` while it has batches that wait for its last.

    ``due`` is what gradients are to be multiplied by after backward: FSDP version 2 keeps those that wait to itself.

    ``uneven`` says that processes may have run out of batches: nobody would answer the all-reduce of the counts.
    """

    __slots__ = ("_count", "_ctx", "_gradient", "_parameters", "_unit", "due", "open", "uneven")

    def __init__(self, ctx: RunContext, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._ctx = ctx
        self._gradient = ctx.gradient
        self._parameters = parameters
        self.uneven = False
        self.reset()

    def reset(self) -> None:
        """Forget the window."""
        self.open = False
        self.due: Any = None
        self._count: Any = 0
        self._unit: Any = 1

    def scale(self, loss: Tensor, count: Count) -> Tensor:
        """Return the tensor to call backward on for *loss*, the sum over *count* items.

        Raises:
            ValueError: *count* is not one number, or negative; or processes may have run out of batches.
        """
        _check(count)
        if self.uneven:
            raise ValueError(
                "normalize_by cannot be used inside join_uneven_inputs: processes that have run out of batches do not "
                "answer; use loaders with even_batches, or a mean loss"
            )
        gradient = self._gradient
        if not self.open and not gradient.sync_gradients:
            self.open = True
            # Gradients that are synchronised within the window must be in one unit on all processes.
            self._unit = 1 if gradient.sync_each_batch else _power_of_two(count, gradient.num_steps)
        self._count = self._count + (count.detach() if isinstance(count, Tensor) else count)
        if not gradient.sync_gradients:
            in_unit: Tensor = loss / self._unit
            return in_unit
        # Gradients are averaged over the processes, so each contributes its share of the sum times their number.
        total = self._total(self._count)
        factor = self._ctx.topology.loss_size / total
        if self.open:
            unit, parameters = self._unit, list(self._parameters())
            if any(hasattr(parameter, "full_tensor") for parameter in parameters):
                self.reset()
                self.due = unit * factor
                unsettled: Tensor = loss / unit
                return unsettled
            _multiply([p.grad for p in parameters if p.grad is not None], unit * factor)
        self.reset()
        scaled: Tensor = loss * factor
        return scaled

    def settle(self) -> None:
        """Multiply the gradients of this window, which are synchronised now, by what is ``due``."""
        due, self.due = self.due, None
        _multiply([local_part(p.grad) for p in self._parameters() if p.grad is not None], due)

    def _total(self, count: Any) -> Any:
        """The sum of *count* over the processes, 1 where it is 0. Stays on the device that it came on."""
        topology = self._ctx.topology
        if topology.loss_size > 1:
            self._ctx.require_group("normalize_by")
            group = topology.loss_group
            device = self._ctx.device
            if not isinstance(count, Tensor) and device.type == "cuda" and self._ctx.compute.device_in_group:
                count = torch.full((), float(count), dtype=torch.float64, device=device)  # no host waits for its peers
            number = torch.as_tensor(count, dtype=None if isinstance(count, Tensor) else torch.float64)
            came_on = number.device
            if came_on.type == "cpu" or not self._ctx.compute.device_in_group:
                number = number.to(self._ctx.control_device)
            number = number.detach().reshape(1).to(torch.float64, copy=True)
            dist.all_reduce(number, group=group)
            count = number[0].to(came_on) if isinstance(count, Tensor) else number.item()
        if isinstance(count, Tensor):
            count = count.reshape(())
            return torch.where(count == 0, 1, count).float()
        return count or 1


def _check(count: Any) -> None:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"normalize_by must be one number, not a tensor of shape {list(count.shape)}")
    elif isinstance(count, bool) or not isinstance(count, (int, float)) or not count >= 0:
        raise ValueError(f"normalize_by must be a number of at least 0, not {count!r}")


def _power_of_two(count: Any, steps: int) -> Any:
    """About *count* times *steps*, at least 1. Gradients come through a power of two and back without rounding."""
    if isinstance(count, Tensor):
        number = count.detach().reshape(()).clamp(min=1).to(torch.float32) * steps
        return torch.ldexp(torch.ones_like(number), torch.frexp(number).exponent)
    return 2.0 ** math.frexp(max(count, 1) * steps)[1]


def _multiply(grads: list[Tensor], factor: Any) -> None:
    if not grads:
        return
    with torch.no_grad():
        if not isinstance(factor, Tensor):
            torch._foreach_mul_(grads, float(factor))
            return
        for device, dtype in {(grad.device, grad.dtype) for grad in grads}:
            same = [grad for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
            torch._foreach_mul_(same, factor.reshape(()).to(device, torch.float32))
