# ruff: noqa
# Written by `make exports` from the table in __init__.py.
"""Public API of the runtime for training scripts: ``from orc.runtime import Accelerator``."""

from orc.runtime import utils as utils
from orc.runtime.accelerator import Accelerator as Accelerator
from orc.runtime.checkpoint.format.layout import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from orc.runtime.checkpoint.format.layout import MODEL_NAME as MODEL_NAME
from orc.runtime.checkpoint.format.layout import OPTIMIZER_NAME as OPTIMIZER_NAME
from orc.runtime.checkpoint.format.layout import RNG_STATE_NAME as RNG_STATE_NAME
from orc.runtime.checkpoint.format.layout import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from orc.runtime.checkpoint.format.layout import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from orc.runtime.checkpoint.format.layout import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from orc.runtime.checkpoint.format.layout import SAMPLER_NAME as SAMPLER_NAME
from orc.runtime.checkpoint.format.layout import SCALER_NAME as SCALER_NAME
from orc.runtime.checkpoint.format.layout import SCHEDULER_NAME as SCHEDULER_NAME
from orc.runtime.checkpoint.format.layout import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from orc.runtime.checkpoint.format.layout import WEIGHTS_NAME as WEIGHTS_NAME
from orc.runtime.checkpoint.merge import merge_fsdp_weights as merge_fsdp_weights
from orc.runtime.checkpoint.saving import load as load
from orc.runtime.checkpoint.saving import save as save
from orc.runtime.collectives.collectives import broadcast as broadcast
from orc.runtime.collectives.collectives import gather as gather
from orc.runtime.collectives.collectives import pad_across_processes as pad_across_processes
from orc.runtime.collectives.collectives import reduce as reduce
from orc.runtime.collectives.objects import broadcast_object_list as broadcast_object_list
from orc.runtime.collectives.objects import gather_object as gather_object
from orc.runtime.collectives.tree import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from orc.runtime.collectives.tree import TensorInformation as TensorInformation
from orc.runtime.collectives.tree import concatenate as concatenate
from orc.runtime.collectives.tree import convert_to_fp32 as convert_to_fp32
from orc.runtime.collectives.tree import find_batch_size as find_batch_size
from orc.runtime.collectives.tree import find_device as find_device
from orc.runtime.collectives.tree import get_data_structure as get_data_structure
from orc.runtime.collectives.tree import get_shape as get_shape
from orc.runtime.collectives.tree import honor_type as honor_type
from orc.runtime.collectives.tree import ignorant_find_batch_size as ignorant_find_batch_size
from orc.runtime.collectives.tree import initialize_tensors as initialize_tensors
from orc.runtime.collectives.tree import is_namedtuple as is_namedtuple
from orc.runtime.collectives.tree import is_tensor_information as is_tensor_information
from orc.runtime.collectives.tree import is_torch_tensor as is_torch_tensor
from orc.runtime.collectives.tree import listify as listify
from orc.runtime.collectives.tree import pad_input_tensors as pad_input_tensors
from orc.runtime.collectives.tree import recursively_apply as recursively_apply
from orc.runtime.collectives.tree import send_to_device as send_to_device
from orc.runtime.collectives.tree import slice_tensors as slice_tensors
from orc.runtime.compat.basic_config import write_basic_config as write_basic_config
from orc.runtime.compat.colab import install_xla as install_xla
from orc.runtime.compat.enums import ComputeEnvironment as ComputeEnvironment
from orc.runtime.compat.enums import PrecisionType as PrecisionType
from orc.runtime.compat.enums import SageMakerDistributedType as SageMakerDistributedType
from orc.runtime.compat.objects import check_os_kernel as check_os_kernel
from orc.runtime.compat.objects import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from orc.runtime.compat.objects import convert_dict_to_env_variables as convert_dict_to_env_variables
from orc.runtime.compat.objects import get_pretty_name as get_pretty_name
from orc.runtime.compat.objects import has_compiled_regions as has_compiled_regions
from orc.runtime.compat.objects import is_compiled_module as is_compiled_module
from orc.runtime.compat.objects import is_port_in_use as is_port_in_use
from orc.runtime.compat.objects import merge_dicts as merge_dicts
from orc.runtime.compat.objects import model_has_dtensor as model_has_dtensor
from orc.runtime.compat.objects import recursive_getattr as recursive_getattr
from orc.runtime.core.availability import compare_versions as compare_versions
from orc.runtime.core.availability import is_4bit_bnb_available as is_4bit_bnb_available
from orc.runtime.core.availability import is_8bit_bnb_available as is_8bit_bnb_available
from orc.runtime.core.availability import is_aim_available as is_aim_available
from orc.runtime.core.availability import is_bnb_available as is_bnb_available
from orc.runtime.core.availability import is_boto3_available as is_boto3_available
from orc.runtime.core.availability import is_ccl_available as is_ccl_available
from orc.runtime.core.availability import is_clearml_available as is_clearml_available
from orc.runtime.core.availability import is_comet_ml_available as is_comet_ml_available
from orc.runtime.core.availability import is_cuda_available as is_cuda_available
from orc.runtime.core.availability import is_datasets_available as is_datasets_available
from orc.runtime.core.availability import is_deepspeed_available as is_deepspeed_available
from orc.runtime.core.availability import is_dvclive_available as is_dvclive_available
from orc.runtime.core.availability import is_fp16_available as is_fp16_available
from orc.runtime.core.availability import is_fp8_available as is_fp8_available
from orc.runtime.core.availability import is_hpu_available as is_hpu_available
from orc.runtime.core.availability import is_ipex_available as is_ipex_available
from orc.runtime.core.availability import is_lomo_available as is_lomo_available
from orc.runtime.core.availability import is_matplotlib_available as is_matplotlib_available
from orc.runtime.core.availability import is_megatron_lm_available as is_megatron_lm_available
from orc.runtime.core.availability import is_mlflow_available as is_mlflow_available
from orc.runtime.core.availability import is_mlu_available as is_mlu_available
from orc.runtime.core.availability import is_mps_available as is_mps_available
from orc.runtime.core.availability import is_msamp_available as is_msamp_available
from orc.runtime.core.availability import is_musa_available as is_musa_available
from orc.runtime.core.availability import is_npu_available as is_npu_available
from orc.runtime.core.availability import is_pandas_available as is_pandas_available
from orc.runtime.core.availability import is_peft_available as is_peft_available
from orc.runtime.core.availability import is_pippy_available as is_pippy_available
from orc.runtime.core.availability import is_pynvml_available as is_pynvml_available
from orc.runtime.core.availability import is_pytest_available as is_pytest_available
from orc.runtime.core.availability import is_rich_available as is_rich_available
from orc.runtime.core.availability import is_sagemaker_available as is_sagemaker_available
from orc.runtime.core.availability import is_schedulefree_available as is_schedulefree_available
from orc.runtime.core.availability import is_sdaa_available as is_sdaa_available
from orc.runtime.core.availability import is_swanlab_available as is_swanlab_available
from orc.runtime.core.availability import is_tensorboard_available as is_tensorboard_available
from orc.runtime.core.availability import is_timm_available as is_timm_available
from orc.runtime.core.availability import is_torch_version as is_torch_version
from orc.runtime.core.availability import is_torch_xla_available as is_torch_xla_available
from orc.runtime.core.availability import is_torchao_available as is_torchao_available
from orc.runtime.core.availability import is_torchdata_available as is_torchdata_available
from orc.runtime.core.availability import is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available
from orc.runtime.core.availability import is_torchvision_available as is_torchvision_available
from orc.runtime.core.availability import is_tqdm_available as is_tqdm_available
from orc.runtime.core.availability import is_trackio_available as is_trackio_available
from orc.runtime.core.availability import is_transformer_engine_available as is_transformer_engine_available
from orc.runtime.core.availability import is_transformers_available as is_transformers_available
from orc.runtime.core.availability import is_triton_available as is_triton_available
from orc.runtime.core.availability import is_wandb_available as is_wandb_available
from orc.runtime.core.availability import is_weights_only_available as is_weights_only_available
from orc.runtime.core.availability import is_xpu_available as is_xpu_available
from orc.runtime.core.config import ConfigError as ConfigError
from orc.runtime.core.config import RuntimeConfig as RuntimeConfig
from orc.runtime.core.context import RunContext as RunContext
from orc.runtime.core.context import current_context as current_context
from orc.runtime.core.context import use_context as use_context
from orc.runtime.core.enums import DistributedType as DistributedType
from orc.runtime.core.enums import DynamoBackend as DynamoBackend
from orc.runtime.core.enums import RNGType as RNGType
from orc.runtime.core.errors import ContextError as ContextError
from orc.runtime.core.errors import DistributedOperationException as DistributedOperationException
from orc.runtime.core.errors import LaunchError as LaunchError
from orc.runtime.core.errors import OrcRuntimeError as OrcRuntimeError
from orc.runtime.core.fp8_recipes import AORecipeKwargs as AORecipeKwargs
from orc.runtime.core.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
from orc.runtime.core.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from orc.runtime.core.fp8_recipes import TERecipeKwargs as TERecipeKwargs
from orc.runtime.core.handlers import AutocastKwargs as AutocastKwargs
from orc.runtime.core.handlers import DDPCommunicationHookType as DDPCommunicationHookType
from orc.runtime.core.handlers import DataLoaderConfiguration as DataLoaderConfiguration
from orc.runtime.core.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from orc.runtime.core.handlers import GradScalerKwargs as GradScalerKwargs
from orc.runtime.core.handlers import GradientAccumulationPlugin as GradientAccumulationPlugin
from orc.runtime.core.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from orc.runtime.core.handlers import KwargsHandler as KwargsHandler
from orc.runtime.core.handlers import ProfileKwargs as ProfileKwargs
from orc.runtime.core.handlers import ProjectConfiguration as ProjectConfiguration
from orc.runtime.core.handlers import TorchDynamoPlugin as TorchDynamoPlugin
from orc.runtime.core.parallelism import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
from orc.runtime.core.parallelism import ParallelismConfig as ParallelismConfig
from orc.runtime.core.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from orc.runtime.core.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from orc.runtime.core.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from orc.runtime.core.patching import are_libraries_initialized as are_libraries_initialized
from orc.runtime.core.patching import clear_environment as clear_environment
from orc.runtime.core.patching import get_int_from_env as get_int_from_env
from orc.runtime.core.patching import parse_choice_from_env as parse_choice_from_env
from orc.runtime.core.patching import parse_flag_from_env as parse_flag_from_env
from orc.runtime.core.patching import patch_environment as patch_environment
from orc.runtime.core.patching import purge_accelerate_environment as purge_accelerate_environment
from orc.runtime.core.patching import str_to_bool as str_to_bool
from orc.runtime.core.process_control import wait_for_everyone as wait_for_everyone
from orc.runtime.core.state import GradientState as GradientState
from orc.runtime.data.adapter import DataLoaderAdapter as DataLoaderAdapter
from orc.runtime.data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
from orc.runtime.data.iterable import IterableDatasetShard as IterableDatasetShard
from orc.runtime.data.loader import DataLoaderShard as DataLoaderShard
from orc.runtime.data.prepare import prepare_data_loader as prepare_data_loader
from orc.runtime.data.prepare import skip_first_batches as skip_first_batches
from orc.runtime.data.samplers import BatchSamplerShard as BatchSamplerShard
from orc.runtime.data.samplers import SeedableRandomSampler as SeedableRandomSampler
from orc.runtime.engine.deepspeed.config import HfDeepSpeedConfig as HfDeepSpeedConfig
from orc.runtime.engine.deepspeed.placeholders import DummyOptim as DummyOptim
from orc.runtime.engine.deepspeed.placeholders import DummyScheduler as DummyScheduler
from orc.runtime.engine.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from orc.runtime.engine.deepspeed.plugins import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from orc.runtime.engine.deepspeed.wrappers import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from orc.runtime.engine.deepspeed.wrappers import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from orc.runtime.engine.deepspeed.wrappers import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from orc.runtime.engine.megatron.plugin import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from orc.runtime.engine.megatron.plugin import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from orc.runtime.engine.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from orc.runtime.engine.megatron.steps import AbstractTrainStep as AbstractTrainStep
from orc.runtime.engine.megatron.steps import BertTrainStep as BertTrainStep
from orc.runtime.engine.megatron.steps import GPTTrainStep as GPTTrainStep
from orc.runtime.engine.megatron.steps import T5TrainStep as T5TrainStep
from orc.runtime.engine.megatron.steps import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from orc.runtime.engine.megatron.steps import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from orc.runtime.engine.megatron.wrappers import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from orc.runtime.engine.megatron.wrappers import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from orc.runtime.fsdp import fsdp2_prepare_model as fsdp2_prepare_model
from orc.runtime.fsdp import load_fsdp_model as load_fsdp_model
from orc.runtime.fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from orc.runtime.fsdp import save_fsdp_model as save_fsdp_model
from orc.runtime.fsdp import save_fsdp_optimizer as save_fsdp_optimizer
from orc.runtime.launch.numa import override_numa_affinity as override_numa_affinity
from orc.runtime.launch.numa import set_numa_affinity as set_numa_affinity
from orc.runtime.launchers import debug_launcher as debug_launcher
from orc.runtime.launchers import notebook_launcher as notebook_launcher
from orc.runtime.local_sgd import LocalSGD as LocalSGD
from orc.runtime.logging import MultiProcessAdapter as MultiProcessAdapter
from orc.runtime.logging import get_logger as get_logger
from orc.runtime.memory.device_map import check_device_map as check_device_map
from orc.runtime.memory.device_map import clean_device_map as clean_device_map
from orc.runtime.memory.device_map import find_tied_parameters as find_tied_parameters
from orc.runtime.memory.device_map import get_balanced_memory as get_balanced_memory
from orc.runtime.memory.device_map import get_max_memory as get_max_memory
from orc.runtime.memory.device_map import infer_auto_device_map as infer_auto_device_map
from orc.runtime.memory.device_map import retie_parameters as retie_parameters
from orc.runtime.memory.sizes import MemoryEstimate as MemoryEstimate
from orc.runtime.memory.sizes import calculate_maximum_sizes as calculate_maximum_sizes
from orc.runtime.memory.sizes import compute_module_sizes as compute_module_sizes
from orc.runtime.memory.sizes import convert_bytes as convert_bytes
from orc.runtime.memory.sizes import convert_file_size_to_int as convert_file_size_to_int
from orc.runtime.memory.sizes import dtype_byte_size as dtype_byte_size
from orc.runtime.memory.sizes import estimate_memory as estimate_memory
from orc.runtime.memory.sizes import get_max_layer_size as get_max_layer_size
from orc.runtime.memory.sizes import named_module_tensors as named_module_tensors
from orc.runtime.observe.progress_bar import tqdm as tqdm
from orc.runtime.parallel import extract_model_from_parallel as extract_model_from_parallel
from orc.runtime.parallel.compile import compile_regions as compile_regions
from orc.runtime.parallel.fsdp_plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from orc.runtime.parallel.fsdp_plugin import disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading
from orc.runtime.parallel.fsdp_plugin import enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading
from orc.runtime.parallel.fsdp_plugin import fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy
from orc.runtime.parallel.pipeline import PipelineParallelConfig as PipelineParallelConfig
from orc.runtime.parallel.pipeline import prepare_pippy as prepare_pippy
from orc.runtime.parallel.precision import is_bf16_available as is_bf16_available
from orc.runtime.parallel.precision.forward import convert_outputs_to_fp32 as convert_outputs_to_fp32
from orc.runtime.parallel.precision.fp8.ao import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from orc.runtime.parallel.precision.fp8.ao import has_ao_layers as has_ao_layers
from orc.runtime.parallel.precision.fp8.te import apply_fp8_autowrap as apply_fp8_autowrap
from orc.runtime.parallel.precision.fp8.te import contextual_fp8_autocast as contextual_fp8_autocast
from orc.runtime.parallel.precision.fp8.te import convert_model as convert_model
from orc.runtime.parallel.precision.fp8.te import has_transformer_engine_layers as has_transformer_engine_layers
from orc.runtime.stand_ins.switch import stand_in as stand_in
from orc.runtime.state import AcceleratorState as AcceleratorState
from orc.runtime.state import PartialState as PartialState
from orc.runtime.tracking import AimTracker as AimTracker
from orc.runtime.tracking import ClearMLTracker as ClearMLTracker
from orc.runtime.tracking import CometMLTracker as CometMLTracker
from orc.runtime.tracking import DVCLiveTracker as DVCLiveTracker
from orc.runtime.tracking import GeneralTracker as GeneralTracker
from orc.runtime.tracking import MLflowTracker as MLflowTracker
from orc.runtime.tracking import SwanLabTracker as SwanLabTracker
from orc.runtime.tracking import TensorBoardTracker as TensorBoardTracker
from orc.runtime.tracking import TrackioTracker as TrackioTracker
from orc.runtime.tracking import WandBTracker as WandBTracker
from orc.runtime.tracking import filter_trackers as filter_trackers
from orc.runtime.tracking import get_available_trackers as get_available_trackers
from orc.runtime.tracking import on_main_process as on_main_process
from orc.runtime.tracking import register_tracker_class as register_tracker_class
from orc.runtime.tracking.base import LoggerType as LoggerType
from orc.runtime.train.amp import get_grad_scaler as get_grad_scaler
from orc.runtime.train.amp import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from orc.runtime.train.memory import clear_device_cache as clear_device_cache
from orc.runtime.train.memory import find_executable_batch_size as find_executable_batch_size
from orc.runtime.train.memory import release_memory as release_memory
from orc.runtime.train.memory import should_reduce_batch_size as should_reduce_batch_size
from orc.runtime.train.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from orc.runtime.train.scheduler import AcceleratedScheduler as AcceleratedScheduler
from orc.runtime.train.seeding import set_seed as set_seed
from orc.runtime.train.seeding import synchronize_rng_state as synchronize_rng_state
from orc.runtime.train.seeding import synchronize_rng_states as synchronize_rng_states
from orc.runtime.weights.alignment import AlignDevicesHook as AlignDevicesHook
from orc.runtime.weights.alignment import align_module_device as align_module_device
from orc.runtime.weights.alignment import attach_align_device_hook as attach_align_device_hook
from orc.runtime.weights.alignment import attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks
from orc.runtime.weights.alignment import attach_execution_device_hook as attach_execution_device_hook
from orc.runtime.weights.alignment import has_offloaded_params as has_offloaded_params
from orc.runtime.weights.casting import LayerwiseCastingHook as LayerwiseCastingHook
from orc.runtime.weights.casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from orc.runtime.weights.dispatch import cpu_offload as cpu_offload
from orc.runtime.weights.dispatch import disk_offload as disk_offload
from orc.runtime.weights.dispatch import dispatch_model as dispatch_model
from orc.runtime.weights.dispatch import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from orc.runtime.weights.empty_weights import init_empty_weights as init_empty_weights
from orc.runtime.weights.empty_weights import init_on_device as init_on_device
from orc.runtime.weights.empty_weights import set_module_tensor_to_device as set_module_tensor_to_device
from orc.runtime.weights.hooks import ModelHook as ModelHook
from orc.runtime.weights.hooks import SequentialHook as SequentialHook
from orc.runtime.weights.hooks import add_hook_to_module as add_hook_to_module
from orc.runtime.weights.hooks import remove_hook_from_module as remove_hook_from_module
from orc.runtime.weights.hooks import remove_hook_from_submodules as remove_hook_from_submodules
from orc.runtime.weights.load_in_model import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from orc.runtime.weights.load_in_model import load_checkpoint_in_model as load_checkpoint_in_model
from orc.runtime.weights.model_offload import CpuOffload as CpuOffload
from orc.runtime.weights.model_offload import UserCpuOffloadHook as UserCpuOffloadHook
from orc.runtime.weights.model_offload import cpu_offload_with_hook as cpu_offload_with_hook
from orc.runtime.weights.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
from orc.runtime.weights.offload import PrefixedDataset as PrefixedDataset
from orc.runtime.weights.offload import load_offloaded_weight as load_offloaded_weight
from orc.runtime.weights.offload import load_offloaded_weights as load_offloaded_weights
from orc.runtime.weights.offload import load_state_dict as load_state_dict
from orc.runtime.weights.offload import offload_state_dict as offload_state_dict
from orc.runtime.weights.offload import offload_weight as offload_weight
from orc.runtime.weights.offload import save_offload_index as save_offload_index
from orc.runtime.weights.quantization.config import BnbQuantizationConfig as BnbQuantizationConfig
from orc.runtime.weights.quantization.config import TorchAoQuantizationConfig as TorchAoQuantizationConfig
from orc.runtime.weights.quantization.load import load_and_quantize_model as load_and_quantize_model

