"""Re-exports under a documented path: ``from orc.runtime.utils.deepspeed import DummyOptim``."""

from __future__ import annotations

from orc.runtime.engine.deepspeed.config import HfDeepSpeedConfig
from orc.runtime.engine.deepspeed.placeholders import DummyOptim, DummyScheduler
from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin
from orc.runtime.engine.deepspeed.plugins import get_active_deepspeed_plugin
from orc.runtime.engine.deepspeed.wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
]
