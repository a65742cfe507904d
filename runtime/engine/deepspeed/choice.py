"""Choosing DeepSpeed for a run: by an argument, by the environment, or by an earlier Accelerator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import resolve
from orc.runtime.core.errors import SettingConflict

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext


def choose_deepspeed(ctx: RunContext, one: Any, several: Any, mixed_precision: str | None) -> str | None:
    """Let DeepSpeed train in *ctx* if the arguments *one* and *several* of an Accelerator or the environment choose it.

    Returns:
        The precision to ask for: *mixed_precision*, or what DeepSpeed's configuration says.

    Raises:
        ValueError: settings that cannot be used, or contradict each other.
        ContextError: an earlier Accelerator of this process chose otherwise.
    """
    given = one is not None or several is not None
    there = ctx.library_of("deepspeed")
    if there is None:
        if not given and (not os.environ.get("ACCELERATE_USE_DEEPSPEED") or ctx.configured):
            return mixed_precision  # without loading what only DeepSpeed needs
        from orc.runtime.engine.deepspeed.plugins import plugins_of

        plugins = plugins_of(one, several)
        if plugins is None:
            return mixed_precision
        if ctx.configured:
            raise SettingConflict(
                "this process has an Accelerator without DeepSpeed already: pass the plug-in to the first one, or call "
                "AcceleratorState._reset_state()"
            )
        wanted = resolve({"mixed_precision": mixed_precision}, os.environ).mixed_precision
        explicit = mixed_precision is not None
        chosen = plugins.active.set_mixed_precision(wanted, explicit=explicit)
        for plugin in plugins.named.values():
            plugin.set_mixed_precision(chosen)
        ctx.use_library(plugins)
        return chosen
    if given:
        known = list(there.named.values())
        new = [plugin for plugin in (one, several) if plugin is not None]
        flat = [p for plugin in new for p in (plugin.values() if isinstance(plugin, dict) else [plugin])]
        if any(not any(plugin is other for other in known) for plugin in flat):
            raise SettingConflict(
                "this process has DeepSpeed plug-ins already, which all Accelerators share: pass all of them to the "
                "first one, as a dictionary"
            )
    return mixed_precision
