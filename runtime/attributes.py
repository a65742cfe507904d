"""The Accelerator's attributes: read-only views of its options, of the context and of what it has prepared."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from orc.runtime.core.handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from orc.runtime.core.process_control import ProcessControl
from orc.runtime.state import AcceleratorState, GradientState

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from orc.runtime.core.accumulation import Accumulation, GradientRecord
    from orc.runtime.core.events import Events
    from orc.runtime.core.handlers import AutocastKwargs, DistributedDataParallelKwargs, ProfileKwargs
    from orc.runtime.core.options import Options
    from orc.runtime.core.prepared import Prepared
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
    from orc.runtime.engine.deepspeed.wrappers import DeepSpeedEngineWrapper
    from orc.runtime.train.engine import Engine
    from orc.runtime.train.optimizer import AcceleratedOptimizer
    from orc.runtime.train.scheduler import AcceleratedScheduler


class AcceleratorAttributes(ProcessControl):
    """The documented attributes, read from the parts of an Accelerator."""

    _options: Options
    _engine: Engine
    _prepared: Prepared
    _accumulation: Accumulation

    @property
    def _gradient(self) -> GradientRecord:
        return self._accumulation.take_over()

    @property
    def state(self) -> AcceleratorState:
        """The process and the training settings, read-only."""
        return AcceleratorState.of(self.ctx)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plug-in in force; `None` where DeepSpeed does not train."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The configuration of the DeepSpeed plug-in in force; `None` where DeepSpeed does not train."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else plugin.deepspeed_config

    @property
    def is_fsdp2(self) -> bool:
        """`True` if models are sharded by FSDP 2."""
        plugin = self.ctx.fsdp_plugin
        return plugin is not None and plugin.fsdp_version == 2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """`True` if ways of parallelism can be combined: with FSDP 2."""
        return self.is_fsdp2

    @property
    def multi_device(self) -> bool:
        """`True` if several processes train copies or shards on devices of their own."""
        return self.ctx.world_size > 1

    @property
    def data_parallel_rank(self) -> int:
        """Number of this process among those with other copies of the model."""
        return self.ctx.topology.place("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Number of this process among those that hold one copy of the model in shards."""
        return self.ctx.topology.place("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Number of this process among those that share the model's matrices."""
        return self.ctx.topology.place("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Number of this process among those that share sequences."""
        return self.ctx.topology.place("cp")

    @property
    def should_save_model(self) -> bool:
        """`True` if what this process saves of a model is needed: it is not a copy of what another process has."""
        topology = self.ctx.topology
        return topology.place("dp_replicate") == 0 if self.ctx.topology_chosen else self.ctx.is_main

    @property
    def has_lomo_optimizer(self) -> bool:
        """`True` if a prepared optimizer updates during backward: see `Accelerator.lomo_backward`."""
        return any(hasattr(prepared.optimizer, "fused_backward") for prepared in self._prepared.optimizers)

    @property
    def deepspeed_engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """DeepSpeed's engine, once a model is prepared with its optimizer; `None` where DeepSpeed does not train."""
        wrapped: DeepSpeedEngineWrapper | None = getattr(self._engine, "wrapped", None)
        return wrapped

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The mesh of a run whose layout was chosen; `None` where all processes are copies and no mesh was requested.

        The first use makes it, on all processes together.
        """
        return self.ctx.topology.mesh if self.ctx.topology_chosen else None

    @property
    def gradient_state(self) -> GradientState:
        """Accumulation and synchronisation of gradients, read-only."""
        self._accumulation.take_over()
        return GradientState.of(self.ctx)

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return str(self.ctx.config.mixed_precision)

    @property
    def events(self) -> Events:
        """Events of training for subscribers: backward, clip, step, batch and save; see `Events`."""
        return self._engine.events

    @property
    def sync_gradients(self) -> bool:
        """`True` if this step's gradients are synchronised and applied."""
        return self._accumulation.take_over().sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._gradient.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        return self._gradient.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradientAccumulationPlugin(num_steps=value)  # checks it
        self._gradient.num_steps = value

    @property
    def step(self) -> int:
        """Batches counted by `accumulate` since the last forced synchronisation."""
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; `None` unless fp16."""
        return self._engine.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """`True` if an overflow made any optimizer skip its last step."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def profile_handler(self) -> ProfileKwargs:
        """Options of the profiler."""
        return self._options.profile

    @property
    def autocast_handler(self) -> AutocastKwargs:
        """Options of autocast."""
        return self._options.autocast

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """Options of data-parallel training."""
        return self._options.ddp

    @property
    def scaler_handler(self) -> GradScalerKwargs:
        """Options of the gradient scaler."""
        return self._options.scaler

    @property
    def init_handler(self) -> InitProcessGroupKwargs:
        """Options of the process group."""
        return self._options.process_group

    @property
    def device_placement(self) -> bool:
        """`True` if models and batches are moved to the device."""
        return self._options.device_placement

    @property
    def split_batches(self) -> bool:
        """`True` if each batch is split over the processes."""
        return self._options.dataloader.split_batches

    @split_batches.setter
    def split_batches(self, value: bool) -> None:
        self._options.dataloader.split_batches = value

    @property
    def even_batches(self) -> bool:
        """`True` if the last batches are filled up so that all processes get equally many."""
        return self._options.dataloader.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._options.dataloader.even_batches = value

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Options of distribution for the loaders that are prepared from now on; its attributes can be set."""
        return self._options.dataloader

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        loader = self._options.dataloader  # loaders, schedulers and checkpoints hold this one
        for field in dataclasses.fields(loader):
            setattr(loader, field.name, getattr(value, field.name))

    @property
    def use_stateful_dataloader(self) -> bool:
        """`True` if prepared loaders are torchdata `StatefulDataLoader` objects; all have a position."""
        return self._options.dataloader.use_stateful_dataloader

    @use_stateful_dataloader.setter
    def use_stateful_dataloader(self, value: bool) -> None:
        self._options.dataloader.use_stateful_dataloader = value

    @property
    def dispatch_batches(self) -> bool | None:
        """`True` if rank 0 reads the batches of all ranks; `None`: for iterable datasets."""
        return self._options.dataloader.dispatch_batches

    @dispatch_batches.setter
    def dispatch_batches(self, value: bool | None) -> None:
        self._options.dataloader.dispatch_batches = value

    @property
    def non_blocking(self) -> bool:
        """`True` if batches are copied to the device asynchronously."""
        return self._options.dataloader.non_blocking

    @non_blocking.setter
    def non_blocking(self, value: bool) -> None:
        self._options.dataloader.non_blocking = value

    @property
    def use_seedable_sampler(self) -> bool:
        """`True` if random samplers draw from a seed and the epoch."""
        return self._options.dataloader.use_seedable_sampler

    @use_seedable_sampler.setter
    def use_seedable_sampler(self, value: bool) -> None:
        self._options.dataloader.use_seedable_sampler = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """`True` if schedulers advance only when the optimizer steps."""
        return self._options.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[str]:
        """Generators that loaders align at the start of a pass."""
        return list(self._options.rng_types)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Folders and options of checkpoints and logs."""
        return self._options.project

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of checkpoints and logs."""
        return self._options.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of logs."""
        return self._options.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self._options.project.iteration

    @property
    def _models(self) -> list[nn.Module]:
        return self._prepared.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._prepared.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._prepared.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._prepared.dataloaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._prepared.custom
