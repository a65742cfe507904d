"""What an Accelerator has prepared: one record for each model, which everybody reads, and lists of everything else."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn


class Layout(Enum):
    """Who holds what of a model's parameters, and with it how its state is read and written."""

    WHOLE = "whole"  # every process holds all of them
    GATHERED = "gathered"  # its own state dict gathers them, and all processes call it together
    SHARDED = "sharded"  # cut over processes, as DTensors
    FLATTENED = "flattened"  # cut over processes by version 1 of FSDP
    STAGED = "staged"  # each process holds others, whole ones or cut ones: `PreparedModel.partition`
    OF_ENGINE = "of_engine"  # the engine that trains it lays out its own part of a checkpoint


class Synchronizer(Protocol):
    """What brings the gradients of a model together, in backward: a `Parallelizer`."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Return a block in which backward leaves the gradients of *model* local; `None` if they always are."""
        ...

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any] | None:
        """Return a block whose backward brings them together although forward ran without."""
        ...


@dataclass(frozen=True, repr=False, eq=False)
class GradientSync:
    """Record of what brings the gradients of *model* together in backward; `None` where nothing does."""

    model: nn.Module  # inside what torch.compile made of it
    by: Synchronizer | None

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a block around forward and backward in which the gradients stay local."""
        block = None if self.by is None else self.by.no_sync(self.model)
        return nullcontext() if block is None else block

    def sync_in_backward(self) -> AbstractContextManager[Any]:
        """Return a block around the backward that ends several forwards under `no_sync`."""
        block = None if self.by is None else self.by.sync_in_backward(self.model)
        return nullcontext() if block is None else block


@dataclass(frozen=True, repr=False, eq=False)
class PreparedModel:
    """Record of one model, made when it is prepared.

    Attributes:
        model: what `prepare` has returned, with all that was put around it.
        bare: the model that the script wrote, inside it; not compiled.
        layout: who holds its parameters.
        cut: some of them are cut over processes, in whatever layout.
        partition: the `Partition` of a model in stages.
        gradients: how they come together.
    """

    model: nn.Module
    bare: nn.Module
    gradients: GradientSync
    layout: Layout = Layout.WHOLE
    cut: bool = False
    partition: Any = None

    @property
    def spread(self) -> bool:
        """Whether each process holds a part of it alone, of which torch gathers the whole."""
        return self.layout in (Layout.SHARDED, Layout.FLATTENED, Layout.STAGED)


class PreparedOptimizer(Protocol):
    """What an engine knows of a prepared optimizer.

    Attributes:
        optimizer: the one that the script made, or a library in its place.
        steps: updates made.
        skips: updates skipped.
    """

    optimizer: torch.optim.Optimizer
    steps: int
    skips: int

    def count(self, updated: bool) -> None:
        """Count an update that was made, or skipped."""
        ...


@dataclass(repr=False, eq=False)
class Prepared:
    """Everything an Accelerator has prepared or registered, in order; what a checkpoint covers."""

    models: list[nn.Module] = field(default_factory=list)
    records: list[PreparedModel] = field(default_factory=list)  # of these models
    optimizers: list[Any] = field(default_factory=list)  # AcceleratedOptimizer
    schedulers: list[Any] = field(default_factory=list)  # AcceleratedScheduler
    dataloaders: list[Any] = field(default_factory=list)  # PreparedLoader
    custom: list[Any] = field(default_factory=list)  # registered by the user: state_dict and load_state_dict
    scaler: Any = None  # torch.amp.GradScaler with fp16; its scale is read by `current_scaler`
    engine: Any = None  # the Engine that trains them
    guard: Any = None  # the SpikeGuard that may veto their updates
    sharded: bool = False  # a model has parameters that are cut over the processes

    def add_model(self, record: PreparedModel) -> None:
        """Add the model of *record*."""
        self.models.append(record.model)
        self.records.append(record)
        self.sharded = self.sharded or record.cut

    def record_of(self, model: nn.Module) -> PreparedModel | None:
        """Return the record of *model*; `None` of one that was not prepared here."""
        for record in self.records:
            if record.model is model:
                return record
        return None

    def steps(self) -> int:
        """Optimizer steps taken so far."""
        steps = 0
        for optimizer in self.optimizers:
            if optimizer.steps > steps:
                steps = optimizer.steps
        return steps

    def attempts(self) -> int:
        """Return the optimizer steps taken or skipped so far."""
        return max([optimizer.steps + optimizer.skips for optimizer in self.optimizers], default=0)

    def current_scaler(self) -> Any:
        """Return the gradient scaler with the scale that the next backward will use; `None` where nothing is scaled."""
        return self.scaler if self.engine is None else self.engine.scaler

    def trained_parameters(self) -> Iterable[torch.Tensor]:
        """Every parameter of the optimizers once; without optimizers those of the models."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        parameters = groups or [list(model.parameters()) for model in self.models]
        return {id(parameter): parameter for group in parameters for parameter in group}.values()

    def clear(self) -> None:
        """Forget all objects."""
        for objects in (self.models, self.records, self.optimizers, self.schedulers, self.dataloaders, self.custom):
            objects.clear()
        self.sharded = False
