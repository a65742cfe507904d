"""Training with torch's own autograd, optimizers and gradient scaler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orc.runtime.core.context import RunContext
from orc.runtime.parallel import extract_model_from_parallel, parallelizers
from orc.runtime.train.normalize import Count, LossNormalizer


class NativeEngine:
    """Backward, clipping and stepping for one run; ``scaler`` exists with fp16 only.

    *parameters* are those of everything prepared: what `backward` with ``normalize_by`` rescales.
    """

    def __init__(
        self,
        ctx: RunContext,
        scaler: torch.amp.GradScaler | None = None,
        parameters: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.ctx = ctx
        self._gradient = ctx.gradient
        self._scaler = scaler
        self._unscaled: set[int] = set()  # optimizers whose gradients are unscaled since the last update
        self._stepped: set[int] = set()
        self.normalizer = LossNormalizer(ctx, parameters)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with the scale that the next backward will use."""
        self._update_scale()
        return self._scaler

    # backward

    def backward(self, loss: Tensor, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, the loss divided by the accumulation count and scaled where fp16 needs it.

        With *normalize_by* divided by its sum over the window and the processes instead; see `LossNormalizer`.
        """
        if normalize_by is not None:
            loss = self.normalizer.scale(loss, normalize_by)
        elif (steps := self._gradient.num_steps) != 1:
            if self.normalizer.open:
                raise ValueError(
                    "backward without normalize_by in a window that began with it: give it for every batch between "
                    "two optimizer steps, or for none"
                )
            loss = loss / steps
        if self._scaler is not None:
            if self._stepped or self._unscaled:  # unscaled and not stepped: the script left the step out
                self._begin_iteration(self._scaler)
            loss = self._scaler.scale(loss)
        loss.backward(**kwargs)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context around forward and backward in which *model*'s gradients stay local."""
        model = model._modules.get("_orig_mod") or model  # what torch.compile made of it
        for one in parallelizers():
            if (context := one.no_sync(model)) is not None:
                return context
        return contextlib.nullcontext()

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context around the backward that ends several forwards under `no_sync`."""
        model = model._modules.get("_orig_mod") or model
        for one in parallelizers():
            if (context := one.sync_in_backward(model)) is not None:
                return context
        return contextlib.nullcontext()

    # gradients

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float, optimizers: Sequence[Any]
    ) -> Tensor:
        """Scale the gradients down to *max_norm*; returns their total norm before."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._scaler is not None and not self._gradient.sync_gradients:
            # Scaled gradients must stay scaled until the last of them has been added: look, do not touch.
            return _total_norm(parameters, norm_type) / self._scaler.get_scale()
        self.unscale(optimizers)
        self._reduce(parameters, optimizers)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(
        self, parameters: Iterable[Tensor] | Tensor, clip_value: float, optimizers: Sequence[Any]
    ) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        if self._scaler is not None and not self._gradient.sync_gradients:
            return
        self.unscale(optimizers)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._reduce(parameters, optimizers)
        nn.utils.clip_grad_value_(parameters, clip_value)

    def _reduce(self, parameters: Sequence[Tensor], optimizers: Sequence[Any]) -> None:
        """Over torch_xla gradients are averaged with the step; what is done to all of them has to come after."""
        if self.ctx.xla is not None and self._gradient.sync_gradients:
            ids = {id(parameter) for parameter in parameters}
            self.ctx.xla.reduce_gradients([one for one in optimizers if ids & _parameters(one)])

    def unscale(self, optimizers: Sequence[Any]) -> None:
        """Divide the gradients of the bare *optimizers* by the loss scale, once per step; nothing without fp16."""
        if self._scaler is None:
            return
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
                self._scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    # stepping

    def scaled_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> Any:
        """Step *optimizer* unless its gradients overflowed. Only with a scaler."""
        assert self._scaler is not None
        if id(optimizer) in self._stepped:
            self._update_scale()
        self._stepped.add(id(optimizer))
        return self._scaler.step(optimizer) if closure is None else self._scaler.step(optimizer, closure)

    def _update_scale(self) -> None:
        # Once per iteration, as torch wants it, however many optimizers step: the first thing after the last step.
        if self._scaler is not None and self._stepped:
            self._begin_iteration(self._scaler)

    def _begin_iteration(self, scaler: torch.amp.GradScaler) -> None:
        scaler.update()
        self._stepped.clear()
        self._unscaled.clear()

    # state

    def state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict of *model*; with *unwrap* under the names of the model that the user wrote."""
        return (extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model).state_dict()


def _total_norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    # torch's own comes with 2.6.
    norms = [torch.linalg.vector_norm(p.grad, norm_type) for p in parameters if p.grad is not None]
    if not norms:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
