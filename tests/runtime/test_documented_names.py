"""Every documented name is importable flat, from the helper module, and takes the documented arguments."""

from __future__ import annotations

import inspect

import pytest

import orc.runtime
import orc.runtime.utils

NAMES = {
    "state": "PartialState AcceleratorState GradientState",
    "accelerator": "Accelerator ProjectConfiguration GradientAccumulationPlugin DataLoaderConfiguration",
    "data": "prepare_data_loader skip_first_batches BatchSamplerShard IterableDatasetShard DataLoaderShard "
    "DataLoaderDispatcher DataLoaderAdapter SeedableRandomSampler",
    "stepping": "AcceleratedOptimizer AcceleratedScheduler",
    "file names": "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_NAME SAFE_WEIGHTS_NAME "
    "WEIGHTS_INDEX_NAME SAFE_WEIGHTS_INDEX_NAME",
    "troubleshooting": "DistributedOperationException find_executable_batch_size",
    "handlers": "KwargsHandler AutocastKwargs DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs "
    "TorchDynamoPlugin ProfileKwargs",
    "enums": "DistributedType ComputeEnvironment SageMakerDistributedType DynamoBackend LoggerType PrecisionType "
    "RNGType DDPCommunicationHookType",
    "structures": "concatenate recursively_apply send_to_device slice_tensors listify convert_to_fp32 "
    "convert_outputs_to_fp32 find_batch_size",
    "collectives": "reduce pad_across_processes broadcast broadcast_object_list gather gather_object wait_for_everyone",
    "seeding": "set_seed synchronize_rng_state synchronize_rng_states",
    "precision": "get_grad_scaler get_mixed_precision_context_manager",
    "what is there": "is_bf16_available is_ipex_available is_mps_available is_npu_available is_torch_version "
    "is_torch_xla_available is_xpu_available install_xla",
    "environment": "patch_environment clear_environment set_numa_affinity override_numa_affinity",
    "weights": "calculate_maximum_sizes compute_module_sizes get_balanced_memory get_max_layer_size "
    "load_checkpoint_in_model load_offloaded_weights load_state_dict offload_state_dict retie_parameters "
    "set_module_tensor_to_device extract_model_from_parallel save load init_empty_weights infer_auto_device_map "
    "BnbQuantizationConfig load_and_quantize_model",
    "logging": "get_logger",
    "local SGD": "LocalSGD",
    "trackers": "GeneralTracker on_main_process TensorBoardTracker WandBTracker CometMLTracker AimTracker "
    "MLflowTracker ClearMLTracker DVCLiveTracker TrackioTracker SwanLabTracker",
}
FLAT = sorted(name for names in NAMES.values() for name in names.split())


@pytest.mark.parametrize("name", FLAT)
def test_a_documented_name_is_importable(name):
    flat = getattr(orc.runtime, name)
    assert getattr(orc.runtime.utils, name) is flat
    assert name in orc.runtime.__all__


