"""`Accelerator`: what a training script talks to. Every method is a guard and a call to the part that does it."""

from __future__ import annotations

import functools
import gc
import operator
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from orc.runtime.attributes import AcceleratorAttributes
from orc.runtime.checkpointing import Checkpointing
from orc.runtime.core.accumulation import AccumulateBlock, Accumulation
from orc.runtime.core.config import resolve
from orc.runtime.core.context import current_context
from orc.runtime.core.errors import OrcRuntimeError
from orc.runtime.core.libraries import chosen, take_arguments
from orc.runtime.core.options import ONE_STEP, gather_options
from orc.runtime.core.parsing import switched_on
from orc.runtime.core.prepared import Prepared
from orc.runtime.launch.process_group import close
from orc.runtime.observe.profiling import Profiling
from orc.runtime.parallel import extract_model_from_parallel
from orc.runtime.parallel.compile import resolve_plugin
from orc.runtime.parallel.precision import precision_for
from orc.runtime.preparing import Preparation
from orc.runtime.tracking.methods import Tracking
from orc.runtime.train.engine import engine_for
from orc.runtime.train.normalize import Count
from orc.runtime.watching import Watching

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.handlers import (
        AutocastKwargs,
        DataLoaderConfiguration,
        GradientAccumulationPlugin,
        KwargsHandler,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from orc.runtime.core.options import Options
    from orc.runtime.core.parallelism import ParallelismConfig
    from orc.runtime.parallel.precision import Precision
    from orc.runtime.tracking.base import GeneralTracker
    from orc.runtime.tracking.selection import Chosen


P = ParamSpec("P")
R = TypeVar("R")


def of(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that is *method* of the attribute *part*, with its signature and documentation."""
    take = operator.attrgetter(part)

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(take(self), *args, **kwargs)

    return call


class Accelerator(AcceleratorAttributes):
    """Prepares models, optimizers, loaders and schedulers for the run this process belongs to.

    Args:
        device_placement: put models and batches on the device.
        split_batches: cut each batch over the processes instead of giving each process whole ones.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; else ``ORC_MIXED_PRECISION``,
            ``ACCELERATE_MIXED_PRECISION``, ``MIXED_PRECISION``.
        gradient_accumulation_steps: batches per optimizer step; when not given the environment (as above), else 1.
        cpu: stay on the CPU.
        dataloader_config: how loaders are distributed.
        rng_types: generators that loaders align over the processes at the start of a pass.
        log_with: experiment trackers: names, `LoggerType` members, trackers of your own, or several; ``all``.
        project_dir: folder of checkpoints and logs.
        project_config: more about that folder.
        gradient_accumulation_plugin: more about accumulation.
        step_scheduler_with_optimizer: `False` when the script steps its scheduler at other times than the optimizer.
        kwargs_handlers: options of autocast, DDP, the gradient scaler and the process group.
        dynamo_backend: compile prepared models with this back end of ``torch.compile``; else ``ORC_DYNAMO_BACKEND``.
        dynamo_plugin: more about compiling.
        deepspeed_plugin: train with DeepSpeed: a `DeepSpeedPlugin`, or several by name; else
            ``ACCELERATE_USE_DEEPSPEED``.
        deepspeed_plugins: the same; the older spelling for several.
        fsdp_plugin: shard models over the processes; else ``ACCELERATE_USE_FSDP`` and ``FSDP_*``.
        torch_tp_plugin: older form of ``ParallelismConfig(tp_size=...)``: a `TorchTensorParallelPlugin`.
        megatron_lm_plugin: train with Megatron-LM, split as a `MegatronLMPlugin` says; else
            ``ACCELERATE_USE_MEGATRON_LM`` and ``MEGATRON_LM_*``.
        parallelism_config: over how many processes each kind of parallelism spreads the run; else
            ``ACCELERATE_USE_PARALLELISM_CONFIG`` and ``PARALLELISM_CONFIG_*``.
        older: spellings of older releases work with a warning; anything else is refused with the nearest name.
            ``downcast_bf16`` is for TPUs: with bf16, float becomes bfloat16 and double float32, instead of both
            bfloat16; it has no effect elsewhere.

    Raises:
        LaunchError: this process was launched in a way that cannot work.
        ConfigError: a setting in arguments or environment is invalid.
        ContextError: a setting contradicts the one of an earlier Accelerator of this process.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = ONE_STEP,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Iterable[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        **older: Any,
    ) -> None:
        downcast_bf16 = older.pop("downcast_bf16", None)
        given = take_arguments(older) | {
            "deepspeed_plugin": deepspeed_plugin,
            "deepspeed_plugins": deepspeed_plugins,
            "megatron_lm_plugin": megatron_lm_plugin,
        }
        options = gather_options(
            device_placement=device_placement,
            split_batches=split_batches,
            gradient_accumulation_steps=gradient_accumulation_steps,
            dataloader_config=dataloader_config,
            fsdp_plugin=_sharding(fsdp_plugin),
            parallelism=_parallelism(parallelism_config, torch_tp_plugin),
            rng_types=rng_types,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            more=older,
            accelerator=Accelerator,
        )
        self.parallelism_config = options.parallelism
        others = {"fsdp_plugin": fsdp_plugin, "parallelism_config": self.parallelism_config}
        library = chosen(given | others, os.environ)
        ctx = current_context(cpu=cpu, **options.process_group.to_dict())
        self._tracking = Tracking(ctx, options.project, log_with)
        first = not ctx.configured
        try:
            if library is not None:
                mixed_precision = library.use(ctx, given, options, mixed_precision)
            config = ctx.configure({"mixed_precision": mixed_precision, "downcast_bf16": downcast_bf16})
            if self.parallelism_config is not None:
                sharded = options.fsdp_plugin is not None or ctx.library is not None
                self.parallelism_config.lay_out(ctx, sharded=sharded)
            precision = precision_for(config.mixed_precision, options.recipe)
            ctx.compute.choose_precision(config.mixed_precision, config.downcast_bf16)
            if options.fsdp_plugin is not None:
                ctx.shard(options.fsdp_plugin)
            precision.check(ctx)
            self.dynamo_plugin = resolve_plugin(options.dynamo, config)
        except (ValueError, TypeError, OrcRuntimeError):
            if first:
                ctx.unconfigure()  # the next Accelerator may ask for something else
            raise
        if first and config.seed is not None:
            from orc.runtime.train.seeding import set_seed

            set_seed(config.seed)
        ctx.gradient.serve(None)
        ctx.gradient.num_steps = (config if first else resolve({}, os.environ)).gradient_accumulation_steps
        if not ctx.gradient.active:  # a loop that was left in the middle of a window is over
            ctx.gradient.sync_gradients = True
        if options.accumulation is not None:
            ctx.gradient.follow(options.accumulation)
        if ctx.library is not None:
            ctx.library.apply_accumulation(ctx.gradient)
        flattened = ctx.fsdp_plugin is not None and ctx.fsdp_plugin.fsdp_version == 1 and ctx.distributed
        self._assemble(ctx, options, precision, flattened)

    def _assemble(self, ctx: RunContext, options: Options, precision: Precision, flattened: bool = False) -> None:
        scaler = precision.scaler(ctx.device, options.scaler, flattened=flattened)
        engine = engine_for(ctx, options, Prepared(scaler=scaler))
        self.ctx, self._options = ctx, options
        self._engine, self._prepared = engine, engine.prepared
        self._accumulation = Accumulation(ctx.gradient, engine.no_sync if ctx.distributed else None)
        self._checkpointing = Checkpointing(engine, options)
        self._watching = Watching(engine, self._checkpointing)
        self._precision = precision
        self._preparing = Preparation(engine, options, self.dynamo_plugin, self._watching, precision)
        self._trigger = False

    def __getstate__(self) -> dict[str, Any]:
        # What it was made with, for a worker process that gets a function which mentions it. Models and trackers stay.
        self._accumulation.take_over()
        plain = {name: getattr(self, name) for name in ("parallelism_config", "dynamo_plugin")}
        return {**plain, "ctx": self.ctx, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ctx, options = state["ctx"], state["options"]
        self.parallelism_config, self.dynamo_plugin = state["parallelism_config"], state["dynamo_plugin"]
        self._tracking = Tracking(ctx, options.project, None)
        self._assemble(ctx, options, precision_for(ctx.config.mixed_precision, options.recipe))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of something that holds the Accelerator belongs to the same run.
        return self

    # ---- preparing

    @property
    def _preparation(self) -> Preparation:
        self._accumulation.take_over()  # DeepSpeed and Megatron-LM read how many batches make a step
        return self._preparing

    prepare = of("_preparation", Preparation.prepare)
    prepare_model = of("_preparation", Preparation.prepare_model)
    prepare_optimizer = of("_preparation", Preparation.prepare_optimizer)
    prepare_scheduler = of("_preparation", Preparation.prepare_scheduler)
    prepare_data_loader = of("_preparation", Preparation.prepare_data_loader)
    verify_device_map = of("_preparation", Preparation.verify_device_map)
    deepspeed_ulysses_dl_adapter = of("_preparation", Preparation.deepspeed_ulysses_dl_adapter)

    @property
    def fp8_backend(self) -> str | None:
        """The library that computes in fp8: ``TE``, ``MSAMP`` or ``AO``; `None` in any other precision."""
        return getattr(self._precision, "backend", None)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model as the script wrote it.

        Args:
            keep_fp32_wrapper: leave the conversion of the outputs to float32 in place.
            keep_torch_compile: leave a compiled model compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared and reset `step`; returns as many `None` as there are *objects* to overwrite."""
        self._prepared.clear()
        self._accumulation.step = 0
        self._engine.forget()
        self._gradient.active.clear()
        self._gradient.current, self._gradient.sync_gradients = None, True
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Return the same as `free_memory`.

        Args:
            objects: what is to be dropped; as many `None` come back.
        """
        return self.free_memory(*objects)

    # ---- training

    def backward(self, loss: Tensor, *, normalize_by: Count | None = None, **kwargs: Any) -> None:
        """Instead of ``loss.backward()``: with the loss divided by the accumulation count, and scaled with fp16.

        Args:
            loss: a mean over the batch; with *normalize_by* a sum.
            normalize_by: how many items *loss* is the sum over (tokens, say): a number, or a tensor with one element.
                The step's gradient is then that of the sum over all batches of the accumulation window and all
                processes, divided by their number of items, however these are distributed. One all-reduce per
                window.
            kwargs: of ``Tensor.backward``.

        Raises:
            ValueError: only some batches of a window came with *normalize_by*, or it is not a number of at least 0.
        """
        self._accumulation.take_over()
        self._engine.backward(loss, normalize_by, **kwargs)

    def lomo_backward(self, loss: Tensor, learning_rate: float | None = None) -> None:
        """Backward and update in one, for prepared optimizers that do so (LOMO: they have ``fused_backward``).

        Args:
            loss: the loss of this process's batch.

        Raises:
            ValueError: there is no *learning_rate*, or no such optimizer.
        """
        if learning_rate is None:
            raise ValueError("lomo_backward needs the learning_rate of this step")
        fused = [
            optimizer.optimizer
            for optimizer in self._prepared.optimizers
            if hasattr(optimizer.optimizer, "fused_backward")
        ]
        if not fused:
            raise ValueError("lomo_backward: no prepared optimizer updates during backward; use backward() and step()")
        self._accumulation.take_over()
        self._engine.fused_backward(loss, fused, learning_rate)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """A block around one batch's forward, backward and step that makes gradient accumulation happen.

        Args:
            models: the models whose gradients accumulate.
        """
        return AccumulateBlock(self._accumulation, models)

    def no_sync(self, model: nn.Module | None = None, *more: nn.Module) -> AbstractContextManager[Any]:
        """A block around forward and backward in which the gradients of *model* (and *more*) are not synchronised.

        Without a model: of all prepared ones.
        """
        if model is not None and not more:
            return self._engine.no_sync(model)
        block = ExitStack()
        for prepared_model in self._prepared.models if model is None else (model, *more):
            block.enter_context(self._engine.no_sync(prepared_model))
        return block

    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> AbstractContextManager[Any]:
        """A block in which processes may run out of batches at different times: those that did answer the others.

        For models trained by DDP on several processes; elsewhere it has no effect. Other collectives (`gather`, say)
        must not be called inside by some processes only.

        Args:
            joinables: the prepared models, and optimizers that are `torch.distributed.algorithms.Joinable`.
            even_batches: overrides ``even_batches`` of the prepared map-style loaders inside the block. Joining happens
                where batches are not even.
        """
        from orc.runtime.train.join import join_uneven_inputs

        own = self._accumulation, joinables, even_batches, self.even_batches
        return join_uneven_inputs(self.ctx, *own, self._prepared.dataloaders, self._engine.normalizer)

    def maybe_context_parallel(
        self,
        buffers: list[Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """A block around one step in which this process computes its piece of every sequence (``cp_size`` above 1).

        Put forward and backward inside, and make a new one for each step. Without context parallelism it does nothing.

        Args:
            buffers: the tensors with sequences (inputs, labels, positions), which are cut in place; afterwards they are
                whole again.
            buffer_seq_dims: for each, the dimension along which its sequences go.
            no_restore_buffers: those that may stay cut.

        Raises:
            ValueError: a buffer cannot be cut: it has no such dimension, or its sequences are not a multiple of twice
                ``cp_size``.
            ContextError: inside, for attention that is not causal SDPA without a mask.
        """
        if self.ctx.topology.size("cp") == 1:
            return nullcontext()
        from orc.runtime.parallel.context import context_parallel

        return context_parallel(self.ctx, self.parallelism_config, buffers, buffer_seq_dims, no_restore_buffers)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A block whose backward synchronises, after several forwards under `no_sync`.

        Args:
            model: a prepared model.
        """
        return self._engine.sync_in_backward(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block in mixed precision, or under the options of *autocast_handler*."""
        return self._precision.autocast(self.device, autocast_handler or self._options.autocast)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Scale gradients down to a total norm of *max_norm*; returns their norm before, over all of them.

        Args:
            parameters: those whose gradients are scaled.
            norm_type: the p of the norm; ``inf`` is the largest element.
        """
        return self._engine.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp gradients to ``[-clip_value, clip_value]``.

        Args:
            parameters: those whose gradients are clamped.
        """
        self._engine.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, of all prepared optimizers or of *optimizer* (or a list); fp16 only."""
        if optimizer is not None:
            optimizer = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
            optimizer = [getattr(given, "optimizer", given) for given in optimizer]
        self._engine.unscale(optimizer)

    # ---- collectives

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, joined along the first dimension; any nesting.

        Args:
            tensor: a tensor, or any nesting of them; the same structure on all processes.
        """
        from orc.runtime.collectives.collectives import gather

        return gather(tensor, ctx=self.ctx)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return `gather` without the samples that were repeated to fill up the last batch.

        Args:
            input_data: tensors in any nesting, one row per sample; or other objects.
            use_gather_object: send pickled objects: tensors of different sizes, anything. A list or tuple has one
                element per sample.
        """
        from orc.runtime.collectives.metrics import gather_for_metrics

        return gather_for_metrics(input_data, use_gather_object, ctx=self.ctx)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensors of all processes added (``sum``), averaged (``mean``) or left alone (``none``).

        Args:
            tensor: a tensor, or any nesting of them; the same structure on all processes.
            reduction: ``sum``, ``mean`` or ``none``.
            scale: what results are multiplied by on XLA devices; it has no meaning elsewhere.
        """
        from orc.runtime.collectives.collectives import reduce

        return reduce(tensor, reduction, scale, ctx=self.ctx)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return tensors padded along *dim* to the largest size on any process.

        Args:
            tensor: a tensor, or any nesting of them.
            pad_index: the value to pad with.
            pad_first: pad at the beginning instead of the end.
        """
        from orc.runtime.collectives.collectives import pad_across_processes

        return pad_across_processes(tensor, dim, pad_index, pad_first, ctx=self.ctx)

    def set_trigger(self) -> None:
        """Raise the flag on this process; see `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process raised the flag since the last check, the same answer on all; lower it."""
        from orc.runtime.collectives.collectives import any_process

        raised, self._trigger = self._trigger, False
        return any_process(raised, ctx=self.ctx)

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger

    # ---- checkpoints

    get_state_dict = of("_checkpointing", Checkpointing.get_state_dict)
    save = of("_checkpointing", Checkpointing.save)
    save_model = of("_checkpointing", Checkpointing.save_model)
    save_state = of("_checkpointing", Checkpointing.save_state)
    load_state = of("_checkpointing", Checkpointing.load_state)
    resume = of("_checkpointing", Checkpointing.resume)
    wait_for_checkpoint = of("_checkpointing", Checkpointing.wait_for_checkpoint)
    register_for_checkpointing = of("_checkpointing", Checkpointing.register_for_checkpointing)
    register_save_state_pre_hook = of("_checkpointing", Checkpointing.register_save_state_pre_hook)
    register_load_state_pre_hook = of("_checkpointing", Checkpointing.register_load_state_pre_hook)
    skip_first_batches = of("_checkpointing", Checkpointing.skip_first_batches)

    # ---- watching

    count_tokens = of("_watching", Watching.count_tokens)
    profile = of("_profiling", Profiling.profile)

    @functools.cached_property
    def _profiling(self) -> Profiling:
        return Profiling(self.ctx, self._options)

    @property
    def preempted(self) -> bool:
        """Return whether a stop was requested and this is the step at which all processes have agreed to stop.

        Left alone, the run saves a checkpoint at the next step boundary and ends with status 75. A script that wants to
        do something before checks this after each optimizer step, on all processes.
        """
        return self._watching.boundary.preempted

    # ---- trackers

    init_trackers = of("_tracking", Tracking.init_trackers)
    log = of("_tracking", Tracking.log)
    get_tracker = of("_tracking", Tracking.get_tracker)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` has started on this process; elsewhere than on rank 0 usually none."""
        return self._tracking.trackers

    @property
    def log_with(self) -> list[Chosen]:
        """The trackers that were requested, as far as their libraries are installed."""
        return self._tracking.log_with

    # ---- the end

    def end_training(self) -> None:
        """Finish the trackers and close the process group, where the runtime opened it; call it last."""
        try:
            self._tracking.finish()
        finally:
            self._watching.close()
            close(self.ctx)


def _sharding(given: Any) -> Any:
    """Return the plug-in that was *given*, or that of the environment where it turns FSDP on; else `None`."""
    if given is None and not switched_on(os.environ, "ACCELERATE_USE_FSDP"):
        return None
    from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin

    if given is not None and not isinstance(given, FullyShardedDataParallelPlugin):
        raise TypeError(f"fsdp_plugin is a {type(given).__name__}, not a FullyShardedDataParallelPlugin")
    return FullyShardedDataParallelPlugin() if given is None else given


def _parallelism(given: ParallelismConfig | None, plugin: Any) -> ParallelismConfig | None:
    if given is None and plugin is None and not os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None  # most runs: the module need not be loaded
    from orc.runtime.core.parallelism import parallelism_of

    return parallelism_of(given, os.environ, plugin)
