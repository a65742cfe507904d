"""Choosing DeepSpeed for a run: by an argument, by the environment, or by an earlier Accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from orc.runtime.core.config import resolve
from orc.runtime.core.errors import SettingConflict
from orc.runtime.core.libraries import Library

if TYPE_CHECKING:
    from torch import nn

    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.engine.deepspeed.engine import DeepSpeed


class DeepSpeedLibrary(Library):
    """DeepSpeed, as arguments of an Accelerator and the environment ask for it."""

    takes_layout = True

    def use(
        self, ctx: RunContext, given: Mapping[str, Any], options: Options, mixed_precision: str | None
    ) -> str | None:
        """Let DeepSpeed train; returns *mixed_precision*, or what its configuration says. See `Library.use`."""
        single, several = (given.get(name) for name in self.arguments)
        there = ctx.library_of("deepspeed")
        if there is not None:
            known = list(there.named.values())
            new = [plugin for plugin in (single, several) if plugin is not None]
            flat = [p for plugin in new for p in (plugin.values() if isinstance(plugin, dict) else [plugin])]
            if any(not any(plugin is other for other in known) for plugin in flat):
                raise SettingConflict(
                    "this process has DeepSpeed plug-ins already, which all Accelerators share: pass all of them to "
                    "the first one, as a dictionary"
                )
            return mixed_precision
        if ctx.configured and single is None and several is None:
            return mixed_precision  # the environment of an earlier Accelerator was another one
        from orc.runtime.engine.deepspeed.plugins import plugins_of

        plugins = plugins_of(single, several)
        assert plugins is not None  # something asks for it
        if ctx.configured:
            raise SettingConflict(
                "this process has an Accelerator without DeepSpeed already: pass the plug-in to the first one, or call "
                "AcceleratorState._reset_state()"
            )
        wanted = resolve({"mixed_precision": mixed_precision}, os.environ).mixed_precision
        precision = plugins.active.set_mixed_precision(wanted, explicit=mixed_precision is not None)
        for plugin in plugins.named.values():
            plugin.set_mixed_precision(precision)
        ctx.use_library(plugins)
        return precision

    def engine(self) -> type[DeepSpeed]:
        """Return the class of the engine."""
        from orc.runtime.engine.deepspeed.engine import DeepSpeed

        return DeepSpeed

    def inside(self, model: nn.Module) -> nn.Module | None:
        """Return the module inside an engine of DeepSpeed."""
        if "deepspeed" not in sys.modules:  # there are no engines
            return None
        from orc.runtime.engine.deepspeed.library import is_engine

        return cast("nn.Module", model.module) if is_engine(model) else None

    def problem(self, files: Collection[str]) -> str | None:
        """Return why torch cannot load a checkpoint with *files*, if DeepSpeed wrote it."""
        if any(name.startswith("pytorch_model/") and name.endswith("_states.pt") for name in files):
            return "it was saved by a run with DeepSpeed; convert its weights with zero_to_fp32.py, which is in it"
        return None


LIBRARY = DeepSpeedLibrary(("deepspeed_plugin", "deepspeed_plugins"), "ACCELERATE_USE_DEEPSPEED")
