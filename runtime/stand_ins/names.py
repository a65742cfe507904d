"""The table of the stand-in for ``accelerate``: its modules, and where each of their names comes from.

A name comes from `orc.runtime` under the same name, unless `HERE` says that it is made for the stand-in, or it is one
of `ABSENT`, whose placeholder raises when it is used. Public names of the runtime are found in ``accelerate`` and in
every module of ``accelerate.utils``: releases move them about.
"""

from __future__ import annotations

from functools import cache

import orc.runtime
from orc.runtime.stand_ins.package import VERSION as VERSION

# Names that only programs written for Accelerate ask for, and the module here that has them.
HERE: dict[str, str] = dict.fromkeys((
    "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    "get_module_class_from_name", "get_parameters_from_modules", "is_peft_model", "CustomDtype",
    "default_config_file",
), "orc.runtime.stand_ins.extras")  # fmt: skip

_WHOLE = "Load the whole model with load_checkpoint_in_model and move it to the device, or shard it with FSDP."
_LAUNCH = "Start ranks with `orc launch`."
_QUANTIZE = "Call load_and_quantize_model, which replaces the layers and loads their weights."

# Names that programs import, which the runtime does not have, and what is nearest.
ABSENT: dict[str, str] = {
    "extract_submodules_state_dict": _WHOLE,
    **dict.fromkeys((
        "launch_command", "launch_command_parser", "PrepareForLaunch", "prepare_deepspeed_cmd_env",
        "prepare_multi_gpu_env", "prepare_simple_launcher_cmd_env", "prepare_sagemager_args_inputs", "prepare_tpu",
    ), _LAUNCH),
    "filter_first_and_last_linear_layers": "AORecipeKwargs leaves these as they are by itself.",
    "MegatronEngine": "Train with Accelerator(megatron_lm_plugin=MegatronLMPlugin(...)).",
    "replace_with_bnb_layers": _QUANTIZE,
    "load_config_from_file": "Read such a file with `orc config convert`.",
    "load_accelerator_state": "Call Accelerator.load_state.",
    "save_accelerator_state": "Call Accelerator.save_state.",
    "is_initialized": "PartialState().initialized is always true.",
}  # fmt: skip

_STATE = ("PartialState", "AcceleratorState", "GradientState", "DistributedType", "is_initialized")
_LOADERS = (
    "BatchSamplerShard", "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard", "IterableDatasetShard",
    "SeedableRandomSampler", "prepare_data_loader", "skip_first_batches",
)  # fmt: skip
_BIG_MODELS = (
    "check_device_map", "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model", "attach_layerwise_casting_hooks",
)  # fmt: skip
_HOOK_NAMES = (
    "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "ModelHook", "SequentialHook", "UserCpuOffloadHook",
    "add_hook_to_module", "attach_align_device_hook", "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook", "remove_hook_from_module", "remove_hook_from_submodules",
)  # fmt: skip
_UTILS = (
    "ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils", "imports", "launch",
    "megatron_lm", "memory", "modeling", "offload", "operations", "other", "random", "rich", "torch_xla", "tqdm",
    "transformer_engine", "versions",
)  # fmt: skip
_TRACKERS = tuple(name for name, home in orc.runtime.HOMES.items() if home == "tracking")
_CONFIG = ("default_config_file", "load_config_from_file")

# Every module and the names that it has beside its submodules. `...` stands for every name of utils.
MODULES: dict[str, tuple[str, ...]] = {
    "accelerate": ("...",),
    "accelerate.accelerator": ("Accelerator",),
    "accelerate.big_modeling": _BIG_MODELS,
    "accelerate.checkpointing": ("save", "load", "save_accelerator_state", "load_accelerator_state"),
    "accelerate.commands": (),
    "accelerate.commands.config": _CONFIG,
    "accelerate.commands.config.config_args": _CONFIG,
    "accelerate.commands.launch": ("launch_command", "launch_command_parser"),
    "accelerate.data_loader": _LOADERS,
    "accelerate.hooks": _HOOK_NAMES,
    "accelerate.inference": ("prepare_pippy",),
    "accelerate.launchers": ("notebook_launcher", "debug_launcher"),
    "accelerate.local_sgd": ("LocalSGD",),
    "accelerate.logging": ("get_logger", "MultiProcessAdapter"),
    "accelerate.memory_utils": ("find_executable_batch_size", "release_memory"),
    "accelerate.optimizer": ("AcceleratedOptimizer",),
    "accelerate.parallelism_config": ("ParallelismConfig",),
    "accelerate.scheduler": ("AcceleratedScheduler",),
    "accelerate.state": _STATE,
    "accelerate.test_utils": ("...",),
    "accelerate.test_utils.testing": ("...",),
    "accelerate.tracking": _TRACKERS,
    "accelerate.utils": ("...",),
    **{f"accelerate.utils.{module}": ("...",) for module in _UTILS},
}

PACKAGES = {name.rpartition(".")[0] for name in MODULES} - {""}


@cache
def names_of(module: str) -> frozenset[str]:
    """Return the names that *module* has."""
    own = MODULES[module]
    return frozenset({*orc.runtime.HOMES, *HERE, *ABSENT} if "..." in own else own)


def hint(name: str) -> str:
    """Return the sentence that names what is nearest to the absent *name*."""
    return ABSENT.get(name, "It has no equivalent.")
