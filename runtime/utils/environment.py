"""Re-exports under a documented path: ``from orc.runtime.utils.environment import override_numa_affinity``."""

from __future__ import annotations

from orc.runtime.core.patching import (
    are_libraries_initialized,
    clear_environment,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)
from orc.runtime.launch.numa import override_numa_affinity, set_numa_affinity

__all__ = [
    "are_libraries_initialized",
    "clear_environment",
    "get_int_from_env",
    "override_numa_affinity",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "purge_accelerate_environment",
    "set_numa_affinity",
    "str_to_bool",
]
