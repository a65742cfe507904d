"""The contract of an engine: who trains. Every Accelerator has exactly one, which `engine_for` chooses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from orc.runtime.core.libraries import libraries
from orc.runtime.core.prepared import Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.events import Events
    from orc.runtime.core.handlers import TorchDynamoPlugin
    from orc.runtime.core.options import Options
    from orc.runtime.core.prepared import PreparedOptimizer
    from orc.runtime.train.normalize import Count, LossNormalizer

_ENGINES = "orc.runtime.engine"


class Preparing(Protocol):
    """What prepares single objects of torch's classes, for an engine that prepares those of one call together.

    Attributes:
        options: of the Accelerator.
        dynamo: how models are compiled, resolved.
    """

    options: Options
    dynamo: TorchDynamoPlugin

    def one_by_one(self, objects: Sequence[Any], placement: Sequence[bool | None]) -> list[Any]:
        """Prepare each of *objects* by itself; the result is in their order."""
        ...

    def converted(self, model: nn.Module) -> nn.Module:
        """Return *model* with the layers of the precision, for an engine that prepares it by itself."""
        ...

    def prepare_optimizer(self, optimizer: Any) -> Any:
        """Return a wrapper of *optimizer* that steps with the gradients' synchronisation."""
        ...

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a wrapper of *scheduler* that follows its optimizer."""
        ...

    def prepare_data_loader(self, data_loader: Any) -> Any:
        """Return the loader of this process's share of *data_loader*."""
        ...


class OwnState(Protocol):
    """The part of a checkpoint that an engine lays out by itself: its models, with the optimizers and schedules that
    these bring along. No file of `orc.runtime.checkpoint` holds them.
    """

    def covers(self, prepared: Any) -> bool:
        """Return whether *prepared*, a model, an optimizer or a scheduler, belongs to this part."""
        ...

    def trained(self) -> Sequence[Any]:
        """Return the models that train, in the order in which they were prepared; others have nothing to save."""
        ...

    def save(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank writes, by file name: bytes as they are, and states to pickle. All ranks call it.

        *options* are those of the library's own function that saves.
        """
        ...

    def problem(self, files: Collection[str], world_size: int) -> str | None:
        """Return why this run cannot load a checkpoint with *files* that *world_size* ranks saved."""
        ...

    def load(self, directory: Path, models: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Load those of the trained *models* from *directory*. All ranks call it. Raises `CheckpointError`."""
        ...


class Engine(Protocol):
    """Owner of backward, steps, clipping, gradient synchronisation and the states of models and optimizers.

    It is made as ``Class(ctx, options, prepared)`` by the attribute ``ENGINE`` of its module; see `engine_for`.
    Whatever depends on the platform or on a library that trains is behind these methods and nowhere else.

    Attributes:
        name: as `engine_for` chooses it.
        prepared: everything that was prepared, in order.
        events: backward, clip and step are told by the engine, batch and save by loaders and checkpoints.
        normalizer: of losses with ``normalize_by``.
    """

    name: str
    ctx: RunContext
    prepared: Prepared
    events: Events
    normalizer: LossNormalizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with the scale that the next backward will use; `None` where nothing is scaled."""
        ...

    @property
    def own_state(self) -> OwnState | None:
        """What it lays out in a checkpoint by itself; `None` where that is nothing."""
        ...

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing
    ) -> Sequence[Any]:
        """Prepare all *objects* of one call of `Accelerator.prepare`, in any order; returns them in the same order.

        *placement* says of each object whether to put it on the device (`None`: as the Accelerator does). *preparation*
        prepares single objects of torch's classes; an engine that needs several at once (DeepSpeed: model, optimizer,
        scheduler and the loader's batch size) takes these by itself and adds them to ``prepared``.
        """
        ...

    def backward(self, loss: Tensor, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """Compute gradients of *loss*: divided by the accumulation count or normalized, scaled where that is needed."""
        ...

    def step(self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of ``optimizer.optimizer``; called at the end of each accumulation window.

        It counts the update, or that it was skipped: `PreparedOptimizer.count`.
        """
        ...

    def zero_grad(self, optimizer: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of ``optimizer.optimizer``; called at the end of each accumulation window."""
        ...

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down to *max_norm*; returns their norm before, over all shards, as a plain tensor."""
        ...

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        ...

    def unscale(self, optimizers: Sequence[Any] | None = None) -> None:
        """Divide the gradients of the bare *optimizers* (else of all prepared) by the loss scale, once per step."""
        ...

    def fused_backward(self, loss: Tensor, optimizers: Sequence[Any], learning_rate: float) -> None:
        """Compute gradients of *loss* and update at once, by bare *optimizers* that have ``fused_backward`` (LOMO)."""
        ...

    def forget(self) -> None:
        """Forget what is left of an unfinished window: everything prepared is given up."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block around forward and backward in which *model*'s gradients stay local."""
        ...

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block around the backward that ends several forwards under `no_sync`."""
        ...

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*, whole tensors; all ranks call it.

        With *unwrap* under the names of the model that the script wrote.
        """
        ...


def engine_for(ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> Engine:
    """Return the engine that trains in *ctx* with *options*, over the objects in *prepared*. Nothing else makes one."""
    if ctx.library is not None:
        kind = libraries()[ctx.library.engine].engine()
    else:
        kind = importlib.import_module(f"{_ENGINES}.{_name(ctx)}").ENGINE
    engine: Engine = kind(ctx, options, Prepared() if prepared is None else prepared)
    return engine


def _name(ctx: RunContext) -> str:
    if ctx.topology_chosen and ctx.topology.size("pp") > 1:
        return "pipeline"
    return ctx.compute.engine
