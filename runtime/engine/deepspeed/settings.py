"""Settings of the DeepSpeed plug-in: where they come from, and how they meet a configuration file. Pure; torch-free."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from orc.runtime.core.config import PRECISIONS as HALVES
from orc.runtime.core.deepspeed_keys import FIELDS, KEYS
from orc.runtime.engine.deepspeed.config import AUTO, HfDeepSpeedConfig

# The settings that a configuration file can hold as well, and their paths there.
PATHS = {name: key.path for name, key in KEYS.items() if key.path is not None}
PRECISIONS = ("fp16", "bf16")
_WHEN_AUTO = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": False,
}


def given_by_launcher(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment. ``ACCELERATE_CONFIG_DS_FIELDS`` names those that were given."""
    listed = env.get(FIELDS)
    names = None if listed is None else {name.strip() for name in listed.split(",") if name.strip()}
    if names is not None:  # always passed on when there is one
        names |= {"deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names"}
    given: dict[str, Any] = {}
    for name, key in KEYS.items():
        if key.variable is None or (value := env.get(key.variable)) is None or value.strip().lower() in ("", "none"):
            if names is None or name not in names or not name.endswith("_device"):
                continue
            value = "none"
        if names is not None and name not in names:
            continue
        try:
            given[name] = key.parse(value)
        except ValueError as error:
            raise ValueError(f"{key.variable}={value!r}: {error}") from None
    return given


def configuration(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that *values* and the defaults make."""
    zero: dict[str, Any] = {"stage": values.get("zero_stage", 2)}
    for kind in ("optimizer", "param"):
        section = {"device": values.get(f"offload_{kind}_device", "none")}
        if path := values.get(f"offload_{kind}_nvme_path"):
            section["nvme_path"] = path
        zero[f"offload_{kind}"] = section
    zero["stage3_gather_16bit_weights_on_model_save"] = values.get("zero3_save_16bit_model", False)
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": values.get("gradient_accumulation_steps", AUTO),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if values.get("gradient_clipping") is not None:
        config["gradient_clipping"] = values["gradient_clipping"]
    return config


def precision_of(config: HfDeepSpeedConfig) -> str | None:
    """Return the precision that *config* sets explicitly: a section's ``enabled`` that is true, or both are false."""
    enabled = {name: config.get_value(f"{name}.enabled") for name in PRECISIONS}
    chosen = [name for name, value in enabled.items() if value is True]
    if len(chosen) > 1:
        raise ValueError("the DeepSpeed configuration enables fp16 and bf16; enable one of them")
    if chosen:
        return chosen[0]
    return "no" if all(value is False for value in enabled.values()) else None


def meet_file(
    config: HfDeepSpeedConfig,
    given: Mapping[str, Any],
    told: Mapping[str, Any],
    file_from_launcher: bool,
    env: Mapping[str, str],
) -> None:
    """Check settings that stand in the configuration file and elsewhere: the file's are taken.

    Arguments of a plug-in that say something else are told of in a warning. Raises `ValueError` when a launcher or the
    environment does: somebody has asked for two things.

    Args:
        config: the file's content.
        given: arguments of the plug-in.
        told: settings in the environment.
        file_from_launcher: the launcher that made the environment named the file, too: then it was told things twice.
        env: the environment, for the precision.
    """
    explicit = {name: config.get_value(path) for name, path in PATHS.items()}
    explicit = {name: value for name, value in explicit.items() if value is not None and value != AUTO}
    both = [name for name in PATHS if name in explicit and (name in given or name in told)]
    for name in PATHS:
        if name in explicit and name in given and explicit[name] != given[name]:
            warnings.warn(
                f"DeepSpeedPlugin({name}={given[name]!r}) has no effect: the DeepSpeed configuration says "
                f"{PATHS[name]} = {explicit[name]!r}. Leave one of them out",
                stacklevel=4,
            )
    ignored = [name for name in both if name in told and explicit[name] != told[name]]
    if file_from_launcher:
        ignored = ignored or [name for name in both if name in told]
    said = precision_of(config)
    wanted = env.get("ORC_MIXED_PRECISION", env.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
    if not ignored and (said is None or wanted == "no" or HALVES.get(wanted) == said):
        return
    names = both if ignored else []
    names += ["mixed_precision"] if said is not None else []
    raise ValueError(
        "When using `deepspeed_config_file`, the following accelerate config variables will be ignored:\n"
        f"{names}.\n"
        "Please specify them appropriately in the DeepSpeed config file.\n"
        "If you are using an accelerate config file, remove other config variables mentioned in the above "
        "specified list.\n"
        "The easiest method is to create a new config following the questionnaire via `accelerate config`.\n"
        "It will only ask for the necessary config variables when using `deepspeed_config_file`. In a job file, "
        "`orc launch` and DeepSpeedPlugin the same holds: leave them out, or set them to `auto` in the file."
    )


def fill_in(config: HfDeepSpeedConfig, values: Mapping[str, Any]) -> None:
    """Put *values* where *config* has nothing or ``auto``; the rest of what a plug-in decides gets its default."""
    for name, path in PATHS.items():
        current = config.get_value(path)
        if name in values and current in (None, AUTO):
            if current is None and name.startswith("offload") and values[name] == "none":
                continue
            config.set_value(path, values[name])
        elif current == AUTO and name in _WHEN_AUTO:
            config.set_value(path, _WHEN_AUTO[name])
        elif current == AUTO and name.endswith("nvme_path"):
            config.del_config_sub_tree(path)
