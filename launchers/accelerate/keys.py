"""The table of documented options of `accelerate launch` and of its configuration file.

Everything that takes or explains them reads this table: the flags of `orc launch`, the reader of configuration files,
their conversion to job files, and the documentation. Options of sharding, DeepSpeed, FP8, Megatron-LM and the kinds of
parallelism are in `orc.launchers.accelerate.options`.
"""

from __future__ import annotations

from collections.abc import Mapping

from orc.launchers.accelerate.options import FEATURES, GROUPS, Option, mapping, text, texts, words
from orc.runtime.core import config
from orc.runtime.core.parsing import choice, number, truth, whole

COMPUTE_ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
DISTRIBUTED_TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TPU", "XLA"),
    *("DATA_PARALLEL", "MODEL_PARALLEL"),
)
# The flag that says the same as `distributed_type` in a file. The others follow from processes and hardware.
PARADIGMS: Mapping[str, str] = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
    "MULTI_GPU": "multi_gpu",
    "TPU": "tpu",
    "XLA": "tpu",
}
PRECISIONS = tuple(config.PRECISIONS)

_TPU_JOB = "a TPU is trained on by a job: `launcher: xla` in job.yaml and a cluster of kind tpu in clusters.yaml"
_SAGEMAKER = "Says where the job of Amazon SageMaker runs that the launch becomes: its entry in clusters.yaml."
_INTEL = "PyTorch itself has had these optimisations since 2.8, and the extension is no longer developed"

