"""Settings of sharded data parallelism as texts: the documented keys, variables and values. Torch-free.

The launch layer turns flags and ``runtime.fsdp`` of a job file into ``FSDP_*`` variables with `variables`; the plug-in
(`orc.runtime.parallel.fsdp_plugin`) reads these with `from_environment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orc.runtime.core.parsing import one_of, read_mapping, read_variables, truth, variable_text

USE_FSDP = "ACCELERATE_USE_FSDP"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
# The stage of DeepSpeed's ZeRO that shards the same; HYBRID_SHARD is stage 3 of ZeRO++ with
# ``zero_hpz_partition_size`` = GPUs per node, and HYBRID_SHARD_ZERO2 has no counterpart.
ZERO_STAGES: Mapping[str, int | None] = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": None,
}

strategy, wrap_policy = one_of(*STRATEGIES), one_of(*WRAP_POLICIES)
prefetch, state_dict_type = one_of(*PREFETCHES), one_of(*STATE_DICT_TYPES)


def version(value: Any) -> int:
    """Return 1 or 2. Raises `ValueError`."""
    if str(value).strip() not in ("1", "2"):
        raise ValueError("expected 1 or 2")
    return int(value)


def reshard(value: Any) -> bool | str:
    """Return a truth value (version 2) or the name of a sharding strategy (version 1). Raises `ValueError`."""
    try:
        return truth(value)
    except ValueError:
        return strategy(value)


def class_names(value: Any) -> list[str]:
    """Return class names from a comma-separated text or a list. Raises `ValueError` where there is none."""
    texts = value.split(",") if isinstance(value, str) else list(value)
    names = [str(text).strip() for text in texts]
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError("expected names of classes, separated by commas")
    return names


def count(value: Any) -> int:
    """Return a whole number of at least 0. Raises `ValueError`."""
    try:
        number = int(float(value)) if isinstance(value, (str, float)) else int(value)
    except (TypeError, OverflowError):
        raise ValueError("expected a whole number") from None
    if isinstance(value, bool) or number < 0 or number != float(value):
        raise ValueError("expected a whole number of at least 0")
    return number


@dataclass(frozen=True, repr=False, eq=False)
class Setting:
    """Setting: its key without ``fsdp_``, its parser, its description, the field of the plug-in and its variable."""

    key: str
    parse: Callable[[Any], Any]
    doc: str
    field: str
    variable: str
    also: str | None = None  # another documented spelling of the key
    versions: tuple[int, ...] = (1, 2)


def _setting(key: str, parse: Callable[[Any], Any], doc: str, field: str = "", also: str = "", **more: Any) -> Setting:
    """Return a setting, which gives its name to its field and variable where they are not called otherwise."""
    variable = more.pop("variable", f"FSDP_{key.upper()}")
    return Setting(key, parse, doc, field or key, variable, also or None, **more)


# fmt: off
SETTINGS: dict[str, Setting] = {setting.key: setting for setting in (
    _setting("version", version, "1 (FullyShardedDataParallel) or 2 (fully_shard).", "fsdp_version"),
    _setting("sharding_strategy", strategy,
             "Sharding strategy: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD, 4 HYBRID_SHARD, 5 HYBRID_SHARD_ZERO2."),
    _setting("reshard_after_forward", reshard,
             "Version 2: free the gathered parameters after forward (true) or after backward (false)."),
    _setting("offload_params", truth, "Keep parameters and gradients in CPU memory (true or false).", "cpu_offload"),
    _setting("auto_wrap_policy", wrap_policy,
             "Modules that become units: 1 TRANSFORMER_BASED_WRAP, 2 SIZE_BASED_WRAP, 3 NO_WRAP."),
    _setting("transformer_layer_cls_to_wrap", class_names,
             "Classes of these modules, separated by commas (BertLayer,BertEmbeddings); case matters.",
             "transformer_cls_names_to_wrap", "transformer_cls_to_wrap", variable="FSDP_TRANSFORMER_CLS_TO_WRAP"),
    _setting("min_num_params", count, "Smallest number of parameters of a unit, with SIZE_BASED_WRAP."),
    _setting("backward_prefetch_policy", prefetch,
             "Version 1: when backward gathers the next unit: 1 BACKWARD_PRE, 2 BACKWARD_POST, 3 NO_PREFETCH.",
             "backward_prefetch", "backward_prefetch", variable="FSDP_BACKWARD_PREFETCH", versions=(1,)),
    _setting("forward_prefetch", truth,
             "Gather the next unit while this one computes (true or false); for static graphs."),
    _setting("state_dict_type", state_dict_type,
             "Form of checkpoints: 1 FULL_STATE_DICT, 2 LOCAL_STATE_DICT, 3 SHARDED_STATE_DICT."),
    _setting("use_orig_params", truth,
             "Version 1: keep the parameters of the model, for optimizers made before and mixed requires_grad.",
             versions=(1,)),
    _setting("cpu_ram_efficient_loading", truth,
             "Only rank 0 has the weights before the model is prepared (true or false)."),
    _setting("sync_module_states", truth,
             "Give every rank the parameters and buffers of rank 0 (true or false)."),
    _setting("activation_checkpointing", truth,
             "Recompute activations in backward instead of keeping them (true or false)."),
)}
# fmt: on
_SPELLINGS = {name: setting for setting in SETTINGS.values() for name in (setting.key, setting.also) if name}


def find(name: Any) -> Setting | None:
    """Return the setting of a documented key, with or without ``fsdp_``."""
    return _SPELLINGS.get(str(name).removeprefix("fsdp_"))


def normalise(values: Any) -> dict[str, Any]:
    """Return the checked settings of a mapping with documented keys, with or without ``fsdp_``, by key.

    ``None`` means unset. Raises `ValueError` for an unknown key (with the nearest), a bad value or a contradiction.
    """
    parsers = {name: (setting.key, setting.parse) for name, setting in _SPELLINGS.items()}
    normal = read_mapping(values, parsers, "{version: 2, reshard_after_forward: true}", "fsdp_")
    check_together({SETTINGS[key].field: value for key, value in normal.items()})
    return normal


def check_together(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` for parsed values, by field of the plug-in, that exclude each other."""
    number, after = fields.get("fsdp_version") or 1, fields.get("reshard_after_forward")
    named = fields.get("sharding_strategy")
    if number == 1 and isinstance(after, bool):
        raise ValueError(
            f"reshard_after_forward={after} belongs to version 2: set fsdp_version=2, or give a sharding_strategy"
        )
    if number == 2 and isinstance(after, str):
        raise ValueError(f"reshard_after_forward={after} belongs to version 1: version 2 takes true or false")
    if named is not None and after is not None:
        meant = reshards(named) if number == 2 else named
        if meant != after:
            raise ValueError(f"sharding_strategy={named} contradicts reshard_after_forward={after}: give one of them")
    if number == 2 and named == "NO_SHARD":
        raise ValueError("sharding_strategy=NO_SHARD: version 2 always shards; leave FSDP out to train replicas (DDP)")
    if number == 2 and fields.get("state_dict_type") == "LOCAL_STATE_DICT":
        raise ValueError("state_dict_type=LOCAL_STATE_DICT belongs to version 1; version 2 has FULL and SHARDED")


def reshards(named: str) -> bool:
    """Return ``reshard_after_forward`` of version 2 for a sharding strategy of version 1."""
    return named in ("FULL_SHARD", "HYBRID_SHARD")


def variables(values: Any) -> dict[str, str]:
    """Return the environment variables that carry *values* (see `normalise`) and turn FSDP on."""
    texts = {SETTINGS[key].variable: variable_text(value) for key, value in normalise(values).items()}
    return {USE_FSDP: "true"} | texts


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the parsed values of *env* by field of the plug-in. Raises `ValueError` that names the variable."""
    return read_variables(env, ((setting.field, setting.variable, setting.parse) for setting in SETTINGS.values()))
