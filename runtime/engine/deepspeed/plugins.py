"""The DeepSpeed plug-ins of a process: several have names, one is in force. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from orc.runtime.core.deepspeed_keys import USE
from orc.runtime.core.parsing import truth
from orc.runtime.engine.deepspeed.config import AUTO
from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin

if TYPE_CHECKING:
    from orc.runtime.core.accumulation import GradientRecord


@dataclass
class DeepSpeedPlugins:
    """Plug-ins by name, in order; the first is in force until another one is selected."""

    engine: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    distributed_type: ClassVar[str] = "DEEPSPEED"
    last_is_main: ClassVar[bool] = False

    named: dict[str, DeepSpeedPlugin]
    active: DeepSpeedPlugin = field(init=False)

    def __post_init__(self) -> None:
        self.select(next(iter(self.named)))

    def get(self, name: str) -> DeepSpeedPlugin:
        """Return the plug-in *name*. Raises `ValueError` when there is none."""
        if name not in self.named:
            raise ValueError(f"there is no DeepSpeed plug-in {name!r}; there are {', '.join(map(repr, self.named))}")
        return self.named[name]

    def select(self, name: str) -> None:
        """Put the plug-in *name* in force. Raises `ValueError` when there is none."""
        chosen = self.get(name)
        for plugin in self.named.values():
            plugin.deselect()
        self.active = chosen
        chosen.select(_from_accelerator_state=True)

    def apply_accumulation(self, gradient: GradientRecord) -> None:
        """Bring the plug-in's number of batches per optimizer step into force, unless it is ``auto``."""
        steps = self.active.get_value("gradient_accumulation_steps", AUTO)
        if steps != AUTO:
            gradient.num_steps = int(steps)

    def agreed(self) -> Mapping[str, Any]:
        """Return the configuration in force."""
        return self.active.deepspeed_config


_UNNAMED = "default"


def plugins_of(single: Any, several: Any, env: Mapping[str, str] | None = None) -> DeepSpeedPlugins | None:
    """Return the plug-ins of the arguments ``deepspeed_plugin`` and ``deepspeed_plugins``, or of the environment.

    Raises:
        ValueError: both are given and differ, or there is no plug-in in the dictionary.
        TypeError: something else than plug-ins.
    """
    if single is not None and several is not None and single is not several:
        raise ValueError("deepspeed_plugin and deepspeed_plugins are the same argument: give one of them")
    given = several if single is None else single
    if given is None:
        text = (os.environ if env is None else env).get(USE, "")
        try:
            wanted = truth(text)
        except ValueError as error:
            raise ValueError(f"{USE}={text!r}: {error}") from None
        given = DeepSpeedPlugin() if wanted else None
    if given is None:
        return None
    named = dict(given) if isinstance(given, Mapping) else {_UNNAMED: given}
    if not named:
        raise ValueError("deepspeed_plugins is an empty dictionary")
    for name, plugin in named.items():
        if not isinstance(name, str) or not isinstance(plugin, DeepSpeedPlugin):
            raise TypeError(
                "deepspeed_plugin takes a DeepSpeedPlugin or a dictionary of them by name; several plug-ins must stand "
                f"in a dictionary. Given: {name!r}: {type(plugin).__name__}"
            )
    return DeepSpeedPlugins(named)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Return the DeepSpeed plug-in in force. Raises `ValueError` when the run does not use DeepSpeed.

    Args:
        state: the state of the run.
    """
    plugin: DeepSpeedPlugin | None = state.deepspeed_plugin
    if plugin is None:
        raise ValueError("this run has no DeepSpeed plug-in: pass Accelerator(deepspeed_plugin=...)")
    return plugin
