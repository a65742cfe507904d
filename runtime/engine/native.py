"""Training with torch's own autograd, optimizers and gradient scaler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from orc.runtime.core.context import RunContext
from orc.runtime.core.events import Events
from orc.runtime.core.prepared import GradientSync, Prepared, PreparedOptimizer
from orc.runtime.engine.by_mesh import groups_of_one_kind
from orc.runtime.parallel.norms import clip_norm, clip_values, total_norm
from orc.runtime.parallel.records import gradients_of, record_of
from orc.runtime.parallel.shards import whole
from orc.runtime.train.normalize import Count, LossNormalizer

if TYPE_CHECKING:
    from orc.runtime.core.options import Options
    from orc.runtime.train.engine import Preparing

_AS_THEY_ARE = contextlib.nullcontext()  # parameter groups


class NativeEngine:
    """Backward, clipping and stepping for one run; ``prepared.scaler`` exists with fp16 only."""

    name = "native"

    def __init__(self, ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> None:
        self.ctx = ctx
        self.prepared = Prepared() if prepared is None else prepared
        self.prepared.engine = self
        self.events = Events()
        self.normalizer = LossNormalizer(ctx, self.prepared.trained_parameters)
        self.own_state = None
        self._gradient = ctx.gradient
        self._scaler: torch.amp.GradScaler | None = self.prepared.scaler
        self._unscaled: set[int] = set()  # optimizers whose gradients are unscaled since the last update
        self._stepped: set[int] = set()
        self._observed: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that say that they ran
        self._applied = False  # the optimizer that the scaler was told to step has changed its parameters

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with the scale that the next backward will use."""
        self._update_scale()
        return self._scaler

    # preparing

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing
    ) -> Sequence[Any]:
        """Prepare all *objects*: models first, then the optimizers that train them, then what follows these."""
        return preparation.one_by_one(objects, placement)

    # backward

    def backward(self, loss: Tensor, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, the loss divided by the accumulation count and scaled where fp16 needs it.

        With *normalize_by* divided by its sum over the window and the processes instead; see `LossNormalizer`.
        """
        given = loss
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
        if self.normalizer.due is not None:
            self.normalizer.settle()
        if self.events.on_backward:
            for tell in self.events.on_backward:
                tell(given, normalize_by is not None)

    def fused_backward(self, loss: Tensor, optimizers: Sequence[Any], learning_rate: float) -> None:
        """Let *optimizers* compute gradients of *loss*, divided by the accumulation count, and update at once."""
        given, steps = loss, self._gradient.num_steps
        for optimizer in optimizers:
            optimizer.fused_backward(loss if steps == 1 else loss / steps, learning_rate)
        for tell in self.events.on_backward:
            tell(given, False)

    def forget(self) -> None:
        """Forget what is left of an unfinished window."""
        self.normalizer.reset()
        self._stepped.clear()
        self._unscaled.clear()

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context around forward and backward in which *model*'s gradients stay local."""
        return self._gradients(model).no_sync()

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context around the backward that ends several forwards under `no_sync`."""
        return self._gradients(model).sync_in_backward()

    def _gradients(self, model: nn.Module) -> GradientSync:
        record = self.prepared.record_of(model)
        return gradients_of(model) if record is None else record.gradients

    # gradients

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down to *max_norm*; returns their total norm before, over all shards."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm_type = float(norm_type)  # as torch does, which takes "inf" too
        if self._scaler is not None and not self._gradient.sync_gradients:
            # Scaled gradients must stay scaled until the last of them has been added: look, do not touch.
            norm = total_norm(parameters, norm_type)
            norm = norm / self._scaler.scale(torch.ones_like(norm))  # the scale stays on the device
        else:
            self.complete(parameters)
            norm = clip_norm(parameters, max_norm, norm_type, sharded=self.prepared.sharded)
        if self.events.on_clip:
            for tell in self.events.on_clip:
                tell(norm)
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        if self._scaler is not None and not self._gradient.sync_gradients:
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.complete(parameters)
        clip_values(parameters, clip_value, sharded=self.prepared.sharded)

    def complete(self, parameters: Sequence[Tensor]) -> None:
        """Bring the gradients of *parameters* to what the step will use, before they are changed all together."""
        if self._scaler is not None:
            self.unscale()

    def unscale(self, optimizers: Sequence[Any] | None = None) -> None:
        """Divide the gradients of the bare *optimizers*, else of all prepared, by the loss scale; once per step."""
        if self._scaler is None:
            return
        if optimizers is None:
            optimizers = [optimizer.optimizer for optimizer in self.prepared.optimizers]
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
                self._scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))

    # stepping

    def step(self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step ``optimizer.optimizer``; with a scaler unless its gradients overflowed."""
        bare = optimizer.optimizer
        if not optimizer.steps and self.prepared.sharded:
            from orc.runtime.train.stale import refuse_stale

            refuse_stale(bare, self.prepared.models, [optimizer.optimizer for optimizer in self.prepared.optimizers])
        kinds = groups_of_one_kind(bare) if self.prepared.sharded else _AS_THEY_ARE
        if self._scaler is None:
            optimizer.steps += 1
            with kinds:
                return bare.step() if closure is None else bare.step(closure)
        if bare not in self._observed:
            bare.register_step_post_hook(self._note_step)
            self._observed.add(bare)
        if id(bare) in self._stepped:
            self._update_scale()
        self._stepped.add(id(bare))
        self._applied = False
        with kinds:
            result = self._scaler.step(bare) if closure is None else self._scaler.step(bare, closure)
        optimizer.count(self._applied)
        return result

    def zero_grad(self, optimizer: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optimizer.optimizer``."""
        optimizer.optimizer.zero_grad(set_to_none)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Optimizers that know of the scale run always and skip inside; the others are not called on overflow.
        overflow = getattr(optimizer, "found_inf", None)
        self._applied = overflow is None or not bool(overflow.item())

    def _update_scale(self) -> None:
        # Once per iteration, as torch wants it, however many optimizers step: the first thing after the last step.
        if self._scaler is not None and self._stepped:
            self._begin_iteration(self._scaler)

    def _begin_iteration(self, scaler: torch.amp.GradScaler) -> None:
        scaler.update()
        self._stepped.clear()
        self._unscaled.clear()

    # state

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*; with *unwrap* under the names of the model that the user wrote."""
        bare = record_of(self.prepared, model).bare if unwrap else model
        state = bare.state_dict()
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
            from orc.runtime.weights.dispatch import get_state_dict_offloaded_model

            state = get_state_dict_offloaded_model(bare, strict=False)  # hooks keep them on the CPU or on the disk
        return whole(state) if self.prepared.sharded else state


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


ENGINE = NativeEngine
