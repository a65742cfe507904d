"""The plug-in in force, for scripts that have the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the DeepSpeed plug-in in force. Raises `ValueError` when the run does not use DeepSpeed.

    Args:
        state: the state of the run.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise ValueError("this run has no DeepSpeed plug-in: pass Accelerator(deepspeed_plugin=...)")
    return plugin
