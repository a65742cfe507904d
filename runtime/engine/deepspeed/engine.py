"""Training with DeepSpeed: the model, its optimizer, schedule and batch size become one engine of that library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from orc.runtime.core.config import PRECISIONS
from orc.runtime.core.context import RunContext
from orc.runtime.core.prepared import Prepared, PreparedOptimizer
from orc.runtime.engine.deepspeed import library, sequences
from orc.runtime.engine.deepspeed.placeholders import DummyOptim, DummyScheduler
from orc.runtime.engine.deepspeed.rules import Facts, check_combination, filled
from orc.runtime.engine.deepspeed.states import EngineStates, consolidated
from orc.runtime.engine.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from orc.runtime.engine.library import LibraryEngine
from orc.runtime.parallel import refuse_compression, refuse_unserved
from orc.runtime.parallel.compile import compiles
from orc.runtime.parallel.precision.forward import cast_inputs
from orc.runtime.parallel.records import described
from orc.runtime.train.normalize import Count
from orc.runtime.train.stale import refuse_stale
from orc.runtime.weights.quantization.scheme import refuse_to_spread, refuse_to_train

if TYPE_CHECKING:
    from orc.runtime.core.options import Options
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
    from orc.runtime.train.engine import Preparing

_LATER = (
    "with DeepSpeed, prepare the model in the same call as its optimizer: accelerator.prepare(model, optimizer, ...)"
)


class DeepSpeed(LibraryEngine):
    """Backward, updates, clipping and states of one run that DeepSpeed trains."""

    name = "deepspeed"

    def __init__(self, ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> None:
        library.deepspeed()  # what is missing is said before anything is prepared
        library.open_group_of_one(ctx)
        super().__init__(ctx, options, prepared)
        self.own_state = EngineStates(self.prepared, ctx.world_size)
        self._warned = False

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The plug-in in force."""
        plugin: DeepSpeedPlugin = self.ctx.library.active
        return plugin

    # ---- preparing

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing
    ) -> Sequence[Any]:
        """Prepare all *objects*: loaders as always, and one engine of the model, its optimizer and its schedule.

        Raises:
            ValueError: several models, an optimizer without its model, or objects that do not fit the configuration.
        """
        if any(place is not None for place in placement):
            raise ValueError(
                "prepare(device_placement=...) is not possible with DeepSpeed, which places what it trains"
            )
        result = list(objects)
        models = [i for i, item in enumerate(objects) if isinstance(item, nn.Module) and not self._known(item)]
        optimizers = [i for i, item in enumerate(objects) if _is_optimizer(item)]
        schedulers = [i for i, item in enumerate(objects) if isinstance(item, LRScheduler | DummyScheduler)]
        for index, item in enumerate(objects):
            if isinstance(item, DataLoader):
                result[index] = preparation.prepare_data_loader(item)
        if len(models) > 1:
            raise ValueError(
                f"{len(models)} models in one prepare(): DeepSpeed trains one per call; for a second one select its "
                "plug-in and prepare it by itself"
            )
        if not models:
            if optimizers:
                raise ValueError(_LATER)
            for index in schedulers:
                result[index] = preparation.prepare_scheduler(objects[index])
            return result
        optimizer = objects[optimizers[0]] if optimizers else None
        scheduler = objects[schedulers[0]] if schedulers else None
        plugin = self.plugin
        refuse_unserved(self.ctx, ("sp",), by="DeepSpeed")
        refuse_compression(self.ctx, preparation.options.ddp, self.name)
        check_combination(plugin, [objects[i] for i in optimizers], [objects[i] for i in schedulers])
        loaders = [one for one in result if hasattr(one, "total_batch_size")] or self.prepared.dataloaders
        model = objects[models[0]]
        if optimizer is not None:
            refuse_stale(optimizer, [model], [optimizer])
        refuse_to_train(model)
        ways = {"library": self.title, "library in shards": f"{self.title}'s ZeRO stage 3"}
        refuse_to_spread(model, list(ways) if plugin.zero_stage_of() == 3 else ["library"], ways)
        attention = sequences.check(model, plugin, self.ctx, preparation.options.parallelism)
        filled(plugin, self._facts(model, optimizer, scheduler, loaders))
        if optimizer is not None:
            model = preparation.converted(model)
        groups = None if attention is None else sequences.apply(model, self.ctx, attention)
        engine, made = self._initialize(plugin, model, optimizer, scheduler, groups)
        if compiles(preparation.dynamo):
            options = preparation.dynamo.to_kwargs()
            engine.compile(backend=options.pop("backend", "inductor"), compile_kwargs=options)
        self.prepared.add_model(described(engine))
        result[models[0]] = engine
        if optimizer is None:
            return result
        ours = DeepSpeedOptimizerWrapper(
            engine.optimizer, engine=engine, gradient=self._gradient, trainer=self, original=optimizer
        )
        result[optimizers[0]] = preparation.prepare_optimizer(ours)
        if isinstance(scheduler, DummyScheduler):
            result[schedulers[0]] = DeepSpeedSchedulerWrapper(made, ours, gradient=self._gradient)
            self.prepared.schedulers.append(result[schedulers[0]])
        elif scheduler is not None:
            result[schedulers[0]] = preparation.prepare_scheduler(scheduler)
        return result

    def _known(self, model: nn.Module) -> bool:
        return any(model is known for known in self.prepared.models)

    def _facts(self, model: nn.Module, optimizer: Any, scheduler: Any, loaders: Iterable[Any]) -> Facts:
        size = self.ctx.topology.data_size
        batches = [loader.total_batch_size // size for loader in loaders if (loader.total_batch_size or 0) >= size]
        steps = self._gradient.num_steps
        return Facts(size, batches, steps, getattr(model, "config", None), optimizer, scheduler)

    def _initialize(
        self, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any, groups: Any
    ) -> tuple[Any, Any]:
        """Return DeepSpeed's engine and the schedule it made; *groups*: its ``mpu``, of sequences in pieces."""
        deepspeed = library.deepspeed()
        stage = plugin.get_value("zero_optimization.stage", 0)
        if optimizer is None and stage != 3:
            raise ValueError(
                f"a model without an optimizer is for inference, which DeepSpeed does with ZeRO stage 3; the stage is "
                f"{stage}. To train, {_LATER[len('with DeepSpeed, ') :]}"
            )
        config = dict(plugin.deepspeed_config)
        arguments: dict[str, Any] = {"model": model, "config": config}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            arguments["optimizer"] = optimizer
            config.setdefault("zero_allow_untested_optimizer", True)
            config.setdefault("zero_force_ds_cpu_optimizer", False)
        else:
            for section in ("optimizer", "scheduler"):
                config.pop(section, None)
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        sequences.forget()
        if groups is not None:
            arguments["mpu"] = groups
        plugin.set_moe_leaf_modules(model)
        library.refuse_unusable(config.get("zero_optimization") or {})
        try:
            engine, _, _, made = deepspeed.initialize(**arguments)
        except (AssertionError, ValueError, TypeError) as error:  # what its own checks object to, on all ranks
            raise ValueError(f"DeepSpeed refuses what is prepared: {error}") from error
        if groups is not None:
            sequences.average(engine)
        if optimizer is not None:
            self._gradient.num_steps = engine.gradient_accumulation_steps()
        if PRECISIONS[self.ctx.config.mixed_precision] == "bf16":
            cast_inputs(engine.module, torch.bfloat16)
        return engine, made

    # ---- training

    @property
    def wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The engine that trains, that of the optimizer prepared last; `None` before, and after `free_memory`."""
        for optimizer in reversed(self.prepared.optimizers):
            if isinstance(optimizer, DeepSpeedOptimizerWrapper):
                return optimizer.wrapped
        return None

    def _training(self) -> DeepSpeedEngineWrapper:
        wrapped = self.wrapped
        if wrapped is None:
            raise ValueError(f"nothing is prepared for training: {_LATER}")
        return wrapped

    def backward(self, loss: Tensor, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """Compute gradients of *loss*; at the end of an accumulation window also update.

        Raises:
            ValueError: *normalize_by* is given, or nothing is prepared for training.
        """
        if normalize_by is not None:
            raise ValueError("backward(normalize_by=...) is not possible with DeepSpeed, which divides by itself")
        self._training().backward(loss, sync_gradients=self._gradient.sync_gradients, **kwargs)
        for tell in self.events.on_backward:
            tell(loss, False)

    def step(self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Count the update that `backward` made."""
        engine = self._training().engine
        optimizer.count(engine.was_step_applied())
        return None

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the gradients' norm before DeepSpeed clipped them by ``gradient_clipping`` of its configuration."""
        wrapped = self._training()
        clips = wrapped.engine.gradient_clipping()
        if clips != max_norm and not self._warned:
            self._warned = True
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm}) has no effect with DeepSpeed, whose configuration says "
                f"gradient_clipping {clips}: set DeepSpeedPlugin(gradient_clipping={max_norm})",
                stacklevel=3,
            )
        norm = wrapped.get_global_grad_norm()
        for tell in self.events.on_clip:
            tell(norm)
        return norm

    # ---- states

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*; with ZeRO-3 gathered in the precision of training, on rank 0 alone.

        Raises:
            ValueError: gathering is not switched on.
        """
        engine = next((known for known in self.prepared.models if known is model), None)
        if engine is None:
            return super().model_state(model, unwrap=unwrap)
        return consolidated(engine)


def _is_optimizer(item: Any) -> bool:
    return isinstance(item, Optimizer | DummyOptim) and not isinstance(item, DeepSpeedOptimizerWrapper)
