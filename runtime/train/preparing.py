"""Preparing: what a script made becomes what this run needs, once, so that nothing is looked up per step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from orc.runtime.core.attributes import AcceleratorAttributes
from orc.runtime.core.handlers import TorchDynamoPlugin
from orc.runtime.parallel import Request, extract_model_from_parallel, parallelize
from orc.runtime.parallel.compile import compile_model, compiles
from orc.runtime.parallel.moving import MovedParameters
from orc.runtime.parallel.precision import wrap_forward
from orc.runtime.preemption.methods import Watching
from orc.runtime.train.optimizer import AcceleratedOptimizer
from orc.runtime.train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from orc.runtime.preemption.boundary import Boundary


class Preparing(AcceleratorAttributes, Watching):
    """The part of the Accelerator that prepares. What it has prepared already comes back as it is."""

    dynamo_plugin: TorchDynamoPlugin
    _boundary: Boundary

    @cached_property
    def _moved(self) -> MovedParameters:
        return MovedParameters()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers of torch's classes; anything else comes back as it is.

        Args:
            args: the objects in any order; an optimizer must come with or after its model.
            device_placement: for each object, whether to put it on the device.

        Returns:
            The prepared objects in the same order; one object by itself.

        Raises:
            ValueError: *device_placement* has another length than *args*.
        """
        if device_placement is None:
            placement: list[bool | None] = [None] * len(args)
        elif len(device_placement) != len(args):
            raise ValueError(f"device_placement has {len(device_placement)} elements for {len(args)} objects")
        else:
            placement = list(device_placement)
        # Schedulers refer to optimizers, and these to models, which may stand behind them.
        result: dict[int, Any] = {}
        for index in sorted(range(len(args)), key=lambda index: _turn(args[index])):
            result[index] = self._prepare_one(args[index], placement[index])
        return result[0] if len(result) == 1 else tuple(result[index] for index in range(len(args)))

    def _prepare_one(self, one: Any, place: bool | None) -> Any:
        if isinstance(one, DataLoader):
            return self.prepare_data_loader(one, device_placement=place)
        if isinstance(one, nn.Module):
            return self.prepare_model(one, device_placement=place)
        if isinstance(one, Optimizer):
            return self.prepare_optimizer(one, device_placement=place)
        if isinstance(one, LRScheduler):
            return self.prepare_scheduler(one)
        return one

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place *model*, give it its precision and, unless *evaluation_mode*, make it parallel; compile it if asked.

        Raises:
            ValueError: it is spread over several devices by a device map, and there are several processes.
        """
        for known in self._prepared.models:
            if known is model:
                return model
            if extract_model_from_parallel(known, keep_torch_compile=False) is model:
                return model if evaluation_mode else known
        spread = self.verify_device_map(model)
        if spread and self.use_distributed and not evaluation_mode:
            raise ValueError(
                "a model that a device map spreads over several devices cannot be trained by several processes: load "
                "it without device_map, or start one process"
            )
        if self._placing(device_placement) and not spread:
            model = model.to(self.device) if self.ctx.xla is None else self._moved.move(model, self.device)
        if self.mixed_precision != "no":
            inner = extract_model_from_parallel(model, keep_torch_compile=False)
            compiled = compiles(self.dynamo_plugin)
            wrap_forward(inner, self.mixed_precision, self.device, self._options.autocast, compiled=compiled)
        strategy = self.ctx.config.strategy
        request = Request(strategy=strategy, evaluation=evaluation_mode, options={"ddp": self._options.ddp})
        model = compile_model(parallelize(model, self.ctx, request), self.dynamo_plugin)
        self._prepared.models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Let *optimizer* step with the gradients' synchronisation."""
        for known in self._prepared.optimizers:
            if optimizer in (known, known.optimizer):
                return known  # type: ignore[no-any-return]
        self._moved.follow(getattr(optimizer, "optimizer", optimizer))
        prepared = optimizer
        if not isinstance(prepared, AcceleratedOptimizer):
            prepared = AcceleratedOptimizer(
                optimizer,
                self._placing(device_placement),
                self._prepared.scaler,
                gradient=self._gradient,
                engine=self._engine,
                device=self.device,
            )
        self._prepared.optimizers.append(prepared)
        self._watch_optimizer(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Let *scheduler* follow its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for known in self._prepared.schedulers:
            if known.scheduler is scheduler:
                return known  # type: ignore[no-any-return]
        optimizers = self._prepared.optimizers
        own = [o for o in optimizers if scheduler.optimizer in (o, o.optimizer)] or optimizers
        prepared = AcceleratedScheduler(
            scheduler,
            own,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            gradient=self._gradient,
            num_processes=self.num_processes,
        )
        self._prepared.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """The loader of this process's share of *data_loader*."""
        from orc.runtime.data.prepare import prepare_data_loader

        if any(data_loader is known for known in self._prepared.dataloaders):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            context=self.ctx,
            put_on_device=self._placing(device_placement),
            rng_types=self.rng_types,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            **vars(self._options.dataloader),
        )
        prepared.boundary, prepared.meter = self._boundary, self._meter
        self._prepared.dataloaders.append(prepared)
        return prepared

    def _placing(self, device_placement: bool | None) -> bool:
        return self.device_placement if device_placement is None else device_placement

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether *model* or a part of it has a device map (``hf_device_map``) with more than one entry."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())


def _turn(one: Any) -> int:
    return 2 if isinstance(one, LRScheduler) else 1 if isinstance(one, Optimizer) else 0
