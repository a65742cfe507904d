"""`PartialState`, `AcceleratorState` and `GradientState`: read-only views of the current context.

All instances of a class show the same state, which is made on first use. ``_reset_state`` forgets it (tests).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.runtime.core.context import PreparedLoader, RunContext, current_context, peek_context, reset_default
from orc.runtime.core.errors import ContextError
from orc.runtime.core.handlers import GradientAccumulationPlugin
from orc.runtime.core.process_control import ProcessControl

if TYPE_CHECKING:
    from typing import Self  # newer than the oldest Python of a rank

    import torch

    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
    from orc.runtime.engine.deepspeed.plugins import DeepSpeedPlugins
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin


class _Shared:
    """Dictionary of the attributes that all instances of a class share; empty while there is no context.

    Libraries look at it (``PartialState._shared_state == {}``) to learn whether this process has been set up.
    """

    def __get__(self, instance: Any, owner: type[_View]) -> dict[str, Any]:
        context = peek_context()
        if context is None or not owner._is_set_up(context):
            return {}
        view = owner.of(context)
        # A context that was closed or never started answers every property but those that need a group.
        return {"_cpu": context.device.type == "cpu"} | {name: getattr(view, name) for name in owner._shown}


class _View:
    __slots__ = ()

    _shared_state = _Shared()
    _shown: tuple[str, ...] = ()

    @classmethod
    def _is_set_up(cls, context: RunContext) -> bool:
        return True

    @classmethod
    def of(cls, ctx: RunContext) -> Self:
        """The view of *ctx*."""
        view = object.__new__(cls)
        object.__setattr__(view, "ctx", ctx)
        return view

    def __getattribute__(self, name: str) -> Any:
        # Dunders and private names are for Python, libraries' checks and this class.
        if not name.startswith("_") and name != "initialized" and object.__getattribute__(self, "ctx").forgotten:
            self._catch_up(name)
        return object.__getattribute__(self, name)

    def _catch_up(self, name: str) -> None:
        """Show the process context that was made since the reset. Raises `AttributeError` where there is none."""
        context = peek_context()
        if context is None or context.forgotten:
            raise AttributeError(
                f"`{type(self).__name__}` object has no attribute `{name}`: its state was reset by "
                f"`{type(self).__name__}._reset_state()`. Make an `Accelerator` or a `PartialState` to set it up again"
            )
        object.__setattr__(self, "ctx", context)

    @property
    def initialized(self) -> bool:
        """`False` after a reset, until the next Accelerator or PartialState."""
        context = object.__getattribute__(self, "ctx")
        return not context.forgotten or peek_context() is not None

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(found := getattr(type(self), name, None), property) and found.fset is not None:
            found.fset(self, value)
            return
        raise AttributeError(f"{type(self).__name__} is read-only; {name} is decided when the process starts")


class PartialState(_View, ProcessControl):
    """Ranks, device and backend of this process. The first instance makes the process context.

    Args:
        cpu: stay on the CPU. Contradicting a context that is on another device raises `ContextError`.
        backend: of the process group.
        timeout: of collectives.
        init_method: the meeting point, instead of MASTER_ADDR and MASTER_PORT.
    """

    __slots__ = ("ctx",)

    _shown: tuple[str, ...] = (
        "distributed_type",
        "num_processes",
        "process_index",
        "local_process_index",
        "device",
        "backend",
        "debug",
    )

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
    ) -> None:
        ctx = current_context(cpu=cpu, backend=backend, timeout=timeout, init_method=init_method)
        check_device(ctx, cpu)
        object.__setattr__(self, "ctx", ctx)

    @property
    def backend(self) -> str | None:
        """The backend of collectives; `None` with one process."""
        return self.ctx.backend

    @property
    def default_device(self) -> torch.device:
        """The device that a process of this machine computes on when nothing else was requested."""
        from orc.runtime.launch.device import default_device

        return default_device()

    @property
    def debug(self) -> bool:
        """`True` if the operands of a collective are compared across the ranks first; a script may set it (value)."""
        return self.ctx.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self.ctx.set_debug(value)

    def set_device(self) -> None:
        """Do nothing: the device was chosen, and made the current one, when the process context was made."""

    def destroy_process_group(self) -> None:
        """Close the process group that the runtime opened."""
        from orc.runtime.launch.process_group import close

        close(self.ctx)

    @staticmethod
    def _reset_state() -> None:
        reset_default()

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """`PartialState` and the training settings.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``; must agree with what is in force already.
        cpu: stay on the CPU.
        options: as for `PartialState`.
    """

    __slots__ = ()

    _shown = (*PartialState._shown, "mixed_precision", "deepspeed_plugins", "fsdp_plugin")

    @classmethod
    def _is_set_up(cls, context: RunContext) -> bool:
        return context.configured

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> None:
        super().__init__(cpu, **options)
        if mixed_precision is not None:
            self.ctx.configure({"mixed_precision": mixed_precision})

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return str(self.ctx.config.mixed_precision)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plug-in in force; `None` where DeepSpeed does not train."""
        plugins = self.ctx.library_of("deepspeed")
        return None if plugins is None else plugins.active

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """All DeepSpeed plug-ins, by name."""
        plugins = self.ctx.library_of("deepspeed")
        return None if plugins is None else dict(plugins.named)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the DeepSpeed plug-in *name*. Raises `ValueError`; `ContextError` without DeepSpeed."""
        return self._deepspeed(name).get(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Put the DeepSpeed plug-in *name* in force; raises as `get_deepspeed_plugin` does."""
        self._deepspeed(name).select(name)

    def _deepspeed(self, name: str) -> DeepSpeedPlugins:
        plugins: DeepSpeedPlugins | None = self.ctx.library_of("deepspeed")
        if plugins is None:
            raise ContextError(
                f"there is no DeepSpeed plug-in {name!r}: this run has none, pass Accelerator(deepspeed_plugins=...)"
            )
        return plugins

    @property
    def fsdp_plugin(self) -> Any:
        """Options of sharded data parallelism; `None` where models are not sharded."""
        return self.ctx.fsdp_plugin

    @property
    def megatron_lm_plugin(self) -> MegatronLMPlugin | None:
        """The Megatron-LM plug-in; `None` where Megatron-LM does not train."""
        plugin: MegatronLMPlugin | None = self.ctx.library_of("megatron")
        return plugin

    @staticmethod
    def _reset_state(reset_partial_state: bool = True) -> None:
        context = peek_context()
        if reset_partial_state:
            reset_default()
        elif context is not None:
            context.unconfigure()

    def __repr__(self) -> str:
        plugin = self.deepspeed_plugin
        more = "" if plugin is None else f"ds_config: {plugin.deepspeed_config}\n"
        return super().__repr__() + f"Mixed precision type: {self.mixed_precision}\n{more}"