_LAUNCH = (
    Option("config_file", "launch", "Configuration file of Accelerate; flags override it.",
           text, "done", "Reads it; without the flag the default file is read where there is one.", ("--config_file",)),
    Option("module", "launch", "SCRIPT is a module, as in python -m.", truth, "done", "Starts `python -m SCRIPT`.",
           ("-m", "--module"), switch=True),
    Option("no_python", "launch", "SCRIPT is any program.", truth, "done", "Starts SCRIPT without `python`.",
           ("--no_python",), switch=True),
    Option("debug", "launch", "Check shapes and structure before every collective.", truth, "done",
           "Switches the shape check of collectives on. The stack of a failing rank is always printed.",
           ("--debug",), switch=True, key="debug", variable="ACCELERATE_DEBUG_MODE", setting="debug_mode",
           job="runtime.debug_mode"),
    Option("quiet", "launch", "Leave out the launcher's own line about a failing rank.", truth, "done",
           "The traceback of the script and the exit status remain.", ("-q", "--quiet"), switch=True),
    Option("gradient_accumulation_steps", "launch", "Batches per optimizer step.", whole(1), "done",
           "Sets the number for the script, with DeepSpeed and without.", ("--gradient_accumulation_steps",),
           keys=("gradient_accumulation_steps",), key="deepspeed_config.gradient_accumulation_steps",
           variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS", setting="gradient_accumulation_steps", default=1,
           job="runtime.gradient_accumulation_steps"),
)  # fmt: skip
_HARDWARE = (
    Option("cpu", "hardware", "Train on the CPU even where an accelerator is present.", truth, "done",
           "No process takes an accelerator.", ("--cpu",), switch=True, key="use_cpu", variable="ACCELERATE_USE_CPU",
           setting="use_cpu", job="runtime.use_cpu"),
    Option("multi_gpu", "hardware", "Train on several GPUs of this machine.", truth, "done",
           "One process per GPU; an error where there is no GPU.", ("--multi_gpu",), switch=True,
           job="resources.gpus_per_node"),
    Option("tpu", "hardware", "Train on a TPU.", truth, "job", _TPU_JOB, ("--tpu",), switch=True,
           job="launcher: xla"),
    Option("ipex", "hardware", "Use the Intel extension of PyTorch.", truth, "ignored",
           f"Nothing: {_INTEL}.", ("--ipex",), switch=True, key="ipex_config.ipex"),
    Option("use_xpu", "hardware", "Use the Intel extension on XPU.", truth, "refused",
           "The runtime trains on CUDA, MPS, XLA devices and CPUs; XPU is not among them.", ("--use_xpu",),
           switch=True, key="ipex_config.use_xpu", keys=("use_xpu",)),
    Option("gpu_ids", "hardware", "GPUs of this machine to use, by number, separated by commas; `all`: all.", words,
           "done", "Sets CUDA_VISIBLE_DEVICES; one process per GPU unless the number is given.", ("--gpu_ids",),
           key="gpu_ids", variable="CUDA_VISIBLE_DEVICES", default="all", job="resources.gpus_per_node"),
)  # fmt: skip
_RESOURCE = (
    Option("mixed_precision", "resource", "Precision of forward and backward.", choice(*PRECISIONS), "done",
           "Sets the precision for the script.", ("--mixed_precision",),
           key="mixed_precision", variable="ACCELERATE_MIXED_PRECISION", setting="mixed_precision",
           choices=PRECISIONS, default="no", job="runtime.mixed_precision"),
    Option("num_processes", "resource", "Number of processes, over all machines.", whole(1), "done",
           "Starts that many, divided among the machines.", ("--num_processes",), key="num_processes",
           job="resources.procs_per_node"),
    Option("num_machines", "resource", "Number of machines.", whole(1), "done",
           "Joins as many `orc launch`, one on each machine.", ("--num_machines",), key="num_machines", default=1,
           job="resources.nodes"),
    Option("num_cpu_threads_per_process", "resource", "CPU threads of each process.", whole(1), "done",
           "Sets OMP_NUM_THREADS.", ("--num_cpu_threads_per_process",), key="num_cpu_threads_per_process",
           variable="OMP_NUM_THREADS", job="resources.cpus_per_proc"),
    Option("enable_cpu_affinity", "resource", "Keep each process on the cores next to its GPU.", truth, "done",
           "Each process stays on the cores of its GPU's NUMA node; nothing changes without a GPU.",
           ("--enable_cpu_affinity",), switch=True, key="enable_cpu_affinity", variable="ACCELERATE_CPU_AFFINITY",
           job="env.ACCELERATE_CPU_AFFINITY"),
)  # fmt: skip
_PARADIGM = (
    Option("use_fsdp", "paradigm", "Shard the model over the processes (FSDP).", truth, "done",
           "Trains with sharded data parallelism.", ("--use_fsdp",), switch=True, variable="ACCELERATE_USE_FSDP",
           job="runtime.fsdp"),
    Option("use_deepspeed", "paradigm", "Train with DeepSpeed.", truth, "done", "Trains with DeepSpeed.",
           ("--use_deepspeed",), switch=True, variable="ACCELERATE_USE_DEEPSPEED", job="runtime.deepspeed"),
    Option("use_parallelism_config", "paradigm", "Lay out the processes by the sizes below.", truth, "done",
           "Trains with tensor, context or sequence parallelism beside data parallelism.",
           ("--use_parallelism_config",), switch=True, variable="ACCELERATE_USE_PARALLELISM_CONFIG",
           job="runtime.parallelism"),
    Option("use_megatron_lm", "paradigm", "Train with Megatron-LM.", truth, "done", "Trains with Megatron-LM.",
           ("--use_megatron_lm",), switch=True, variable="ACCELERATE_USE_MEGATRON_LM", job="runtime.megatron"),
)  # fmt: skip
_MACHINES = (
    Option("machine_rank", "machines", "Number of this machine, from 0.", whole(0), "done",
           "Numbers the processes of this machine after those of the machines before it.", ("--machine_rank",),
           key="machine_rank", default=0, job="resources.nodes"),
    Option("main_process_ip", "machines", "Address of machine 0.", text, "done",
           "MASTER_ADDR of all processes.", ("--main_process_ip",), key="main_process_ip", variable="MASTER_ADDR",
           job="resources.nodes"),
    Option("main_process_port", "machines", "Port of machine 0.", whole(0, 65535), "done",
           "MASTER_PORT of all processes; on one machine a free port is taken without it, and for 0.",
           ("--main_process_port",), key="main_process_port", variable="MASTER_PORT", job="resources.nodes"),
    Option("same_network", "machines", "The machines share a local network.", truth, "ignored",
           "Nothing: processes connect to the address and port of machine 0 in either case.", ("--same_network",),
           switch=True, key="same_network", default=True),
    Option("role", "machines", "Name of the processes' role.", text, "done",
           "ROLE_NAME of all processes, so ROLE_RANK and ROLE_WORLD_SIZE count all of them.", ("--role",),
           variable="ROLE_NAME", default="default"),
    Option("rdzv_backend", "machines", "Rendezvous of the machines: static, c10d, etcd or etcd-v2.",
           choice("static", "c10d", "etcd", "etcd-v2"), "done",
           "static: at the address of machine 0. Another: torchrun starts the processes, and they meet by it at that "
           "address and port; `--machine_rank` may be left out.", ("--rdzv_backend",), key="rdzv_backend",
           default="static", job="launcher.options.rdzv_backend"),
    Option("rdzv_conf", "machines", "Settings of the rendezvous: key=value,key=value.", mapping, "done",
           "torchrun starts the processes, with these settings.", ("--rdzv_conf",), key="rdzv_conf",
           job="launcher.options.rdzv_conf"),
    Option("max_restarts", "machines", "Start all processes again after a failure, this often.", whole(0), "done",
           "Starts them again.", ("--max_restarts",), key="max_restarts", default=0,
           job="launcher.options.max_restarts"),
    Option("monitor_interval", "machines", "Seconds between two checks of the processes.", number(0), "done",
           "torchrun starts the processes, and looks at them so often; without it their end is noticed at once.",
           ("--monitor_interval",), key="monitor_interval", job="launcher.options.monitor_interval"),
)  # fmt: skip
_LOGS = (
    Option("tee", "logs", "Streams that also go to a file: 0 none, 1 stdout, 2 stderr, 3 both; or RANK:N,RANK:N.",
           text, "done", "Writes rank-N.log in the log directory, and the terminal as well.", ("-t", "--tee")),
    Option("redirects", "logs", "Streams that go only to a file; values as for --tee.", text, "done",
           "Writes rank-N.log in the log directory, and nothing on the terminal.", ("-r", "--redirects")),
    Option("log_dir", "logs", "Folder of one log file per process.", text, "done",
           "Both streams of every process go there too, unless --tee or --redirects choose.", ("--log_dir",)),
)  # fmt: skip
_MPI = (
    Option("mpirun_hostfile", "mpi", "Start the processes by mpirun, on the hosts of this file.", text, "done",
           "Starts `mpirun` with that host file; each of its processes joins.", ("--mpirun_hostfile",),
           key="mpirun_config.mpirun_hostfile", job="launcher: mpirun"),
    Option("mpirun_ccl", "mpi", "oneCCL worker threads.", whole(1), "done", "Sets CCL_WORKER_COUNT.",
           ("--mpirun_ccl",), key="mpirun_config.mpirun_ccl", variable="CCL_WORKER_COUNT",
           job="launcher.options.ccl_worker_count"),
)  # fmt: skip
_DYNAMO = (
    Option("dynamo_backend", "dynamo", "Back end of torch.compile for prepared models.", text, "done",
           "Compiles prepared models.", ("--dynamo_backend",), key="dynamo_config.dynamo_backend",
           keys=("dynamo_backend",), variable="ACCELERATE_DYNAMO_BACKEND", setting="dynamo_backend", default="no",
           job="runtime.dynamo_backend"),
    Option("dynamo_mode", "dynamo", "Mode of torch.compile.",
           choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"), "done",
           "Sets it.", ("--dynamo_mode",), key="dynamo_config.dynamo_mode", variable="ACCELERATE_DYNAMO_MODE",
           setting="dynamo_mode", default="default", job="runtime.dynamo_mode"),
    Option("dynamo_use_fullgraph", "dynamo", "torch.compile raises instead of breaking the graph.", truth, "done",
           "Sets it.", ("--dynamo_use_fullgraph",), switch=True, key="dynamo_config.dynamo_use_fullgraph",
           variable="ACCELERATE_DYNAMO_USE_FULLGRAPH", setting="dynamo_use_fullgraph",
           job="runtime.dynamo_use_fullgraph"),
    Option("dynamo_use_dynamic", "dynamo", "torch.compile expects varying shapes.", truth, "done", "Sets it.",
           ("--dynamo_use_dynamic",), switch=True, key="dynamo_config.dynamo_use_dynamic",
           variable="ACCELERATE_DYNAMO_USE_DYNAMIC", setting="dynamo_use_dynamic", job="runtime.dynamo_use_dynamic"),
    Option("dynamo_use_regional_compilation", "dynamo", "Compile the repeated blocks of a model.", truth, "refused",
           "A script says it: TorchDynamoPlugin(use_regional_compilation=True).",
           ("--dynamo_use_regional_compilation",), switch=True, key="dynamo_config.dynamo_use_regional_compilation"),
)  # fmt: skip
_TPU = (
    Option("tpu_cluster", "tpu", "Train on a TPU pod.", truth, "job", _TPU_JOB, ("--tpu_cluster",), switch=True,
           key="tpu_use_cluster", job="resources.nodes"),
    Option("tpu_use_sudo", "tpu", "Run the script with sudo on each worker.", truth, "job",
           "a cluster of kind tpu says it: `sudo: true`", ("--tpu_use_sudo",), switch=True, key="tpu_use_sudo",
           job="clusters.yaml: sudo"),
    Option("vm", "tpu", "Names of single workers.", words, "job",
           "a cluster of kind ssh has such machines as `hosts`, and `launcher: xla` trains on their chips", ("--vm",),
           key="tpu_vm", job="clusters.yaml: hosts"),
    Option("env", "tpu", "Variables for the script: NAME=VALUE. Repeatable.", texts, "done",
           "Sets them for the script, on every machine that runs the command.", ("--env",), key="tpu_env", job="env"),
    Option("main_training_function", "tpu", "Function of the script to run on a TPU.", text, "done",
           "Has an effect on TPUs alone: in a job each process calls this function. Without one, and for `main`, it "
           "runs the whole script.", ("--main_training_function",), key="main_training_function", default="main",
           job="launcher.options.function"),
    Option("downcast_bf16", "tpu", "With bf16 on a TPU: double becomes float32, and not bfloat16 as float does.",
           truth, "done", "Has an effect on TPUs alone.", ("--downcast_bf16",), switch=True, key="downcast_bf16",
           variable="XLA_DOWNCAST_BF16", setting="downcast_bf16", job="runtime.downcast_bf16"),
    Option("tpu_name", "tpu", "Name of the TPU.", text, "job", _TPU_JOB, key="tpu_name", job="clusters.yaml: tpu"),
    Option("tpu_zone", "tpu", "Zone of the TPU.", text, "job", _TPU_JOB, key="tpu_zone", job="clusters.yaml: zone"),
    Option("command_file", "tpu", "File of commands for `tpu-config`.", text, "ignored",
           "Nothing at a launch: `orc tpu-config` reads it.", key="command_file"),
    Option("commands", "tpu", "Commands for `tpu-config`.", texts, "ignored",
           "Nothing at a launch: `orc tpu-config` reads them.", key="commands"),
)  # fmt: skip
_SAGE = (
    *(
        Option(name, "sagemaker", f"{what} of a launch on Amazon SageMaker.", text, "done",
               "Signs the requests of this submission; it is written nowhere, and leaves the command line at once. "
               "Later commands take the environment, or a profile.", (f"--{name}",), variable=name.upper(),
               job=f"environment: {name.upper()}")
        for name, what in (("aws_access_key_id", "Access key"), ("aws_secret_access_key", "Secret key"))
    ),
    *(
        Option(name, "sagemaker", f"{what}.", parse, "done", _SAGEMAKER, key=name, job=f"clusters.yaml: {name}")
        for name, what, parse in (
            ("base_job_name", "Prefix of the names of jobs", text),
            ("ec2_instance_type", "Instance type; `local` runs in a container here", text),
            ("iam_role_name", "Role of the job", text),
            ("image_uri", "Image of the container", text),
            ("profile", "AWS profile", text),
            ("region", "AWS region", text),
            ("py_version", "Python of the container", text),
            ("pytorch_version", "PyTorch of the container", text),
            ("transformers_version", "Transformers of the container", text),
            ("sagemaker_inputs_file", "File that lists the inputs", text),
            ("sagemaker_metrics_file", "File that lists the metrics", text),
            ("additional_args", "Further arguments of the estimator", dict),
        )
    ),
)  # fmt: skip
_FILE = (
    Option("compute_environment", "file", "LOCAL_MACHINE or AMAZON_SAGEMAKER.", choice(*COMPUTE_ENVIRONMENTS), "done",
           "LOCAL_MACHINE launches here; with a file of Amazon SageMaker the launch is a job there.",
           key="compute_environment", choices=COMPUTE_ENVIRONMENTS, default="LOCAL_MACHINE"),
    Option("distributed_type", "file", "The kind of run.", choice(*DISTRIBUTED_TYPES), "done",
           "FSDP, DEEPSPEED, MEGATRON_LM, MULTI_GPU and TPU are the flags of these names; NO is one process; "
           "MULTI_CPU trains on CPUs.", key="distributed_type", choices=DISTRIBUTED_TYPES, default="NO"),
)  # fmt: skip

_ALL = (
    *(*_LAUNCH, *_HARDWARE, *_RESOURCE, *_PARADIGM, *_MACHINES, *_LOGS, *_MPI, *_DYNAMO, *_TPU),
    *(*FEATURES, *_SAGE, *_FILE),
)
OPTIONS: Mapping[str, Option] = {one.name: one for one in _ALL}
CONFIG_KEYS: Mapping[str, Option] = {
    path: one for one in OPTIONS.values() for path in (one.key, *one.keys) if path is not None
}
FLAGS: Mapping[str, Option] = {flag: one for one in OPTIONS.values() for flag in one.flags}
# Mappings inside a file, by their key: what has a dotted path below it.
SECTIONS = tuple(dict.fromkeys(path.partition(".")[0] for path in CONFIG_KEYS if "." in path))


def of_group(group: str) -> list[Option]:
    """Return the options of a *group* of `GROUPS`."""
    return [one for one in OPTIONS.values() if one.group == group]


__all__ = ["CONFIG_KEYS", "FLAGS", "GROUPS", "OPTIONS", "PARADIGMS", "SECTIONS", "Option", "of_group"]
