"""Preparing: what a script made becomes what this run needs, once, so that nothing is looked up per step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from orc.runtime.parallel import Request, apply_all, batch_cut, chosen, extract_model_from_parallel, is_sharded
from orc.runtime.parallel.base import ChecksGradients
from orc.runtime.parallel.compile import compile_model, compiles
from orc.runtime.parallel.records import described
from orc.runtime.parallel.replacements import follow, move
from orc.runtime.parallel.shards import follow_mesh
from orc.runtime.train.optimizer import AcceleratedOptimizer
from orc.runtime.train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from orc.runtime.core.handlers import TorchDynamoPlugin
    from orc.runtime.core.options import Options
    from orc.runtime.parallel.precision import Precision
    from orc.runtime.train.engine import Engine
    from orc.runtime.watching import Watching


class Preparation:
    """Prepares single objects of torch's classes for one Accelerator. What is prepared already comes back as it is.

    Args:
        engine: trains what is prepared.
        options: of the Accelerator.
        dynamo: how models are compiled, resolved.
        watching: is told of every optimizer and loader.
        precision: in which models are trained.
    """

    def __init__(
        self, engine: Engine, options: Options, dynamo: TorchDynamoPlugin, watching: Watching, precision: Precision
    ) -> None:
        self.ctx = engine.ctx
        self.engine = engine
        self.options = options
        self.prepared = engine.prepared
        self.dynamo = dynamo
        self.precision = precision
        self._watching = watching

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers of torch's classes; anything else comes back as it is.

        Args:
            args: the objects in any order; a scheduler must come with or after its optimizer.
            device_placement: for each object, whether to put it on the device.

        Returns:
            The prepared objects in the same order; one object by itself.

        Raises:
            ValueError: *device_placement* has another length than *args*.
            ContextError: the ranks train in different ways or prepare different objects; the same on every rank.
        """
        if device_placement is None:
            placement: list[bool | None] = [None] * len(args)
        elif len(device_placement) != len(args):
            raise ValueError(f"device_placement has {len(device_placement)} elements for {len(args)} objects")
        else:
            placement = list(device_placement)
        if self.ctx.distributed:
            from orc.runtime.train.agreement import check_agreement

            check_agreement(args, self.engine, self.options)
        result = self.engine.prepare(self.precision.together(args, self.ctx), placement, self)
        return result[0] if len(result) == 1 else tuple(result)

    def one_by_one(self, objects: Sequence[Any], placement: Sequence[bool | None]) -> list[Any]:
        """Prepare each of *objects* by itself; the result is in their order."""
        # Schedulers refer to optimizers, and these to models, which may stand behind them. Loaders share the data out
        # as the mesh of a model says.
        turns: Sequence[tuple[type, Callable[..., Any]]] = (
            (nn.Module, self.prepare_model),
            (DataLoader, self.prepare_data_loader),
            (Optimizer, self.prepare_optimizer),
            (LRScheduler, lambda scheduler, _: self.prepare_scheduler(scheduler)),
        )
        result = list(objects)
        for kind, prepare in turns:
            for index, item in enumerate(objects):
                if isinstance(item, kind):
                    result[index] = prepare(item, placement[index])
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place *model*, give it its precision and, unless *evaluation_mode*, make it parallel; compile it if set so.

        A model that the script has sharded by itself (``fully_shard``) stays where it is, and is not made parallel.

        Args:
            device_placement: `False` leaves the model where it is; the Accelerator's setting unless given.

        Raises:
            ValueError: it is spread over several devices by a device map, and there are several processes; or it has
                no content (meta device) and nothing that shards it; or its weights are quantized and do not learn.
        """
        for known in self.prepared.records:
            if known.model is model:
                return model
            if known.bare is model:
                return model if evaluation_mode else known.model
        spread = self.verify_device_map(model)
        from orc.runtime.weights.quantization.scheme import refuse_to_spread, refuse_to_train

        if not evaluation_mode:
            refuse_to_train(model)
        ctx = self.ctx
        if spread and ctx.distributed and not evaluation_mode:
            raise ValueError(
                "a model that a device map spreads over several devices cannot be trained by several processes: load "
                "it without device_map, or start one process"
            )
        place = self._placing(device_placement) and not spread
        request = Request(
            strategy=ctx.config.strategy,
            evaluation=evaluation_mode,
            options={"ddp": self.options.ddp, "fsdp": ctx.fsdp_plugin, **self._handlers()},
            placement=place,
            mixed_precision=self.precision.name,
        )
        if is_sharded(model):
            follow_mesh(model, ctx)
        applied = chosen(model, ctx, request)
        refuse_to_spread(model, (parallelizer.name for parallelizer in applied))
        if place and not is_sharded(model) and not any(parallelizer.places_parameters for parallelizer in applied):
            model = move(model, ctx.device)
        model = self._in_precision(model, request)
        model = compile_model(apply_all(applied, model, ctx, request), self.dynamo)
        record = described(model, applied)
        for parallelizer in applied:
            if isinstance(parallelizer, ChecksGradients) and not evaluation_mode:
                self._look_once(parallelizer, record.bare)
        self.prepared.add_model(record)
        for optimizer in self.prepared.optimizers:  # it may have been prepared before
            follow(optimizer.optimizer)
        return model

    def _look_once(self, parallelizer: ChecksGradients, model: nn.Module) -> None:
        """Let *parallelizer* look at the gradients of *model* before an update, until it has seen them."""
        events, kept = self.engine.events, weakref.ref(model)

        def check(optimizer: AcceleratedOptimizer) -> None:
            model = kept()
            if model is None or parallelizer.check_gradients(model, self.ctx):
                events.unsubscribe("before_step", check)

        events.subscribe("before_step", check)

    def converted(self, model: nn.Module) -> nn.Module:
        """Return *model* with the layers of the precision, for an engine that prepares it by itself."""
        request = Request(options={"fsdp": None}, mixed_precision=self.precision.name)
        return self.precision.convert(model, self.ctx, request)

    def _in_precision(self, model: nn.Module, request: Request) -> nn.Module:
        """Return *model* with the layers and the forward of the precision."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        converted = self.precision.convert(inner, self.ctx, request)
        if converted is not inner and model is not inner:
            raise ValueError(
                f"mixed_precision={self.precision.name} replaces the whole model, which the script has wrapped "
                "already: prepare it first, and wrap it then"
            )
        self.precision.wrap(converted, self.ctx.device, self.options.autocast, compiled=compiles(self.dynamo))
        return model if converted is inner else converted

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return a wrapper of *optimizer* that steps with the gradients' synchronisation.

        Args:
            device_placement: whether a loaded state moves to the device; the Accelerator's setting unless given.
        """
        for known in self.prepared.optimizers:
            if optimizer in (known, known.optimizer):
                return known  # type: ignore[no-any-return]
        from orc.runtime.weights.quantization.scheme import refuse_to_optimize

        refuse_to_optimize(
            (parameter for group in optimizer.param_groups for parameter in group["params"]), self.prepared.models
        )
        follow(getattr(optimizer, "optimizer", optimizer))
        prepared = optimizer
        if not isinstance(prepared, AcceleratedOptimizer):
            prepared = AcceleratedOptimizer(
                optimizer,
                self._placing(device_placement),
                self.prepared.scaler,
                gradient=self.ctx.gradient,
                engine=self.engine,
                device=self.ctx.device,
            )
        self.prepared.optimizers.append(prepared)
        self._watching.begin()
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Return a wrapper of *scheduler* that follows its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        for known in self.prepared.schedulers:
            if known.scheduler is scheduler:
                return known  # type: ignore[no-any-return]
        optimizers = self.prepared.optimizers
        own = [o for o in optimizers if scheduler.optimizer in (o, o.optimizer)] or optimizers
        prepared = AcceleratedScheduler(
            scheduler,
            own,
            step_with_optimizer=self.options.step_scheduler_with_optimizer,
            split_batches=self.options.dataloader.split_batches,
            gradient=self.ctx.gradient,
            num_processes=self.ctx.topology.pin_data_share()[1],
        )
        self.prepared.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Return the loader of this process's share of *data_loader*.

        Args:
            device_placement: whether batches come on the device; the Accelerator's setting unless given.
            slice_fn_for_dispatch: how a dispatched batch is cut; `slice_tensors` unless given.
        """
        from orc.runtime.data.prepare import prepare_data_loader

        if any(data_loader is known for known in self.prepared.dataloaders):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            context=self.ctx,
            put_on_device=self._placing(device_placement),
            rng_types=self.options.rng_types,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            **vars(self.options.dataloader),
        )
        if self.ctx.topology.peers > 1:
            prepared.part = batch_cut(self.ctx, self._handlers())
        self._watching.attach(prepared)
        self.prepared.dataloaders.append(prepared)
        return prepared

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return *dl*, as it is: a prepared loader yields this process's piece of every sequence already.

        Transformers' Trainer calls it where DeepSpeed computes sequence parallelism (``sp_size`` above 1).

        Args:
            dl: the prepared loader.
            model: the prepared model.

        Raises:
            ValueError: this Accelerator has not prepared *dl*, whose sequences nobody would cut.
        """
        if self.ctx.topology.size("sp") > 1 and not any(dl is loader for loader in self.prepared.dataloaders):
            raise ValueError(
                f"deepspeed_ulysses_dl_adapter: this {type(dl).__name__} is not prepared, so that every process along "
                "sp would get whole sequences; prepare it first: accelerator.prepare(loader)"
            )
        return dl

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether *model* or a part of it has a device map (``hf_device_map``) with more than one entry."""
        return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())

    def _handlers(self) -> dict[str, Any]:
        config = self.options.parallelism
        return {} if config is None else {**config.handlers, "sp_backend": config.sp_backend}

    def _placing(self, device_placement: bool | None) -> bool:
        return self.options.device_placement if device_placement is None else device_placement
