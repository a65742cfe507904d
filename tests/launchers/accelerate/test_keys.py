"""The table of documented options of `accelerate launch`."""

from __future__ import annotations

import subprocess
import sys

from orc.launchers.accelerate.keys import CONFIG_KEYS, FLAGS, GROUPS, OPTIONS, PARADIGMS

# The flags of the documentation, by its sections.
DOCUMENTED = """
config_file module no_python debug quiet cpu multi_gpu tpu ipex mixed_precision num_processes num_machines
num_cpu_threads_per_process enable_cpu_affinity use_deepspeed use_fsdp use_megatron_lm use_xpu gpu_ids same_network
machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts monitor_interval
tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16 deepspeed_config_file zero_stage
offload_optimizer_device offload_param_device offload_optimizer_nvme_path gradient_accumulation_steps gradient_clipping
zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_offload_params fsdp_min_num_params
fsdp_sharding_strategy fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch_policy
fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
fsdp_sync_module_states fsdp_activation_checkpointing megatron_lm_tp_degree megatron_lm_pp_degree
megatron_lm_num_micro_batches megatron_lm_sequence_parallelism megatron_lm_recompute_activations
megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping fp8_backend fp8_use_autocast_during_eval fp8_margin
fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level
aws_access_key_id aws_secret_access_key
"""
KEYS = """
compute_environment distributed_type debug downcast_bf16 machine_rank main_process_ip main_process_port
main_training_function mixed_precision num_machines num_processes rdzv_backend same_network tpu_env tpu_use_cluster
tpu_use_sudo use_cpu command_file commands dynamo_backend gpu_ids tpu_name tpu_zone ipex_config.ipex
mpirun_config.mpirun_ccl mpirun_config.mpirun_hostfile fsdp_config.fsdp_sharding_strategy
fp8_config.amax_compute_algorithm fp8_config.amax_history_length fp8_config.backend fp8_config.opt_level
megatron_lm_config.megatron_lm_tp_degree deepspeed_config.zero_stage deepspeed_config.gradient_accumulation_steps
base_job_name ec2_instance_type iam_role_name image_uri profile py_version pytorch_version region transformers_version
additional_args
"""


def test_every_documented_flag_and_key_is_in_the_table() -> None:
    assert [name for name in DOCUMENTED.split() if f"--{name}" not in FLAGS] == []
    assert {"-m", "-q", "-t"} <= set(FLAGS)
    assert [key for key in KEYS.split() if key not in CONFIG_KEYS] == []
    assert set(PARADIGMS.values()) <= set(OPTIONS)


def test_every_row_says_what_it_does_here() -> None:
    for one in OPTIONS.values():
        assert one.group in GROUPS, one.name
        assert one.doc.endswith("."), one.name
        assert one.does, one.name
        assert one.flags or one.key, one.name
        assert one.effect != "job" or one.job, one.name
        assert one.default is None or one.check(one.default) == one.default or one.name == "gpu_ids", one.name


def test_the_table_is_there_without_anything_heavy() -> None:
    code = "import sys, orc.launchers.accelerate.keys; print({'click', 'yaml', 'pydantic', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
