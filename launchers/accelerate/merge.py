"""Values of documented options, put together: a configuration file, over it the environment, over it the flags.

The environment is over the file because a value of the file is dropped where its variable is set; the script reads the
variable itself. `variables` brings the values to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orc.launchers.accelerate.keys import OPTIONS, PARADIGMS, Option
from orc.launchers.errors import LaunchError
from orc.runtime.core import fp8_settings, megatron_keys
from orc.runtime.core.config import ConfigError, to_env
from orc.runtime.core.deepspeed_keys import KEYS, OF_LAUNCHER

_KINDS = ("use_fsdp", "use_deepspeed", "use_megatron_lm")
_HARDWARE = ("cpu", "multi_gpu", "tpu")
# Options of a paradigm, and the switch without which they mean nothing.
NEEDS: Mapping[str, str] = {
    "fsdp": "use_fsdp",
    "deepspeed": "use_deepspeed",
    "megatron": "use_megatron_lm",
    "parallelism": "use_parallelism_config",
}


@dataclass(frozen=True)
class Values:
    """Values by the option's name; *given* are those that flags have set."""

    found: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the option *name*, or *default* where it is not set."""
        value = self.found.get(name)
        return default if value is None else value

    def on(self, name: str) -> bool:
        """Return True where the switch *name* is on."""
        return bool(self.found.get(name))

    def of_group(self, group: str) -> dict[str, Any]:
        """Return the values of a group of options."""
        return {name: value for name, value in self.found.items() if OPTIONS[name].group == group}


def merge(flags: Mapping[str, Any], file: Mapping[str, Any], env: Mapping[str, str], where: str = "") -> Values:
    """Return the values that hold.

    Args:
        flags: what the command line says, by the option's name; `None` is not said.
        file: the same of a configuration file, which *where* names.
        env: the environment.

    Raises:
        LaunchError: values that exclude each other, or that nothing here can do: with what to write into a job file.
    """
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    found = _of_file(given, file, env)
    found.update(given)
    _check_together(found, given)
    for name, value in found.items():
        option = OPTIONS[name]
        if option.effect in ("refused", "job") and not option.says_nothing(value):
            _refuse(option, where if name not in given else "")
    values = Values(found, frozenset(given))
    precision = _precision(found, given, env)
    _check_fp8(values, precision)
    _check_megatron(values, precision)
    return values


def trains_with_deepspeed(flags: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
    """Return True where DeepSpeed is chosen: by a flag, or by the file and no flag chooses another."""
    if any(flags.get(name) for name in _KINDS):
        return bool(flags.get("use_deepspeed"))
    return PARADIGMS.get(str(file.get("distributed_type"))) == "use_deepspeed"


def _of_file(given: Mapping[str, Any], file: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a file that neither the environment nor the choice of another paradigm overrules."""
    if file.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise LaunchError(
            "the configuration file is one of Amazon SageMaker, where a job runs and no process of this machine",
            hint="`orc config convert FILE` makes a job of it; --config_file names another file.",
        )
    kind = PARADIGMS.get(str(file.get("distributed_type")))
    found = dict(file)
    rivals = _KINDS if kind in _KINDS else _HARDWARE
    if kind is not None and not any(given.get(name) for name in rivals):
        found[kind] = True
    if file.get("distributed_type") == "MULTI_CPU" and not any(given.get(name) for name in _HARDWARE):
        found["cpu"] = True
    if any(name.startswith("parallelism_config_") and value not in (None, 1) for name, value in found.items()):
        found["use_parallelism_config"] = True
    if given.get("cpu"):
        found.pop("multi_gpu", None)
        found.pop("gpu_ids", None)
    chosen = {**found, **given}
    for name in list(found):
        option = OPTIONS[name]
        idle = (switch := NEEDS.get(option.group)) is not None and not chosen.get(switch)
        idle = idle or (option.group == "fp8" and _precision(chosen, given, env) != "fp8")
        if option.group == "sagemaker" or idle or found[name] is None or _is_set(option, env):
            del found[name]
    return found


def _precision(found: Mapping[str, Any], given: Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Return the precision of the script: that of the flags, else of the environment, else of the file."""
    said = (env.get(name) for name in ("ORC_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"))
    chosen = given.get("mixed_precision") or next(filter(None, said), None) or found.get("mixed_precision")
    return str(chosen or "no").lower()


def _check_fp8(values: Values, precision: str) -> None:
    settings = values.of_group("fp8")
    if precision != "fp8":
        if settings:
            flag = next(iter(settings)).replace("_", "-")
            raise LaunchError(f"--{flag} has no effect without --mixed-precision fp8")
        return
    try:
        own = fp8_settings.normalise(settings)
        fp8_settings.check_with(own, cpu=values.on("cpu"), deepspeed=values.on("use_deepspeed"))
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _check_megatron(values: Values, precision: str) -> None:
    if not values.on("use_megatron_lm"):
        return
    total, machines = values.get("num_processes"), values.get("num_machines") or 1
    try:
        megatron_keys.check_with(
            values.of_group("megatron"),
            precision=precision,
            accumulation=int(values.get("gradient_accumulation_steps") or 1),
            processes=total if isinstance(total, int) and machines == 1 else None,
        )
    except ValueError as error:
        raise LaunchError(f"--use_megatron_lm: {error}") from None


def _is_set(option: Option, env: Mapping[str, str]) -> bool:
    names = (option.variable, f"ORC_{option.setting.upper()}" if option.setting else None)
    return any(name in env for name in names if name is not None)


def _check_together(found: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    def on(name: str) -> bool:
        return bool(found.get(name))

    for first, second in (
        ("cpu", "multi_gpu"),
        ("cpu", "tpu"),
        ("cpu", "use_xpu"),
        ("multi_gpu", "tpu"),
        ("use_fsdp", "use_deepspeed"),
        ("use_fsdp", "use_megatron_lm"),
        ("use_deepspeed", "use_megatron_lm"),
        ("use_parallelism_config", "use_megatron_lm"),
        ("module", "no_python"),
    ):
        if on(first) and on(second):
            raise LaunchError(f"{OPTIONS[first].flag} and {OPTIONS[second].flag} exclude each other")
    if on("cpu") and found.get("gpu_ids") not in (None, ["all"]):
        raise LaunchError("--cpu and --gpu_ids exclude each other")
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        if name in given:
            raise LaunchError(f"--{name} has no effect without a configuration file of Amazon SageMaker")
    for name in given:
        option = OPTIONS[name]
        switch = NEEDS.get(option.group)
        if switch and not on(switch) and option.effect == "done":
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} has no effect without {OPTIONS[switch].flag.replace('_', '-')}")


def _refuse(option: Option, where: str) -> None:
    name = option.key if where and option.key else option.flag
    hint = f"In a job file: {option.job}. `orc submit` runs it." if option.effect == "job" and option.job else ""
    raise LaunchError(f"{name} cannot be done by orc launch: {option.does.rstrip('.')}", where=where, hint=hint)


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
