"""`PartialState` and `AcceleratorState`: read-only views of the process and of the training settings."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orc.runtime.core.context import RunContext, current_context, peek_context, reset_default
from orc.runtime.core.errors import ContextError
from orc.runtime.core.process_control import ProcessControl
from orc.runtime.core.state import GradientState, View

if TYPE_CHECKING:
    import torch

    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
    from orc.runtime.engine.deepspeed.plugins import DeepSpeedPlugins
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

__all__ = ["AcceleratorState", "GradientState", "PartialState"]


class PartialState(View, ProcessControl):
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