# Methods and attributes of an Accelerator, with the documented arguments in their order; None: an attribute.
MEMBERS = {
    "accumulate": "models",
    "autocast": "autocast_handler",
    "backward": "loss",
    "check_trigger": "",
    "clear": "objects",
    "clip_grad_norm_": "parameters max_norm norm_type",
    "clip_grad_value_": "parameters clip_value",
    "device": None,
    "distributed_type": None,
    "end_training": "",
    "free_memory": "objects",
    "gather": "tensor",
    "gather_for_metrics": "input_data use_gather_object",
    "get_state_dict": "model unwrap",
    "get_tracker": "name unwrap",
    "init_trackers": "project_name config",
    "is_last_process": None,
    "is_local_main_process": None,
    "is_main_process": None,
    "join_uneven_inputs": "joinables even_batches",
    "load_state": "input_dir load_kwargs",
    "local_main_process_first": "",
    "local_process_index": None,
    "log": "values step",
    "lomo_backward": "loss",
    "main_process_first": "",
    "maybe_context_parallel": "buffers buffer_seq_dims no_restore_buffers",
    "mixed_precision": None,
    "no_sync": "model",
    "num_processes": None,
    "on_last_process": "function",
    "on_local_main_process": "function",
    "on_local_process": "function local_process_index",
    "on_main_process": "function",
    "on_process": "function process_index",
    "optimizer_step_was_skipped": None,
    "pad_across_processes": "tensor dim pad_index pad_first",
    "prepare": "args device_placement",
    "prepare_data_loader": "data_loader device_placement slice_fn_for_dispatch",
    "prepare_model": "model device_placement evaluation_mode",
    "prepare_optimizer": "optimizer device_placement",
    "prepare_scheduler": "scheduler",
    "print": "args",
    "process_index": None,
    "profile": "profile_handler",
    "project_dir": None,
    "reduce": "tensor reduction scale",
    "register_for_checkpointing": "objects",
    "register_load_state_pre_hook": "hook",
    "register_save_state_pre_hook": "hook",
    "save": "obj f safe_serialization",
    "save_model": "model save_directory max_shard_size safe_serialization",
    "save_state": "output_dir safe_serialization",
    "set_trigger": "",
    "skip_first_batches": "dataloader num_batches",
    "split_between_processes": "inputs apply_padding",
    "state": None,
    "step": None,
    "sync_gradients": None,
    "trackers": None,
    "trigger_sync_in_backward": "model",
    "unscale_gradients": "optimizer",
    "unwrap_model": "model keep_fp32_wrapper keep_torch_compile",
    "use_distributed": None,
    "verify_device_map": "model",
    "wait_for_everyone": "",
    "set_breakpoint": "",
    "check_breakpoint": "",
}


@pytest.fixture(scope="module")
def accelerator():
    return orc.runtime.Accelerator(cpu=True)


@pytest.mark.parametrize("name", MEMBERS)
def test_an_accelerator_has_the_documented_member(accelerator, name):
    member, arguments = getattr(accelerator, name), MEMBERS[name]
    if arguments is not None:
        parameters = [*inspect.signature(member).parameters]
        assert parameters[: len(arguments.split())] == arguments.split()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (
            "prepare_data_loader",
            "dataloader device=None num_processes=None process_index=None split_batches=False put_on_device=False "
            "rng_types=None dispatch_batches=None even_batches=True slice_fn_for_dispatch=None "
            "use_seedable_sampler=False data_seed=None non_blocking=False use_stateful_dataloader=False "
            "torch_device_mesh=None",
        ),
        ("skip_first_batches", "dataloader num_batches=0"),
        (
            "prepare_pippy",
            "model split_points='auto' no_split_module_classes=None example_args=() example_kwargs=None "
            "num_chunks=None gather_output=False",
        ),
        ("BatchSamplerShard", "batch_sampler num_processes=1 process_index=0 split_batches=False even_batches=True"),
        (
            "IterableDatasetShard",
            "dataset batch_size=1 drop_last=False num_processes=1 process_index=0 split_batches=False",
        ),
        ("AcceleratedOptimizer", "optimizer device_placement=True scaler=None"),
        ("AcceleratedScheduler", "scheduler optimizers step_with_optimizer=True split_batches=False"),
        ("LocalSGD", "accelerator model local_sgd_steps=8 enabled=True"),
        ("get_logger", "name log_level=None"),
        ("set_seed", "seed device_specific=False deterministic=False"),
        ("find_executable_batch_size", "function=None starting_batch_size=128"),
        ("broadcast", "tensor from_process=0"),
        ("pad_across_processes", "tensor dim=0 pad_index=0 pad_first=False"),
        ("reduce", "tensor reduction='mean' scale=1.0"),
        ("gather", "tensor"),
        ("gather_object", "object"),
        ("broadcast_object_list", "object_list from_process=0"),
        ("send_to_device", "tensor device non_blocking=False skip_keys=None"),
        ("concatenate", "data dim=0"),
        ("slice_tensors", "data tensor_slice process_index=None num_processes=None"),
    ],
)
def test_a_documented_function_takes_the_documented_arguments(name, arguments):
    parameters = inspect.signature(getattr(orc.runtime, name)).parameters
    found = [
        key if parameter.default is inspect.Parameter.empty else f"{key}={parameter.default!r}"
        for key, parameter in parameters.items()
    ]
    assert found[: len(arguments.split())] == arguments.split()
