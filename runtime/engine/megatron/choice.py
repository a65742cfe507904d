"""Choosing Megatron-LM for a run: by an argument, by the environment, or by an earlier Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orc.runtime.core.config import resolve
from orc.runtime.core.errors import SettingConflict
from orc.runtime.core.libraries import Library

if TYPE_CHECKING:
    from orc.runtime.core.context import RunContext
    from orc.runtime.core.options import Options
    from orc.runtime.engine.megatron.engine import MegatronLM


class MegatronLibrary(Library):
    """Megatron-LM, as arguments of an Accelerator and the environment ask for it."""

    instead = ". Tensor and pipeline parallelism of Megatron-LM are the plug-in's tp_degree and pp_degree"

    def use(
        self, ctx: RunContext, given: Mapping[str, Any], options: Options, mixed_precision: str | None
    ) -> str | None:
        """Let Megatron-LM train, and lay the ranks out as its plug-in says. See `Library.use`.

        Raises:
            ImportError: megatron-core is missing.
            TypeError: something else than a plug-in is given.
        """
        from orc.runtime.engine.megatron.plugin import MegatronLMPlugin
        from orc.runtime.engine.megatron.rules import check_accumulation, check_run

        asked, there = given.get("megatron_lm_plugin"), ctx.library
        plugin = MegatronLMPlugin() if asked is None else asked
        if not isinstance(plugin, MegatronLMPlugin):
            raise TypeError(f"megatron_lm_plugin is a {type(plugin).__name__}, not a MegatronLMPlugin")
        if there is plugin or (there is not None and there.engine == plugin.engine and asked is None):
            return mixed_precision
        if ctx.configured:
            raise SettingConflict(
                f"this process has an Accelerator {'without' if there is None else 'with another plug-in of'} "
                f"{(there or plugin).title} already: pass the plug-in to the first one, or call "
                "AcceleratorState._reset_state()"
            )
        config = resolve({"mixed_precision": mixed_precision}, os.environ)
        check_run(plugin, ctx.world_size, str(config.mixed_precision))
        accumulation = options.accumulation
        check_accumulation((accumulation.num_steps if accumulation else config.gradient_accumulation_steps) or 1)
        import importlib.util

        if importlib.util.find_spec("megatron") is None:
            raise ImportError("training with Megatron-LM needs the package megatron-core: pip install megatron-core")
        sizes = {"pp": plugin.pp_degree, "dp_replicate": plugin.data_parallel_size or 1, "tp": plugin.tp_degree}
        ctx.set_topology(sizes, by="megatron_lm_plugin")
        ctx.use_library(plugin)
        return mixed_precision

    def engine(self) -> type[MegatronLM]:
        """Return the class of the engine."""
        from orc.runtime.engine.megatron.engine import MegatronLM

        return MegatronLM


LIBRARY = MegatronLibrary(("megatron_lm_plugin",), "ACCELERATE_USE_MEGATRON_LM")
