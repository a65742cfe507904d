"""Choosing Megatron-LM for a run: by an argument, by the environment, or by an earlier Accelerator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from orc.runtime.core.errors import SettingConflict
from orc.runtime.core.parsing import switched_on

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

USE = "ACCELERATE_USE_MEGATRON_LM"
_OTHERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")


def megatron_of(given: Any, others: dict[str, Any]) -> MegatronLMPlugin | None:
    """Return the plug-in that was *given*, or that of the environment; `None` where Megatron-LM does not train.

    Args:
        given: argument ``megatron_lm_plugin`` of the Accelerator.
        others: arguments that ask for another way to train, by name.

    Raises:
        ValueError: settings that cannot be used.
        TypeError: something else than a plug-in.
        SettingConflict: another way to train is asked for, too.
    """
    if given is None and not (os.environ.get(USE) and switched_on(os.environ, USE)):
        return None
    from orc.runtime.engine.megatron.plugin import MegatronLMPlugin

    asked = [f"Accelerator({name}=...)" for name, one in others.items() if one is not None]
    asked += [f"{name}={os.environ[name]}" for name in _OTHERS if switched_on(os.environ, name)]
    if asked:
        mine = f"{USE}={os.environ[USE]}" if given is None else "Accelerator(megatron_lm_plugin=...)"
        raise SettingConflict(
            f"{mine} and {asked[0]} ask for two ways to train one model; choose one. Tensor and pipeline parallelism "
            "of Megatron-LM are the plug-in's tp_degree and pp_degree"
        )
    if given is None:
        return MegatronLMPlugin()
    if not isinstance(given, MegatronLMPlugin):
        raise TypeError(f"megatron_lm_plugin is a {type(given).__name__}, not a MegatronLMPlugin")
    return given


def use_megatron(ctx: RunContext, plugin: MegatronLMPlugin, options: Options, *, first: bool, explicit: bool) -> None:
    """Let Megatron-LM train in *ctx* as *plugin* sets, and lay the ranks out so. Nothing is allocated before.

    Args:
        ctx: the run.
        plugin: the settings.
        options: of the Accelerator.
        first: no other Accelerator of this process has chosen before.
        explicit: the plug-in is an argument, not made from the environment.

    Raises:
        ContextError: the run does not go with it; the same on every rank.
        ImportError: megatron-core is missing.
        SettingConflict: an earlier Accelerator of this process chose otherwise.
    """
    from orc.runtime.engine.megatron.rules import check_accumulation, check_run

    there = ctx.library
    if there is plugin or (there is not None and there.engine == plugin.engine and not explicit):
        return
    if not first:
        raise SettingConflict(
            f"this process has an Accelerator {'without' if there is None else 'with another plug-in of'} "
            f"{(there or plugin).title} already: pass the plug-in to the first one, or call "
            "AcceleratorState._reset_state()"
        )
    check_run(plugin, ctx.world_size, str(ctx.config.mixed_precision))
    steps = ctx.config.gradient_accumulation_steps if options.accumulation is None else options.accumulation.num_steps
    check_accumulation(steps or 1)
    import importlib.util

    if importlib.util.find_spec("megatron") is None:
        raise ImportError("training with Megatron-LM needs the package megatron-core: pip install megatron-core")
    sizes = {"pp": plugin.pp_degree, "dp_replicate": plugin.data_parallel_size or 1, "tp": plugin.tp_degree}
    ctx.set_topology(sizes, by="megatron_lm_plugin")
    ctx.use_library(plugin)
