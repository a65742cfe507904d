"""Training with Megatron-LM: the model and its optimizer are re-made as that library's, split over the processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from orc.runtime.core.context import RunContext
from orc.runtime.core.prepared import Prepared, PreparedOptimizer
from orc.runtime.engine.library import LibraryEngine
from orc.runtime.engine.megatron import library
from orc.runtime.engine.megatron.plugin import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin
from orc.runtime.engine.megatron.rules import (
    check_accumulation,
    check_model,
    global_batch_size,
    shape_of,
    virtual_stages,
)
from orc.runtime.parallel import refuse_compression
from orc.runtime.parallel.compile import compiles
from orc.runtime.parallel.records import described
from orc.runtime.train.normalize import Count

if TYPE_CHECKING:
    from orc.runtime.core.options import Options
    from orc.runtime.engine.megatron.model import MegatronModel
    from orc.runtime.engine.megatron.optimizer import MegatronOptimizer
    from orc.runtime.train.engine import Preparing

_TOGETHER = "prepare the model in the same call as its optimizer: accelerator.prepare(model, optimizer, ...)"


class MegatronLM(LibraryEngine):
    """Backward, updates, clipping and states of one run that Megatron-LM trains."""

    name = "megatron"

    def __init__(self, ctx: RunContext, options: Options | None = None, prepared: Prepared | None = None) -> None:
        library.megatron()  # what is missing is said before anything is prepared
        super().__init__(ctx, options, prepared)
        self._warned = False

    @property
    def plugin(self) -> MegatronLMPlugin:
        """The plug-in in force."""
        plugin: Any = self.ctx.library
        return plugin  # type: ignore[no-any-return]

    # ---- preparing

    def prepare(
        self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing
    ) -> Sequence[Any]:
        """Prepare all *objects*: loaders of whole batches, and Megatron-LM's model, optimizer and schedule.

        Raises:
            ValueError: objects that Megatron-LM cannot train, or that belong together and came apart.
        """
        self._check(objects, placement, preparation)
        result = list(objects)
        for index, item in enumerate(objects):
            if isinstance(item, DataLoader):
                result[index] = self._loader(item, preparation)
        places = [index for index, item in enumerate(objects) if isinstance(item, MegatronLMDummyDataLoader)]
        if places:
            for index, loader in zip(places, self._indexed([objects[index] for index in places]), strict=True):
                result[index] = loader
        model_at = next((i for i, item in enumerate(objects) if self._new_model(item)), None)
        optimizer_at = next((i for i, item in enumerate(objects) if _new_optimizer(item)), None)
        if model_at is not None:
            from orc.runtime.engine.megatron.model import MegatronModel

            given: Any = objects[optimizer_at] if optimizer_at is not None else None
            rates = {} if given is None else _rates(given, objects[model_at])
            seed = library.common_seed(self.ctx)
            library.open_groups(self.ctx, self.plugin, self._pieces(objects[model_at]))
            random = library.Random(self.ctx, seed)
            model = result[model_at] = MegatronModel(objects[model_at], self.ctx, self.plugin, random)
            self.prepared.add_model(described(model))
            if optimizer_at is not None:
                result[optimizer_at] = self._optimizer(given, rates, preparation)
        for index, item in enumerate(objects):
            if isinstance(item, MegatronLMDummyScheduler):
                result[index] = self._schedule(item)
        return result

    def _check(self, objects: Sequence[Any], placement: Sequence[bool | None], preparation: Preparing) -> None:
        self.plugin.refuse_unserved()
        check_accumulation(self._gradient.num_steps)
        if any(place is not None for place in placement):
            raise ValueError(
                "prepare(device_placement=...) is not possible with Megatron-LM, which places what it trains"
            )
        if compiles(preparation.dynamo):
            raise ValueError("torch.compile (dynamo_backend) is not possible with Megatron-LM's model; leave it out")
        refuse_compression(self.ctx, preparation.options.ddp, self.plugin.title)
        models = [item for item in objects if self._new_model(item)]
        optimizers = [item for item in objects if _new_optimizer(item)]
        if len(models) + (self._model is not None and bool(models)) > 1 or len(optimizers) > 1:
            raise ValueError("Megatron-LM trains one model with one optimizer per process")
        if optimizers and not models:
            raise ValueError(f"with Megatron-LM, {_TOGETHER}")
        for item in objects:
            if isinstance(item, LRScheduler):
                raise ValueError(
                    f"{type(item).__name__}: Megatron-LM's optimizer needs its own schedule; prepare a "
                    "MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...)"
                )
            if isinstance(item, MegatronLMDummyScheduler) and not (optimizers or self.prepared.optimizers):
                raise ValueError("MegatronLMDummyScheduler needs its optimizer: prepare it with the optimizer")
        for model in models:
            check_model(self.plugin, model)
        for optimizer in optimizers:
            from orc.runtime.engine.megatron.optimizer import check_optimizer

            check_optimizer(optimizer)

    def _pieces(self, model: Any) -> int:
        layers = self.plugin.num_layers_per_virtual_pipeline_stage
        return virtual_stages(shape_of(model.config).layers, self.plugin.pp_degree, layers)

    def _new_model(self, item: Any) -> bool:
        return isinstance(item, nn.Module) and not any(item is known for known in self.prepared.models)

    def _loader(self, loader: DataLoader[Any], preparation: Preparing) -> Any:
        """Return the prepared loader of whole batches: *loader*'s batch size is that of one micro batch."""
        from orc.runtime.data.prepare import with_batch_size

        plugin = self.plugin
        if preparation.options.dataloader.split_batches:
            raise ValueError("split_batches is not possible with Megatron-LM: a loader's batch_size is one micro batch")
        micro = loader.batch_size
        if micro is None:
            raise ValueError("Megatron-LM needs a DataLoader with a batch_size, that of one micro batch")
        prepared = preparation.prepare_data_loader(with_batch_size(loader, micro * plugin.num_micro_batches))
        choose = min if plugin.is_train_batch_min in (True, "true", "True", "1") else max
        plugin.micro_batch_size = choose(micro, plugin.micro_batch_size or micro)
        plugin.global_batch_size = global_batch_size(
            plugin.micro_batch_size, plugin.num_micro_batches, self.ctx.topology.data_size
        )
        return prepared

    def _indexed(self, placeholders: Sequence[Any]) -> list[Any]:
        """Return the loaders of training, validation and test, as many as there are *placeholders*."""
        from orc.runtime.engine.megatron.indexed import SPLITS, open_loaders

        if len(placeholders) > len(SPLITS):
            raise ValueError(f"MegatronLMDummyDataLoader is prepared for {', '.join(SPLITS)}, once each")
        plugin, topology, seed = self.plugin, self.ctx.topology, library.common_seed(self.ctx)
        made: dict[int, list[Any]] = {}
        for number, placeholder in enumerate(placeholders):
            micro = int(placeholder.dataset_args.get("micro_batch_size") or 1)
            if number == 0:
                plugin.micro_batch_size = micro
                plugin.global_batch_size = global_batch_size(micro, plugin.num_micro_batches, topology.data_size)
            if id(placeholder) not in made:
                made[id(placeholder)] = open_loaders(
                    placeholder.dataset_args,
                    rows=micro * plugin.num_micro_batches,
                    seq_length=plugin.seq_length or 1024,
                    seed=seed,
                    place=topology.data_rank,
                    copies=topology.data_size,
                    begin=plugin.consumed_samples,
                )
        loaders = [made[id(placeholder)][number] for number, placeholder in enumerate(placeholders)]
        self.prepared.custom.extend(loader for loader in loaders if loader is not None)
        return loaders

    def _optimizer(self, given: Optimizer, rates: Mapping[str, Any], preparation: Preparing) -> Any:
        from orc.runtime.engine.megatron.optimizer import MegatronOptimizer
        from orc.runtime.engine.megatron.wrappers import MegatronLMOptimizerWrapper

        model = self._model
        assert model is not None
        scaling, precision = preparation.options.scaler, str(self.ctx.config.mixed_precision)
        made = MegatronOptimizer(model, given, rates, self.plugin, precision, scaling)
        return preparation.prepare_optimizer(MegatronLMOptimizerWrapper(made, gradient=self._gradient, trainer=self))

    def _schedule(self, placeholder: MegatronLMDummyScheduler) -> Any:
        from orc.runtime.engine.megatron.optimizer import schedule
        from orc.runtime.engine.megatron.wrappers import MegatronLMSchedulerWrapper

        optimizer = self.prepared.optimizers[-1]
        made = schedule(placeholder, optimizer.optimizer, self.plugin)
        prepared = MegatronLMSchedulerWrapper(made, optimizer, gradient=self._gradient)
        self.prepared.schedulers.append(prepared)
        return prepared

    # ---- training

    @property
    def _model(self) -> MegatronModel | None:
        """The model that is trained; `None` before `prepare`, and after `free_memory`."""
        from orc.runtime.engine.megatron.model import MegatronModel

        return next((model for model in self.prepared.models if isinstance(model, MegatronModel)), None)

    def _trained(self) -> MegatronModel:
        model = self._model
        if model is None:
            raise ValueError(f"nothing is prepared for training: with Megatron-LM, {_TOGETHER}")
        return model

    def backward(self, loss: Tensor, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """Notify subscribers: the model has computed the gradients of its own loss already.

        Raises:
            ValueError: *loss* is not the one that the model returned, so its gradients are not those computed.
        """
        if normalize_by is not None:
            raise ValueError("backward(normalize_by=...) is not possible with Megatron-LM, which averages by itself")
        if loss is not self._trained().loss:
            raise ValueError(
                "backward: with Megatron-LM the model computes loss and gradients in one; pass the loss that it "
                "returned in training, as it is. A loss of your own belongs into a train step: "
                "MegatronLMPlugin(custom_train_step_class=...)"
            )
        check_accumulation(self._gradient.num_steps)
        for tell in self.events.on_backward:
            tell(loss, False)

    def step(self, optimizer: PreparedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Clip and update; an overflow skips the update.

        Raises:
            ValueError: no gradients: the model was not called in training since the last update.
        """
        model = self._trained()
        if model.loss is None:
            raise ValueError("step: there are no gradients; call the model in training mode first")
        model.loss = None
        megatron: Any = optimizer.optimizer
        done, _ = megatron.step()
        optimizer.count(done)
        return None

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Return the gradients' norm over all processes; the update clips by ``gradient_clipping`` of the plug-in."""
        clips = self.plugin.gradient_clipping
        if (clips != max_norm or norm_type != 2) and not self._warned:
            self._warned = True
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm}) has no effect with Megatron-LM, which clips the L2 norm by "
                f"gradient_clipping {clips}: set MegatronLMPlugin(gradient_clipping={max_norm})",
                stacklevel=3,
            )
        if not self.prepared.optimizers:
            raise ValueError(f"nothing is prepared for training: with Megatron-LM, {_TOGETHER}")
        optimizer: MegatronOptimizer = self.prepared.optimizers[-1].optimizer
        norm = torch.tensor(optimizer.norm())
        for tell in self.events.on_clip:
            tell(norm)
        return norm

    # ---- states

    def model_state(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """The complete state dict of *model*, under the names of the Transformers model; all ranks call it."""
        return dict(model.state_dict())


def _new_optimizer(item: Any) -> bool:
    from orc.runtime.train.optimizer import AcceleratedOptimizer

    return isinstance(item, Optimizer) and not isinstance(item, AcceleratedOptimizer)


def _rates(optimizer: Any, model: nn.Module) -> dict[str, tuple[float, float]]:
    from orc.runtime.engine.megatron.optimizer import rates_by_name

    return rates_by_name(optimizer, model)
