"""Configuration file, environment and flags of a launch, put together."""

from __future__ import annotations

import re
from typing import Any

import pytest

from orc.launchers.accelerate.merge import merge, variables
from orc.launchers.errors import LaunchError


def test_flags_go_over_the_environment_and_that_over_the_file() -> None:
    file = {"mixed_precision": "bf16", "num_processes": 4, "debug": True, "dynamo_backend": "eager", "machine_rank": 0}
    env = {"ACCELERATE_MIXED_PRECISION": "fp16", "ORC_DYNAMO_BACKEND": "inductor"}
    values = merge({"num_processes": 2, "cpu": None, "tee": None}, file, env)
    assert values.found == {"num_processes": 2, "debug": True, "machine_rank": 0}
    assert values.given == {"num_processes"}
    assert merge({"mixed_precision": "no"}, file, env).get("mixed_precision") == "no"
    assert variables(values) == {"ORC_DEBUG_MODE": "true", "ACCELERATE_DEBUG_MODE": "true"}


def test_the_distributed_type_of_a_file_is_its_flag_unless_flags_choose_another() -> None:
    file = {"distributed_type": "FSDP", "fsdp_version": 2, "fsdp_offload_params": True, "zero_stage": 3}
    values = merge({}, file, {})
    assert variables(values) == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    values = merge({"use_deepspeed": True, "gradient_accumulation_steps": 3}, file, {})
    assert not values.on("use_fsdp")
    found = variables(values)
    assert found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert found["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "3"
    assert not any(name.startswith("FSDP_") for name in found)
    assert merge({}, {"distributed_type": "MULTI_CPU"}, {}).on("cpu")
    assert merge({"cpu": True}, {"distributed_type": "MULTI_GPU", "gpu_ids": ["0"]}, {}).found.get("gpu_ids") is None


def test_settings_of_fp8_reach_the_script_with_its_precision_only() -> None:
    file = {
        "mixed_precision": "fp8",
        "fp8_backend": "TE",
        "fp8_margin": 2,
        "fp8_override_linear_precision": (True,) * 3,
    }
    assert variables(merge({"fp8_margin": 1}, file, {})) == {
        "ORC_MIXED_PRECISION": "fp8",
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_MARGIN": "1",
        "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": "true,true,true",
    }
    assert variables(merge({"mixed_precision": "no"}, file, {})) == {
        "ORC_MIXED_PRECISION": "no",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    assert variables(merge({}, file, {"ACCELERATE_MIXED_PRECISION": "bf16"})) == {}
    assert variables(merge({"fp8_opt_level": "O1"}, {}, {"ORC_MIXED_PRECISION": "fp8"})) == {
        "ACCELERATE_FP8_OPT_LEVEL": "O1"
    }


def test_megatron_lm_reaches_the_script_by_flags_and_by_a_file() -> None:
    file = {"distributed_type": "MEGATRON_LM", "megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": True}
    assert variables(merge({"num_processes": 4, "megatron_lm_pp_degree": 2}, file, {})) == {
        "ACCELERATE_USE_MEGATRON_LM": "true",
        "MEGATRON_LM_TP_DEGREE": "2",
        "MEGATRON_LM_SEQUENCE_PARALLELISM": "true",
        "MEGATRON_LM_PP_DEGREE": "2",
    }


def test_sizes_of_parallelism_reach_the_script() -> None:
    values = merge({"use_parallelism_config": True, "parallelism_config_tp_size": 2, "role": "r"}, {}, {})
    assert variables(values) == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "ROLE_NAME": "r",
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cpu": True, "multi_gpu": True}, "--cpu and --multi_gpu exclude each other"),
        ({"cpu": True, "gpu_ids": ["0"]}, "--cpu and --gpu_ids exclude each other"),
        ({"use_fsdp": True, "use_deepspeed": True}, "--use_fsdp and --use_deepspeed exclude each other"),
        ({"tpu": True, "num_processes": 2}, "In a job file: launcher: xla"),
        ({"tpu_cluster": True}, "In a job file: resources.nodes"),
        (
            {"use_megatron_lm": True, "megatron_lm_recompute_method": "x"},
            "--megatron_lm_recompute_method cannot be done",
        ),
        ({"use_megatron_lm": True, "use_fsdp": True}, "--use_fsdp and --use_megatron_lm exclude each other"),
        ({"megatron_lm_tp_degree": 2}, "has no effect without --use-megatron-lm"),
        ({"use_megatron_lm": True, "megatron_lm_sequence_parallelism": True}, "set tp_degree above 1"),
        ({"use_megatron_lm": True, "gradient_accumulation_steps": 2}, "must be 1 with Megatron-LM"),
        ({"use_megatron_lm": True, "mixed_precision": "fp8"}, "mixed_precision fp8 is not possible with Megatron-LM"),
        ({"use_megatron_lm": True, "megatron_lm_pp_degree": 2, "num_processes": 3}, "needs a multiple of 2 processes"),
        (
            {"mixed_precision": "fp8", "fp8_backend": "TE", "use_deepspeed": True},
            "the back end te of fp8 and DeepSpeed do not go together",
        ),
        ({"mixed_precision": "fp8", "fp8_backend": "TE", "cpu": True}, "computes on NVIDIA GPUs, not on CPUs"),
        (
            {"mixed_precision": "fp8", "fp8_backend": "TE", "fp8_opt_level": "O1"},
            "opt_level belongs to the back end msamp",
        ),
        ({"fp8_backend": "TE"}, "--fp8-backend has no effect without --mixed-precision fp8"),
        ({"aws_access_key_id": "x"}, "--aws_access_key_id has no effect without a configuration file of Amazon"),
        ({"fsdp_version": 2}, "--fsdp-version has no effect without --use-fsdp"),
        ({"parallelism_config_tp_size": 2}, "has no effect without --use-parallelism-config"),
        ({"use_fsdp": True, "fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}, "version 2 always shards"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        variables(merge(flags, {}, {}))


def test_a_file_that_launches_elsewhere_is_refused_and_idle_keys_are_not() -> None:
    with pytest.raises(LaunchError, match="orc config convert"):
        merge({}, {"compute_environment": "AMAZON_SAGEMAKER"}, {})
    refused = {"distributed_type": "MEGATRON_LM", "megatron_lm_recompute_method": "uniform"}
    with pytest.raises(
        LaunchError, match=r"^my\.yaml: megatron_lm_config\.megatron_lm_recompute_method cannot be done"
    ):
        merge({}, refused, {}, "my.yaml")
    idle = {"tpu_cluster": False, "tpu_use_sudo": False, "env": [], "same_network": True, "downcast_bf16": False}
    idle |= {"rdzv_backend": "static", "main_training_function": "main", "fp8_backend": "te", "tpu_name": None}
    assert set(merge({}, idle, {}).found) == set(idle) - {"fp8_backend", "tpu_name"}
