"""Questions of `orc config`, and the configuration that the answers make. Pure: an `Asker` does the talking.

Questions and their order are the documented ones, so that answers that are piped in go on working.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from orc.launchers.accelerate.defaults import LOCAL_DEFAULTS
from orc.launchers.accelerate.keys import OPTIONS, PRECISIONS
from orc.runtime.core import fp8_settings
from orc.runtime.core import fsdp_settings as settings

HERE, SAGEMAKER = "This machine", "AWS (Amazon SageMaker)"
MACHINES = ("No distributed training", "multi-CPU", "multi-GPU", "TPU")
_TYPES = dict(zip(MACHINES, ("NO", "MULTI_CPU", "MULTI_GPU", "TPU"), strict=True))
_BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs", "openxla")
Answers = dict[str, Any]


class Asker(Protocol):
    """Asker of questions. Each method returns the answer, and raises where none can be had."""

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        """Return one of *choices*."""
        ...

    def confirm(self, question: str, default: bool = False) -> bool:
        """Return yes or no."""
        ...

    def text(self, question: str, default: Any = None, parse: Callable[[str], Any] = str) -> Any:
        """Return the parsed text, or *default* for an empty one; repeat the question where *parse* raises."""
        ...


def interview(ask: Asker) -> Answers:
    """Return the configuration, by its documented keys, that the answers make."""
    if ask.choose("In which compute environment are you running?", (HERE, SAGEMAKER), HERE) == SAGEMAKER:
        return _sagemaker(ask)
    kind = _TYPES[ask.choose("Which type of machine are you using?", MACHINES, MACHINES[0])]
    found: Answers = {**LOCAL_DEFAULTS, "distributed_type": kind}
    if kind in ("MULTI_CPU", "MULTI_GPU"):
        _several_machines(ask, found)
    if kind == "NO":
        question = "Do you want to run your training on CPU only (even if a GPU / Apple Silicon device is available)?"
        found["use_cpu"] = ask.confirm(question)
    elif kind == "MULTI_CPU":
        found["use_cpu"] = True
    if found["use_cpu"] and ask.confirm(
        "Do you want to use Intel PyTorch Extension (IPEX) to speed up training on CPU?"
    ):
        found["ipex_config"] = {"ipex": True}
    if kind == "MULTI_CPU":
        _mpirun(ask, found)
    if kind != "TPU":
        _dynamo(ask, found)
        _paradigm(ask, found, kind)
    else:
        _tpu(ask, found)
    if kind == "NO":
        found["num_processes"] = 1
    else:
        noun = {"MULTI_GPU": "GPU(s)", "TPU": "TPU cores"}.get(kind, "processes")
        question = f"How many {noun} should be used for distributed training?"
        found["num_processes"] = ask.text(question, 1, _processes(found["num_machines"]))
    _precision(ask, found)
    return found


def _several_machines(ask: Asker, found: Answers) -> None:
    """Machines, and how they find each other where there are several."""
    question = "How many different machines will you use (use more than 1 for multi-node training)?"
    machines = found["num_machines"] = ask.text(question, 1, _of("num_machines"))
    if machines == 1:
        return
    found["machine_rank"] = ask.text("What is the rank of this machine?", 0, _rank(machines))
    found["main_process_ip"] = ask.text("What is the IP address of the machine that will host the main process?")
    question = "What is the port you will use to communicate with the main process?"
    found["main_process_port"] = ask.text(question, 29500, _of("main_process_port"))
    question = (
        "Are all the machines on the same local network? Answer `no` if nodes are on the cloud and/or on different "
        "network hosts"
    )
    found["same_network"] = ask.confirm(question, True)
    if not found["same_network"]:
        question = "What rendezvous backend will you use?"
        found["rdzv_backend"] = ask.choose(question, ("static", "c10d"), "static")


def _mpirun(ask: Asker, found: Answers) -> None:
    if found["num_machines"] > 1 and ask.confirm("Do you want mpirun to start the processes?"):
        file = ask.text("Please enter the path to the hostfile to use with mpirun", "~/hostfile", _home)
        threads = ask.text("Enter the number of oneCCL worker threads", 1, _of("mpirun_ccl"))
        found["mpirun_config"] = {"mpirun_ccl": str(threads), "mpirun_hostfile": file}


def _dynamo(ask: Asker, found: Answers) -> None:
    if ask.confirm("Do you wish to optimize your script with torch dynamo?"):
        backend = ask.choose("Which dynamo backend would you like to use?", _BACKENDS, _BACKENDS[0])
        found["dynamo_config"] = {"dynamo_backend": backend.upper()}


def _paradigm(ask: Asker, found: Answers, kind: str) -> None:
    """DeepSpeed, FSDP or Megatron-LM; the latter two split over several GPUs."""
    if kind == "MULTI_CPU":
        return
    if ask.confirm("Do you want to use DeepSpeed?"):
        found["distributed_type"] = "DEEPSPEED"
        found["deepspeed_config"] = _deepspeed(ask)
    elif kind == "MULTI_GPU" and ask.confirm("Do you want to use FullyShardedDataParallel?"):
        found["distributed_type"] = "FSDP"
        found["fsdp_config"] = _fsdp(ask)
    elif kind == "MULTI_GPU" and ask.confirm("Do you want to use Megatron-LM ?"):
        found["distributed_type"] = "MEGATRON_LM"
        found["megatron_lm_config"] = {f"megatron_lm_{key}": value for key, value in _megatron(ask).items()}


def _deepspeed(ask: Asker) -> Answers:
    """Settings of DeepSpeed; with a file of its own only those that the file lacks."""
    init = "Do you want to enable `deepspeed.zero.Init` when using ZeRO Stage-3 for constructing massive models?"
    if ask.confirm("Do you want to specify a json file to a DeepSpeed config?"):
        file = ask.text("Please enter the path to the json DeepSpeed config file:")
        return {"deepspeed_config_file": file, "zero3_init_flag": ask.confirm(init)}
    stage = int(ask.choose("What should be your DeepSpeed's ZeRO optimization stage?", ("0", "1", "2", "3"), "2"))
    found: Answers = {"zero_stage": stage}
    for part, least, what in (("optimizer", 2, "optimizer states"), ("param", 3, "parameters")):
        if stage >= least:
            device = ask.choose(f"Where to offload {what}?", ("none", "cpu", "nvme"), "none")
            found[f"offload_{part}_device"] = device
            if device == "nvme":
                found[f"offload_{part}_nvme_path"] = ask.text(f"Nvme Path to offload {what}?", "/nvme")
    question = "How many gradient accumulation steps you're passing in your script?"
    found["gradient_accumulation_steps"] = ask.text(question, 1, _of("gradient_accumulation_steps"))
    if ask.confirm("Do you want to use gradient clipping?"):
        found["gradient_clipping"] = ask.text("What is the gradient clipping value?", 1.0, _of("gradient_clipping"))
    if stage == 3:
        found["zero3_save_16bit_model"] = ask.confirm(
            "Do you want to save 16-bit model weights when using ZeRO Stage-3?"
        )
        found["zero3_init_flag"] = ask.confirm(init)
    return found


def _fsdp(ask: Asker) -> Answers:
    version = int(ask.choose("What should be your FSDP version?", ("1", "2"), "2"))
    found: Answers = {"fsdp_version": version}
    if version == 1:
        question = "What should be your sharding strategy?"
        found["fsdp_sharding_strategy"] = ask.choose(question, settings.STRATEGIES, settings.STRATEGIES[0])
    else:
        found["fsdp_reshard_after_forward"] = ask.confirm("Do you want to enable resharding after forward?", True)
    found["fsdp_offload_params"] = ask.confirm("Do you want to offload parameters and gradients to CPU?")
    policy = found["fsdp_auto_wrap_policy"] = ask.choose(
        "What should be your auto wrap policy?", settings.WRAP_POLICIES, settings.WRAP_POLICIES[0]
    )
    if policy == "TRANSFORMER_BASED_WRAP":
        if not ask.confirm(
            "Do you want to use the model's `_no_split_modules` to wrap. Only applicable for Transformers", True
        ):
            question = "Specify the comma-separated list of transformer layer class names (case-sensitive) to wrap"
            found["fsdp_transformer_layer_cls_to_wrap"] = ask.text(question)
    elif policy == "SIZE_BASED_WRAP":
        question = "What should be your FSDP's minimum number of parameters for Default Auto Wrapping Policy?"
        found["fsdp_min_num_params"] = ask.text(question, 100_000_000, _of("fsdp_min_num_params"))
    if version == 1:
        question = "What should be your FSDP's backward prefetch policy?"
        found["fsdp_backward_prefetch_policy"] = ask.choose(question, settings.PREFETCHES, settings.PREFETCHES[0])
        found["fsdp_forward_prefetch"] = ask.confirm("Do you want to enable FSDP's forward prefetch policy?")
    states = [one for one in settings.STATE_DICT_TYPES if version == 1 or one != "LOCAL_STATE_DICT"]
    question = "What should be your FSDP's state dict type?"
    found["fsdp_state_dict_type"] = ask.choose(question, states, "SHARDED_STATE_DICT")
    if version == 1:
        found["fsdp_use_orig_params"] = ask.confirm("Do you want to enable FSDP's `use_orig_params` feature?", True)
    efficient = ask.confirm(
        "Do you want to enable CPU RAM efficient model loading? Only applicable for Transformers", True
    )
    found["fsdp_cpu_ram_efficient_loading"] = efficient
    if version == 1:  # without it, all ranks but the first would have random weights
        question = "Do you want each individually wrapped FSDP unit to broadcast module parameters from rank 0?"
        found["fsdp_sync_module_states"] = True if efficient else ask.confirm(question, True)
    found["fsdp_activation_checkpointing"] = ask.confirm("Do you want to enable FSDP activation checkpointing?")
    return found


def _megatron(ask: Asker) -> Answers:
    found: Answers = {
        "tp_degree": ask.text("What is the Tensor Parallelism degree/size?", 1, _of("megatron_lm_tp_degree"))
    }
    if found["tp_degree"] > 1:
        found["sequence_parallelism"] = ask.confirm("Do you want to enable Sequence Parallelism?", True)
    found["pp_degree"] = ask.text("What is the Pipeline Parallelism degree/size?", 1, _of("megatron_lm_pp_degree"))
    if found["pp_degree"] > 1:
        question = "What is the number of micro-batches?"
        found["num_micro_batches"] = ask.text(question, 1, _of("megatron_lm_num_micro_batches"))
    found["recompute_activations"] = ask.confirm("Do you want to enable selective activation recomputation?", True)
    question = (
        "Do you want to use distributed optimizer which shards optimizer state and gradients across data parallel "
        "ranks?"
    )
    found["use_distributed_optimizer"] = ask.confirm(question, True)
    question = "What is the gradient clipping value based on global L2 Norm (0 to disable)?"
    found["gradient_clipping"] = ask.text(question, 1.0, _of("megatron_lm_gradient_clipping"))
    return found


def _tpu(ask: Asker, found: Answers) -> None:
    question = "What is the name of the function in your script that should be launched in all parallel scripts?"
    found["main_training_function"] = ask.text(question, "main")
    if not ask.confirm("Are you using a TPU cluster?"):
        return
    found["tpu_use_cluster"] = True
    found["tpu_name"] = ask.text("What is the name of your TPU cluster?")
    found["tpu_zone"] = ask.text("What is the zone of your TPU cluster?")
    found["tpu_use_sudo"] = ask.confirm("To run a python script in a TPU pod, should `sudo` be used?")
    if ask.confirm("Do you have code you wish to run on startup in each pod?"):
        if ask.confirm("Is this code located in a bash script?"):
            found["command_file"] = ask.text("What is the path to your bash script?")
        else:
            found["commands"] = [ask.text("Please enter a single command to run on startup in each pod:")]
            while ask.confirm("Do you wish to add another command?"):
                found["commands"].append(ask.text("Please enter a single command to run on startup in each pod:"))


def _sagemaker(ask: Asker) -> Answers:
    """A file for Amazon SageMaker. Credentials are never requested: they come from a profile or the environment."""
    found: Answers = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "image_uri": None,
        "profile": ask.text("Enter your AWS Profile name:", "default"),
        "region": ask.text("Enter your AWS Region:", "us-east-1"),
        "iam_role_name": ask.text("Enter your IAM role name:"),
        "base_job_name": "accelerate-sagemaker-1",
        "use_cpu": False,
    }
    if ask.confirm("Do you want to use custom Docker image?"):
        found["image_uri"] = ask.text("Enter your Docker image:")
    for key, what in (
        ("sagemaker_inputs_file", "input channels with data locations"),
        ("sagemaker_metrics_file", "metrics"),
    ):
        if ask.confirm(f"Do you want to provide SageMaker {what}?"):
            found[key] = ask.text("Enter the path to the file, a TSV with a header:")
    modes = ("No distributed training", "data parallelism")
    parallel = ask.choose("What is the distributed mode?", modes, modes[0]) == modes[1]
    found["distributed_type"] = "DATA_PARALLEL" if parallel else "NO"
    default = "ml.p4d.24xlarge" if parallel else "ml.g5.xlarge"
    found["ec2_instance_type"] = ask.text("Which EC2 instance type you want to use for your training?", default)
    found["num_machines"] = ask.text("How many machines do you want use?", 1, _of("num_machines"))
    _precision(ask, found)
    return found


def _precision(ask: Asker, found: Answers) -> None:
    """The precision, unless a file of DeepSpeed has it."""
    if "deepspeed_config_file" in found.get("deepspeed_config", {}):
        found.pop("mixed_precision", None)
        return
    chosen = ask.choose("Do you wish to use mixed precision?", PRECISIONS, "no")
    found["mixed_precision"] = chosen
    if chosen == "fp8":
        names = [name.lower() for name in fp8_settings.BACKENDS]
        backend = ask.choose("Which library do you want to compute in FP8 with?", names, "te")
        found["fp8_config"] = {"backend": backend.upper()}
        if backend == "msamp":
            found["fp8_config"]["opt_level"] = ask.choose("Which optimization level?", fp8_settings.LEVELS, "O2")
    if chosen == "bf16" and found.get("distributed_type") == "TPU":
        found["downcast_bf16"] = (
            "yes"
            if ask.confirm("Should `torch.float` be cast as `bfloat16` and `torch.double` remain `float32` on TPUs?")
            else "no"
        )


def _of(name: str) -> Callable[[str], Any]:
    return OPTIONS[name].parse


def _home(text: str) -> str:
    return str(Path(text).expanduser())


def _rank(machines: int) -> Callable[[str], Any]:
    def parse(text: str) -> int:
        rank: int = OPTIONS["machine_rank"].parse(text)
        if rank >= machines:
            raise ValueError(f"{rank} is no machine of {machines}: they are numbered from 0")
        return rank

    return parse


def _processes(machines: int) -> Callable[[str], Any]:
    def parse(text: str) -> int:
        total: int = OPTIONS["num_processes"].parse(text)
        if total % machines:
            raise ValueError(f"{total} processes cannot be divided among {machines} machines")
        return total

    return parse