HOMES: dict[str, str]

__all__ = [
    "AbstractTrainStep",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "add_hook_to_module",
    "AimTracker",
    "align_module_device",
    "AlignDevicesHook",
    "AORecipeKwargs",
    "apply_fp8_autowrap",
    "are_libraries_initialized",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "AutocastKwargs",
    "avg_losses_across_data_parallel_group",
    "BatchSamplerShard",
    "BertTrainStep",
    "BnbQuantizationConfig",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "CannotPadNestedTensorWarning",
    "check_device_map",
    "check_os_kernel",
    "clean_device_map",
    "clean_state_dict_for_safetensors",
    "clear_device_cache",
    "clear_environment",
    "ClearMLTracker",
    "CometMLTracker",
    "compare_versions",
    "compile_regions",
    "compute_module_sizes",
    "ComputeEnvironment",
    "concatenate",
    "ConfigError",
    "ContextError",
    "contextual_fp8_autocast",
    "convert_bytes",
    "convert_dict_to_env_variables",
    "convert_file_size_to_int",
    "convert_model",
    "convert_model_to_fp8_ao",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "cpu_offload",
    "cpu_offload_with_hook",
    "CpuOffload",
    "current_context",
    "DataLoaderAdapter",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DDPCommunicationHookType",
    "debug_launcher",
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper",
    "DeepSpeedSequenceParallelConfig",
    "disable_fsdp_ram_efficient_loading",
    "disk_offload",
    "dispatch_model",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "dtype_byte_size",
    "DummyOptim",
    "DummyScheduler",
    "DVCLiveTracker",
    "DynamoBackend",
    "enable_fsdp_ram_efficient_loading",
    "estimate_memory",
    "extract_model_from_parallel",
    "filter_trackers",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "find_tied_parameters",
    "FP8RecipeKwargs",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "FSDP_MODEL_NAME",
    "FullyShardedDataParallelPlugin",
    "gather",
    "gather_across_data_parallel_groups",
    "gather_object",
    "GeneralTracker",
    "get_active_deepspeed_plugin",
    "get_available_trackers",
    "get_balanced_memory",
    "get_data_structure",
    "get_grad_scaler",
    "get_int_from_env",
    "get_logger",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_pretty_name",
    "get_shape",
    "get_state_dict_offloaded_model",
    "GPTTrainStep",
    "GradientAccumulationPlugin",
    "GradientState",
    "GradScalerKwargs",
    "has_ao_layers",
    "has_compiled_regions",
    "has_offloaded_params",
    "has_transformer_engine_layers",
    "HfDeepSpeedConfig",
    "honor_type",
    "ignorant_find_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "initialize_tensors",
    "InitProcessGroupKwargs",
    "install_xla",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_bf16_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_ccl_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp16_available",
    "is_fp8_available",
    "is_hpu_available",
    "is_ipex_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_namedtuple",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_port_in_use",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensor_information",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xpu_available",
    "IterableDatasetShard",
    "KwargsHandler",
    "LaunchError",
    "LayerwiseCastingHook",
    "listify",
    "load",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "LocalSGD",
    "LoggerType",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMPlugin",
    "MegatronLMSchedulerWrapper",
    "MemoryEstimate",
    "merge_dicts",
    "merge_fsdp_weights",
    "MLflowTracker",
    "model_has_dtensor",
    "MODEL_NAME",
    "ModelHook",
    "MSAMPRecipeKwargs",
    "MultiProcessAdapter",
    "named_module_tensors",
    "notebook_launcher",
    "offload_state_dict",
    "offload_weight",
    "OffloadedWeightsLoader",
    "on_main_process",
    "OPTIMIZER_NAME",
    "OrcRuntimeError",
    "override_numa_affinity",
    "pad_across_processes",
    "pad_input_tensors",
    "ParallelismConfig",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "PartialState",
    "patch_environment",
    "PipelineParallelConfig",
    "PrecisionType",
    "PrefixedDataset",
    "prepare_data_loader",
    "prepare_pippy",
    "ProfileKwargs",
    "ProjectConfiguration",
    "purge_accelerate_environment",
    "recursive_getattr",
    "recursively_apply",
    "reduce",
    "register_tracker_class",
    "release_memory",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "RNG_STATE_NAME",
    "RNGType",
    "RunContext",
    "RuntimeConfig",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SageMakerDistributedType",
    "SAMPLER_NAME",
    "save",
    "save_fsdp_model",
    "save_fsdp_optimizer",
    "save_offload_index",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "SeedableRandomSampler",
    "send_to_device",
    "SequentialHook",
    "set_module_tensor_to_device",
    "set_numa_affinity",
    "set_seed",
    "should_reduce_batch_size",
    "skip_first_batches",
    "slice_tensors",
    "stand_in",
    "str_to_bool",
    "SwanLabTracker",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "T5TrainStep",
    "TensorBoardTracker",
    "TensorInformation",
    "TERecipeKwargs",
    "TorchAoQuantizationConfig",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "tqdm",
    "TrackioTracker",
    "use_context",
    "UserCpuOffloadHook",
    "wait_for_everyone",
    "WandBTracker",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "write_basic_config",
]