class GradientState(_View):
    """Accumulation and synchronisation of gradients, and the loader being iterated."""

    __slots__ = ("ctx",)

    _shown = ("sync_gradients", "dataloader_references", "plugin_kwargs")

    ctx: RunContext

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        """Show the run's state, with the settings of *gradient_accumulation_plugin* if it is given."""
        object.__setattr__(self, "ctx", current_context())
        if gradient_accumulation_plugin is not None:
            self.ctx.gradient.follow(gradient_accumulation_plugin)

    @property
    def sync_gradients(self) -> bool:
        """`True` if this step's gradients are synchronised and applied."""
        return self.ctx.gradient.sync_gradients

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Decide whether the next backward synchronises gradients, and the optimizer steps: for loops that accumulate
        by themselves, instead of with `Accelerator.accumulate`.
        """
        self.ctx.gradient.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        return self.ctx.gradient.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """As given by the plug-in."""
        return self.ctx.gradient.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """`True` if the last batch of a pass always synchronises gradients."""
        return self.ctx.gradient.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """`True` if gradients are synchronised on every batch."""
        return self.ctx.gradient.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Options of accumulation that differ from the defaults of `GradientAccumulationPlugin`."""
        gradient = self.ctx.gradient
        return GradientAccumulationPlugin(
            num_steps=gradient.num_steps,
            adjust_scheduler=gradient.adjust_scheduler,
            sync_with_dataloader=gradient.sync_with_dataloader,
            sync_each_batch=gradient.sync_each_batch,
        ).to_kwargs()

    @property
    def dataloader_references(self) -> list[PreparedLoader | None]:
        """The prepared loaders being iterated, innermost last; `None` stands for the outside."""
        return [None, *self.ctx.gradient.active]

    @property
    def in_dataloader(self) -> bool:
        """`True` while a prepared loader is being iterated."""
        return bool(self.ctx.gradient.active)

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost prepared loader being iterated."""
        return self.ctx.gradient.active[-1] if self.ctx.gradient.active else None

    @property
    def end_of_dataloader(self) -> bool:
        """`True` if the innermost loader being iterated has just yielded its last batch."""
        return self.ctx.gradient.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no duplicates; -1 when none are or it is not the last."""
        return self.ctx.gradient.remainder

    @staticmethod
    def _reset_state() -> None:
        context = peek_context()
        if context is not None:
            context.gradient.reset()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation steps: {self.num_steps}\n"
        )


def check_device(ctx: RunContext, cpu: bool) -> None:
    """Raise `ContextError` when *cpu* contradicts the device of *ctx*."""
    if cpu and ctx.device.type != "cpu":
        raise ContextError(
            f"cpu=True was asked for, but this process already computes on {ctx.device}; ask for it first, or set "
            "ORC_USE_CPU=1"
        )
