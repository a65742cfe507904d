"""DeepSpeed settings that a launcher hands to the ranks: names, variables and how their values read. Torch-free.

`orc launch`, a job's ``deepspeed_config:`` and the plug-in of the training processes share this one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orc.runtime.core.parsing import nearest, number, truth, variable_text, whole

USE = "ACCELERATE_USE_DEEPSPEED"
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"  # names of what the launcher was told, comma-separated
AUTO = "auto"
DEVICES = ("none", "cpu", "nvme")


def or_auto(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the parser of ``auto`` and of what *parse* takes."""
    return lambda value: AUTO if value == AUTO else parse(value)


def clipping(value: Any) -> Any:
    """Parse a gradient norm of at least 0, or ``auto``; ``none`` is `None`."""
    word = value.strip().lower() if isinstance(value, str) else None
    return None if word == "none" else AUTO if word == AUTO else number(0)(value)


def device(value: Any) -> str:
    """Parse ``none``, ``cpu`` or ``nvme``; YAML's null is ``none``."""
    text = "none" if value is None else str(value).strip().lower()
    if text not in DEVICES:
        raise ValueError(f"expected one of {', '.join(DEVICES)}")
    return text


def text(value: Any) -> str:
    """Parse text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected text")
    return value


@dataclass(frozen=True, repr=False, eq=False)
class DeepSpeedKey:
    """DeepSpeed setting: its documented name, its parser, its description, the variable that carries it to the ranks.

    Settings of DeepSpeed's launcher have no variable: they are no business of a rank.
    """

    name: str
    parse: Callable[[Any], Any]
    doc: str
    variable: str | None
    path: str | None = None  # of the same value in a DeepSpeed configuration file


_NAME = "ACCELERATE_DEEPSPEED_"
# fmt: off
KEYS: dict[str, DeepSpeedKey] = {key.name: key for key in (
    DeepSpeedKey("deepspeed_config_file", text, "DeepSpeed configuration file (JSON).", f"{_NAME}CONFIG_FILE"),
    DeepSpeedKey("zero_stage", whole(0, 3), "ZeRO stage: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too.",
                 f"{_NAME}ZERO_STAGE", "zero_optimization.stage"),
    DeepSpeedKey("gradient_accumulation_steps", or_auto(whole(1)), "Batches per optimizer step.",
                 "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
    DeepSpeedKey("gradient_clipping", clipping, "Largest norm of the gradients.", "ACCELERATE_GRADIENT_CLIPPING",
                 "gradient_clipping"),
    DeepSpeedKey("offload_optimizer_device", device, "Place of the optimizer state: none, cpu or nvme.",
                 f"{_NAME}OFFLOAD_OPTIMIZER_DEVICE", "zero_optimization.offload_optimizer.device"),
    DeepSpeedKey("offload_optimizer_nvme_path", text, "Folder of the optimizer state on NVMe.",
                 f"{_NAME}OFFLOAD_OPTIMIZER_NVME_PATH", "zero_optimization.offload_optimizer.nvme_path"),
    DeepSpeedKey("offload_param_device", device, "Place of the parameters: none, cpu or nvme; stage 3 only.",
                 f"{_NAME}OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device"),
    DeepSpeedKey("offload_param_nvme_path", text, "Folder of the parameters on NVMe.",
                 f"{_NAME}OFFLOAD_PARAM_NVME_PATH", "zero_optimization.offload_param.nvme_path"),
    DeepSpeedKey("zero3_init_flag", truth, "Construct models sharded (deepspeed.zero.Init); stage 3 only.",
                 f"{_NAME}ZERO3_INIT"),
    DeepSpeedKey("zero3_save_16bit_model", truth, "Gather the weights for saving; stage 3 only.",
                 f"{_NAME}ZERO3_SAVE_16BIT_MODEL", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    DeepSpeedKey("deepspeed_moe_layer_cls_names", text, "Classes of mixture-of-experts layers, comma-separated.",
                 f"{_NAME}MOE_LAYER_CLS_NAMES"),
    DeepSpeedKey("deepspeed_hostfile", text, "DeepSpeed's file of hosts.", None),
    DeepSpeedKey("deepspeed_exclusion_filter", text, "Hosts to leave out.", None),
    DeepSpeedKey("deepspeed_inclusion_filter", text, "Hosts to use.", None),
    DeepSpeedKey("deepspeed_multinode_launcher", text, "DeepSpeed's launcher for many nodes.", None),
)}
# fmt: on


def check_value(name: str, value: Any) -> Any:
    """Return *value* in the type of the setting *name*. Raises `ValueError`: unknown name, bad value."""
    key = KEYS.get(name)
    if key is None:
        raise ValueError(f"unknown DeepSpeed setting {name!r}{nearest(name, KEYS)}")
    try:
        return key.parse(value)
    except ValueError as error:
        raise ValueError(f"{name} = {value!r}: {error}") from None


# Settings of DeepSpeed's launcher, and what does the same in a job.
OF_LAUNCHER = {
    "deepspeed_hostfile": "it is written from a job's nodes; a cluster of kind ssh can read its hosts from a file",
    "deepspeed_exclusion_filter": "launcher: {kind: deepspeed, options: {launcher: pdsh, exclude: ...}} of a job",
    "deepspeed_inclusion_filter": "launcher: {kind: deepspeed, options: {launcher: pdsh, include: ...}} of a job",
    "deepspeed_multinode_launcher": "launcher: {kind: deepspeed, options: {launcher: pdsh}} of a job",
}


def normalise(values: Any) -> dict[str, Any]:
    """Return *values*, a mapping with the documented keys, each in its key's type; without those that are `None`.

    Raises:
        ValueError: an unknown key, a value it cannot have, or settings of DeepSpeed's launcher.
    """
    if not isinstance(values, Mapping):
        raise ValueError("expected a mapping like {zero_stage: 2, gradient_clipping: 1.0}")
    normal = {str(name): check_value(str(name), value) for name, value in values.items() if value is not None}
    if name := next((name for name in normal if name in OF_LAUNCHER), None):
        raise ValueError(f"{name} belongs to DeepSpeed's launcher: {OF_LAUNCHER[name]}")
    return normal


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that bring *values* (see `normalise`) to the ranks, and switch DeepSpeed on.

    Raises:
        ValueError: as `normalise`.
    """
    env = {USE: "true"}
    given = []
    for name, value in normalise(values).items():
        variable = KEYS[name].variable
        if variable is not None and value != AUTO:  # auto is what is not said
            env[variable] = variable_text(value)
            given.append(name)
    env[FIELDS] = ",".join(given)
    return env
