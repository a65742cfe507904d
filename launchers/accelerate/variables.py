"""Environment variables that bring the values of documented options to the script."""

from __future__ import annotations

from collections.abc import Sequence

from orc.launchers.accelerate.keys import OPTIONS
from orc.launchers.accelerate.merge import Values
from orc.launchers.errors import LaunchError
from orc.runtime.core import fp8_settings
from orc.runtime.core.config import ConfigError, to_env
from orc.runtime.core.deepspeed_keys import KEYS, OF_LAUNCHER


def variables(values: Values) -> dict[str, str]:
    """Return the environment variables that bring *values* to the script. Raises `LaunchError`."""
    settings = {
        option.setting: value
        for name, value in values.found.items()
        if (option := OPTIONS[name]).setting is not None and value is not None
    }
    if values.on("use_fsdp"):
        settings["fsdp"] = values.of_group("fsdp")
    if values.on("use_deepspeed"):
        steps = values.get("gradient_accumulation_steps")
        own = {**values.of_group("deepspeed"), "gradient_accumulation_steps": steps}
        settings["deepspeed"] = {name: own[name] for name in KEYS if name in own and name not in OF_LAUNCHER}
    if values.on("use_megatron_lm"):
        settings["megatron"] = values.of_group("megatron")
    try:
        env = to_env(settings)
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    for name, value in values.found.items():
        option = OPTIONS[name]
        if option.setting is not None and option.variable is not None and option.group != "tpu":
            env[option.variable] = str(value).lower() if isinstance(value, bool) else str(value)
    if values.on("use_parallelism_config"):
        env[str(OPTIONS["use_parallelism_config"].variable)] = "true"
        env |= {str(OPTIONS[name].variable): str(value) for name, value in values.of_group("parallelism").items()}
    env |= fp8_settings.variables(values.of_group("fp8"))
    for name in ("num_cpu_threads_per_process", "mpirun_ccl", "role"):
        if values.get(name) is not None:
            env[str(OPTIONS[name].variable)] = str(values.get(name))
    if values.on("enable_cpu_affinity"):
        env["ACCELERATE_CPU_AFFINITY"] = "1"
    if values.get("gpu_ids") not in (None, [], ["all"]):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(values.get("gpu_ids"))
    return env | pairs(values.get("env", ()))


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` texts as a mapping. Raises `LaunchError`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"--env takes NAME=VALUE, not {text!r}")
        found[name] = value
    return found
